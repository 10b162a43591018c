from collections import Counter

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from ragen_apo.environments.base import Reply, TextEnvironment, make_environment
from ragen_apo.environments.contract import play
from ragen_apo.environments.frozen_lake import (
    FrozenLakeRewards,
    best_plays,
    moves_to_goal,
    neighbour,
    outcomes,
    with_player,
    without_player,
)
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task, make_task

LAKE = ("____", "_O_O", "___O", "O__G")
"""Gymnasium's own 4x4 map, SFFF FHFH FFFH HFFG."""
GYMNASIUM_ACTIONS = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}


def task_of(lake: tuple[str, ...]) -> Task:
    return make_task(
        environment="frozen_lake",
        instruction="Cross the ice to the goal.",
        split="train",
        category="",
        payload={"map": list(lake)},
    )


@pytest.mark.parametrize("certainty", [1 / 3, 0.8, 1.0])
def test_every_transition_is_gymnasiums(certainty: float) -> None:
    description = ["SFFF", "FHFH", "FFFH", "HFFG"]
    theirs = FrozenLakeEnv(desc=description, is_slippery=certainty < 1, success_rate=certainty)
    for row in range(4):
        for column in range(4):
            if LAKE[row][column] != "_":
                continue
            for direction, number in GYMNASIUM_ACTIONS.items():
                expected: Counter[int] = Counter()
                for probability, state, _, _ in theirs.P[row * 4 + column][number]:
                    expected[state] += probability
                ours: Counter[int] = Counter()
                for probability, towards in outcomes(direction, certainty):
                    there = neighbour((row, column), towards, 4)
                    ours[there[0] * 4 + there[1]] += probability
                for state in expected | ours:
                    assert ours[state] == pytest.approx(expected[state])


@pytest.mark.slow
def test_slips_happen_as_often_as_the_options_say() -> None:
    environment = make_environment("frozen_lake", {"success_rate": 0.5})
    places: Counter[str] = Counter()
    for seed in range(4000):
        environment.reset(task_of(LAKE), seed=seed)
        environment.step("Right")
        places[environment.state_key().split(":")[-1]] += 1
    # Right with 1/2; Up stays at the border and Down goes down, with 1/4 each. 3 sigma is 0.024.
    assert places["0,1"] / 4000 == pytest.approx(0.5, abs=0.024)
    assert places["0,0"] / 4000 == pytest.approx(0.25, abs=0.021)
    assert places["1,0"] / 4000 == pytest.approx(0.25, abs=0.021)


def test_the_way_to_the_goal_and_the_way_into_a_hole() -> None:
    environment = make_environment("frozen_lake", {"slippery": False})
    first, _ = environment.reset(task_of(LAKE), seed=0)
    assert first.splitlines()[1] == "P _ _ _"
    environment.step("Down || Down || Right")
    observation, reward, terminated, truncated, info = environment.step("Down || Right || Right")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert observation.splitlines()[-1] == "O _ _ *"
    environment.reset(task_of(LAKE), seed=0)
    observation, reward, terminated, _, info = environment.step("Right || Down || Left")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert observation.splitlines()[1] == "_ X _ O"


def test_the_return_range_counts_every_step_on_the_ice() -> None:
    scheme = FrozenLakeRewards(ice=-0.1, hole=-1.0, invalid_action=-0.5)
    # Four steps on the ice, then the hole, and a part that was invalid in both turns.
    low, high = scheme.return_range(max_actions=5, max_turns=2)
    assert low == pytest.approx(4 * -0.1 - 1.0 + 2 * -0.5)
    assert high == pytest.approx(1.0)


def test_the_moves_of_a_shortest_way_to_the_goal() -> None:
    assert moves_to_goal(("_O_", "O__", "__G")) is None
    assert moves_to_goal(("O__", "___", "__G")) is None
    assert moves_to_goal(("___", "___", "__G")) == 4
    assert moves_to_goal(("_O___", "_O_O_", "_O_O_", "_O_O_", "___OG")) == 16


@pytest.mark.parametrize("most", [8, 10, 100])
def test_every_lake_can_be_crossed_within_an_episode(most: int) -> None:
    options = {"size": 5, "frozen_share": 0.6, "slippery": False, "num_train_tasks": 60}
    environment = make_environment("frozen_lake", {**options, "max_actions": most})
    needed = [moves_to_goal(tuple(each.payload["map"])) for each in environment.tasks("train")]
    assert max(each or 0 for each in needed) == min(most, 10)
    assert None not in needed
    for task in environment.tasks("train")[:10]:
        assert play(environment, task, environment.scripted_policies()["oracle"]()).success


def test_reading_a_map_takes_the_player_off() -> None:
    assert without_player(with_player(LAKE, (1, 1))) == (LAKE, (1, 1))
    assert without_player(LAKE) is None


def small_lakes() -> TextEnvironment:
    """There are few different maps of this size."""
    return make_environment("frozen_lake", {"size": 3, "num_train_tasks": 4, "num_test_tasks": 2})


@pytest.mark.parametrize("lake", [("_O_", "O__", "__G"), ("____", "____"), ("_?_", "___", "__G")])
def test_a_map_that_is_none_is_refused(lake: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="frozen_lake cannot set up task"):
        small_lakes().reset(task_of(lake), seed=0)


def test_a_lake_that_cannot_be_crossed_in_an_episode_is_refused() -> None:
    wide = {"size": 8, "num_train_tasks": 4, "num_test_tasks": 2}
    with pytest.raises(ConfigError, match=r"size 8 takes at least 14 actions, .* has 13 at most"):
        make_environment("frozen_lake", {**wide, "max_actions": 13})
    with pytest.raises(ConfigError, match="raise max_actions, max_turns or max_actions_per_turn"):
        make_environment("frozen_lake", {**wide, "max_turns": 2})
    make_environment("frozen_lake", {**wide, "max_actions": 14})


@pytest.mark.parametrize(
    ("options", "is_one_state"),
    [
        ({"slippery": False}, True),
        ({"slippery": False, "max_actions": 7}, False),  # the way that is left differs
        ({"success_rate": 1.0}, False),  # the next slip would be another draw
    ],
)
def test_the_number_of_actions_is_in_the_key_where_something_depends_on_it(
    options: dict[str, object], is_one_state: bool
) -> None:
    environment = make_environment("frozen_lake", options)
    keys = []
    for action in ("Down", "Up || Up || Down"):
        environment.reset(task_of(LAKE), seed=0)
        environment.step(action)
        keys.append(environment.state_key())
    assert (keys[0] == keys[1]) is is_one_state


def test_the_best_plays_are_a_shortest_way_where_nothing_slips() -> None:
    plays = best_plays(LAKE, 1.0, max_repeats=1, num_turns=16)
    cell, num_steps = (0, 0), 0
    while cell != (3, 3):
        cell = neighbour(cell, plays[-1][cell][0], 4)
        num_steps += 1
    assert num_steps == 6


def test_slippery_is_declared_as_chance() -> None:
    assert not make_environment("frozen_lake", {}).properties.deterministic
    assert make_environment("frozen_lake", {"slippery": False}).properties.deterministic
    assert make_environment("frozen_lake", {"success_rate": 1.0}).properties.deterministic


def reply_to(observation: str, policy: str, **options: object) -> Reply:
    """What a scripted policy answers to a first observation."""
    environment = make_environment("frozen_lake", {"slippery": False, **options})
    player = environment.scripted_policies()[policy]()
    player.begin(task_of(LAKE), seed=0)
    return player.act(observation)


def test_thoughts_name_what_the_surroundings_show_up_to_the_way_that_is_taken() -> None:
    environment = make_environment("frozen_lake", {"slippery": False, "surroundings": True})
    environment.reset(task_of(LAKE), seed=0)
    observation = environment.step("Right || Right")[0]
    assert observation.splitlines()[-2:] == [
        "Up: border. Down: ice. Left: ice. Right: ice.",
        "goal: 3 down, 1 right.",
    ]
    above_a_hole = environment.step("Right")[0]
    options = {"surroundings": True, "max_actions_per_turn": 1}
    reply = reply_to(above_a_hole, "oracle", **options)
    assert (reply.thought, reply.action) == ("Down: hole. Right: border. Left: ice.", "Left")
    without = reply_to("\n".join(above_a_hole.splitlines()[:-2]), "oracle", max_actions_per_turn=1)
    assert (without.thought, without.action) == ("at 0 3", "Left")


def test_the_teacher_goes_into_holes_and_reaches_the_goal_now_and_then() -> None:
    options = {"slippery": False, "surroundings": True, "max_actions_per_turn": 1, "max_turns": 8}
    environment = make_environment("frozen_lake", options)
    ends: Counter[bool] = Counter()
    for task in environment.tasks("train")[:100]:
        player = environment.scripted_policies()["teacher"]()
        player.begin(task, seed=0)
        observation, _ = environment.reset(task, seed=0)
        over, info = False, {}
        while not over:
            observation, _, terminated, truncated, info = environment.step(
                player.act(observation).action
            )
            over = terminated or truncated
        ends[info["success"]] += 1
    assert 20 <= ends[True] <= 60, ends
