import itertools
from collections import deque

import pytest

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.grid_text import DIRECTIONS, symmetric_key
from ragen_apo.environments.play import play
from ragen_apo.environments.sokoban import SokobanRewards
from ragen_apo.environments.sokoban_levels import (
    LevelDemands,
    Room,
    State,
    draw_board,
    draw_level,
    move,
    read_level,
    solve,
)
from ragen_apo.errors import ConfigError
from ragen_apo.seeding import generator
from ragen_apo.types import Task, make_task

CORRIDOR = ("######", "#PX_O#", "######")
TWO_BOXES = ("######", "#PXO_#", "#_XO_#", "######")


def task_of(board: tuple[str, ...]) -> Task:
    return make_task(
        environment="sokoban",
        instruction="Push the box onto the target.",
        split="train",
        category="",
        payload={"board": list(board)},
    )


def fewest_pushes(room: Room, start: State) -> int | None:
    """By breadth-first search over single moves, 0 for a step and 1 for a push."""
    fewest = {start: 0}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state.boxes == room.targets:
            return fewest[state]
        for direction in DIRECTIONS:
            after = move(room, state, direction)
            is_push = after.boxes != state.boxes
            if fewest[state] + is_push < fewest.get(after, 10**6):
                fewest[after] = fewest[state] + is_push
                (queue.append if is_push else queue.appendleft)(after)
    return None


@pytest.mark.parametrize("num_boxes", [1, 2])
def test_generated_levels_meet_their_demands_and_the_solver_counts_the_fewest_pushes(
    num_boxes: int,
) -> None:
    demands = LevelDemands(
        num_rows=6, num_columns=7, num_boxes=num_boxes, min_pushes=4, max_moves=25
    )
    boards = [draw_level(demands, generator("test", number)) for number in range(150)]
    levels = [read_level(board) for board in boards if board]
    assert len(levels) > 10
    for room, state in levels:
        solution = solve(room, state)
        assert solution is not None
        assert solution.num_pushes == fewest_pushes(room, state) >= 4
        assert len(solution.moves) <= 25
        assert len(state.boxes) == num_boxes
        assert not state.boxes & room.targets
        played = state
        for direction in solution.moves:
            played = move(room, played, direction)
        assert played.boxes == room.targets


def test_the_solver_finds_nothing_where_brute_force_finds_nothing() -> None:
    """All ways to put a player and two boxes into a small room."""
    cells = [row * 5 + column for row in range(1, 4) for column in range(1, 4)]
    room = Room(5, 5, frozenset(range(25)) - set(cells), frozenset({6, 13}))
    num_unsolvable = 0
    for first, second, player in itertools.permutations(cells, 3):
        if first < second:
            state = State(player, frozenset({first, second}))
            solution, fewest = solve(room, state), fewest_pushes(room, state)
            assert (solution.num_pushes if solution else None) == fewest
            num_unsolvable += fewest is None
    assert num_unsolvable > 50


def test_a_board_is_read_back_as_it_was_drawn() -> None:
    for board in (CORRIDOR, TWO_BOXES, ("####", "#S*#", "#X_#", "####")):
        assert draw_board(*read_level(board)) == board


@pytest.mark.parametrize(
    "board",
    [
        (),
        ("####", "#PX#", "####"),  # a box without a target
        ("#####", "#XO_#", "#####"),  # nobody there
        ("#####", "#PXO_", "#####"),  # a hole in the wall
        ("#####", "#PXO#", "####"),
        ("#####", "#PX?#", "#####"),
    ],
)
def test_a_board_that_is_no_level_is_refused(board: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="board"):
        read_level(board)
    with pytest.raises(ConfigError, match="sokoban cannot set up task"):
        make_environment("sokoban", {}).reset(task_of(board), seed=0)


def test_rewards_are_those_of_the_configuration_and_the_last_box_ends_the_episode() -> None:
    environment = make_environment("sokoban", {})
    first, _ = environment.reset(task_of(CORRIDOR), seed=0)
    assert first.splitlines()[1:] == ["# # # # # #", "# P X _ O #", "# # # # # #"]
    observation, reward, terminated, _, info = environment.step("right||Left || RIGHT")
    # A push, a step back and a step forward.
    assert reward == pytest.approx(-0.3)
    assert observation.splitlines()[1] == "# _ P X O #"
    assert not terminated
    assert info == {}
    observation, reward, terminated, truncated, info = environment.step("Right || Up || Up")
    assert reward == pytest.approx(-0.1 + 1.0 + 10.0)  # the actions after the end do not count
    assert (terminated, truncated, info) == (True, False, {"success": True})
    assert observation.splitlines()[1] == "# _ _ P * #"


def test_pushing_a_box_off_its_target_costs_what_putting_it_there_earned() -> None:
    environment = make_environment("sokoban", {"num_boxes": 2})
    environment.reset(task_of(TWO_BOXES), seed=0)
    assert environment.step("Right")[1] == pytest.approx(0.9)  # -0.1 + 1
    assert environment.step("Right")[1] == pytest.approx(-1.1)  # -0.1 - 1: pushed beyond it


def test_invalid_parts_are_skipped_flagged_told_and_charged_once() -> None:
    environment = make_environment("sokoban", {"max_actions_per_turn": 2})
    environment.reset(task_of(CORRIDOR), seed=0)
    observation, reward, _, _, info = environment.step("fly || Right || dig")
    assert info["invalid_action"] is True
    assert observation.startswith(
        "Invalid action. Use Up, Down, Left, Right, up to 2 joined by ||."
    )
    assert reward == pytest.approx(-0.1 - 0.1)  # one action, one turn with invalid parts
    observation, _, _, _, info = environment.step("Up || Up || Right")
    assert set(info["flags"]) == {"too_many_actions", "no_effect"}
    assert "Only the first 2 actions were carried out." in observation


def test_the_limit_of_actions_truncates_in_the_middle_of_a_turn() -> None:
    environment = make_environment("sokoban", {"max_actions": 3})
    environment.reset(task_of(CORRIDOR), seed=0)
    _, reward, terminated, truncated, info = environment.step("Up || Up || Up || Right || Right")
    assert reward == pytest.approx(-0.3)
    assert (terminated, truncated, info["success"]) == (False, True, False)


def test_the_return_range_is_reached() -> None:
    scheme = SokobanRewards(invalid_action=-0.5)
    low, high = scheme.return_range(num_boxes=1, max_actions=3, max_turns=2)
    assert low == pytest.approx(3 * -0.1 + 2 * -0.5)
    assert high == pytest.approx(-0.1 + 1 + 10)
    generous = SokobanRewards(box_off_target=0.5, all_boxes=0.0, invalid_action=0.0)
    # One box on, off and on again, then the other: 0.9 + 0.4 + 0.9 + 0.9.
    assert generous.return_range(num_boxes=2, max_actions=4, max_turns=4)[1] == pytest.approx(3.1)


def test_no_level_is_a_turned_or_mirrored_image_of_another_in_either_split() -> None:
    environment = make_environment("sokoban", {})
    keys = [
        symmetric_key(task.payload["board"])
        for split in ("train", "test")
        for task in environment.tasks(split)
    ]
    assert len(set(keys)) == len(keys) == 500


def test_demands_that_no_level_meets_are_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="ask for fewer tasks"):
        make_environment("sokoban", {"num_rows": 4, "num_columns": 4, "min_pushes": 9})
    with pytest.raises(ConfigError, match="min_pushes"):
        make_environment("sokoban", {"min_pushes": 30})


def test_the_same_level_in_every_rendering_is_the_same_task_and_another_version() -> None:
    renderings = ("grid", "words", "coordinates", "grid_and_coordinates")
    worlds = [make_environment("sokoban", {"observation": choice}) for choice in renderings]
    for world in worlds:
        assert world.tasks("train") == worlds[0].tasks("train")
    assert len({world.properties.version for world in worlds}) == 4
    more = make_environment("sokoban", {"num_train_tasks": 500, "num_test_tasks": 50})
    assert more.properties.version == worlds[0].properties.version
    assert list(more.tasks("train"))[:400] == list(worlds[0].tasks("train"))


def test_the_teacher_is_mediocre_and_the_baselines_lie_where_they_should() -> None:
    environment = make_environment("sokoban", {})
    success = {}
    for name, make_policy in environment.scripted_policies().items():
        policy, num_wins = make_policy(), 0
        for seed, task in enumerate(environment.tasks("test")):
            policy.begin(task, seed=seed)
            observation, _ = environment.reset(task, seed=seed)
            ended, info = False, {}
            while not ended:
                observation, _, terminated, truncated, info = environment.step(
                    policy.act(observation).action
                )
                ended = terminated or truncated
            num_wins += info["success"]
        success[name] = num_wins / len(environment.tasks("test"))
    assert success["random"] < 0.2 < success["teacher"] < success["oracle"] == 1.0
    assert success["heuristic"] < 1.0


def test_a_person_can_play() -> None:
    lines, shown = iter(["Right || Right", "quit"]), []
    world = make_environment("sokoban", {})
    episode = play(world, task_of(CORRIDOR), read=lambda _: next(lines), write=shown.append)
    assert episode.success
    assert shown[0] == world.properties.rules
