"""The environment `textworld` with the real TextWorld and ALFWorld: `make test-interop`."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from benchmarks.households import KINDS, KITCHENS, make_household

import ragen_apo
from ragen_apo.config import RunConfig
from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.contract import check_environment
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.types import Task

for _module in ("alfworld", "textworld"):
    pytest.importorskip(_module, reason=f"{_module} is not installed; run `make test-interop`")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "text_adventures.md"


@pytest.fixture(scope="module")
def adventures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few games that the page's script makes."""
    folder = tmp_path_factory.mktemp("adventures")
    text = _block("python").replace("range(240)", "range(4)").replace("range(60)", "range(2)")
    (folder / "make_games.py").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "make_games.py"], cwd=folder, check=True)
    return folder / "games"


@pytest.fixture(scope="module")
def households(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("households")
    for index, kind in enumerate(KINDS):
        make_household(folder / "train", kind, index)
    make_household(folder / "valid_unseen", KINDS[0], 100)
    return folder


def test_the_pages_configuration_for_alfworld_is_one() -> None:
    config = RunConfig.model_validate(yaml.safe_load(_block("yaml")))
    assert config.environment.name == "textworld"


def _block(language: str, number: int = 0) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(found) > number
    return found[number]


def played(environment: TextEnvironment, task: Task, policy: str) -> tuple[float, bool, list[str]]:
    """Return, success and observations of an episode."""
    player = environment.scripted_policies()[policy]()
    player.begin(task, seed=3)
    observation, _ = environment.reset(task, seed=3)
    seen, total = [observation], 0.0
    while True:
        observation, reward, terminated, truncated, info = environment.step(
            player.act(observation).action
        )
        seen.append(observation)
        total += reward
        if terminated or truncated:
            return total, info["success"], seen


@pytest.mark.parametrize("games", ["adventures", "households"])
def test_the_promises_are_kept(games: str, request: pytest.FixtureRequest) -> None:
    options = {"data": request.getfixturevalue(games), "max_turns": 8}
    found = check_environment(lambda: make_environment("textworld", options))
    assert {promise: problems for promise, problems in found.items() if problems} == {}


def test_the_oracle_wins_every_adventure_and_a_win_pays_one(adventures: Path) -> None:
    environment = make_environment("textworld", {"data": adventures})
    for task in environment.tasks("train"):
        total, success, seen = played(environment, task, "oracle")
        assert (total, success) == (1.0, True)
        assert seen[0].startswith(f"TASK: {task.instruction}\n-= ")
        assert re.search(r"\nPossible: .*go ", seen[0])
        assert "Possible" not in seen[-1]


def test_where_textworld_knows_no_solution_its_walkthrough_is_followed(tmp_path: Path) -> None:
    """Where things have to be dropped."""
    game = tmp_path / "train" / "game.z8"
    options = ["--recipe", "2", "--take", "1", "--go", "6", "--drop", "--open", "--seed", "2"]
    make = [sys.executable, Path(sys.executable).with_name("tw-make"), "tw-cooking"]
    subprocess.run([*make, *options, "--output", game], check=True)
    environment = make_environment("textworld", {"data": tmp_path})
    (task,) = environment.tasks("train")
    total, success, _ = played(environment, task, "oracle")
    assert (total, success) == (pytest.approx(1.0), True)


@pytest.mark.parametrize("kind", KINDS)
def test_alfworlds_expert_does_the_task_in_our_environment(kind: str, households: Path) -> None:
    """With two objects as well, of which it puts down one only in its own wrapper."""
    environment = make_environment("textworld", {"data": households})
    (task,) = (task for task in environment.tasks("train") if task.category == kind)
    total, success, seen = played(environment, task, "oracle")
    assert (total, success) == (1.0, True)
    assert seen[0].startswith(
        f"TASK: {task.instruction}\nYou are in the middle of a room. Looking quickly around you, "
        "you see a "
    )


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="textworld 1.7.0 raises a NameError there; ours does not"
)
def test_alfworld_itself_says_the_same(households: Path) -> None:
    """Random commands in its own wrappers and in ours, and what an episode is worth."""
    import textworld  # pyright: ignore[reportMissingImports]
    from alfworld.agents.environment.alfred_tw_env import (  # pyright: ignore[reportMissingImports]
        AlfredDemangler,
    )

    environment = make_environment("textworld", {"data": households, "commands": False})
    draw = random.Random(0)
    for task in environment.tasks("train"):
        (path,) = households.glob(f"train/{task.category}-*/*/*.tw-pddl")
        wanted = textworld.EnvInfos(won=True, admissible_commands=True)
        theirs = textworld.start(str(path), wanted, [AlfredDemangler])
        state = theirs.reset()
        first, _ = environment.reset(task, seed=0)
        assert state.feedback == (
            "-= Welcome to TextWorld, ALFRED! =-\n\n{1}\n\nYour task is to: {0}".format(
                *first.removeprefix("TASK: ").split("\n", 1)
            )
        )
        for _ in range(15):
            command = draw.choice([one for one in state["admissible_commands"] if one != "help"])
            state, reward, done = theirs.step(command)
            ours = environment.step(command)
            assert ours[:3] == ("\n".join(state.feedback.split("\n\n")).strip(), reward, done)


def test_a_game_that_is_played_again_is_neither_parsed_nor_translated(
    households: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And TextWorld's own functions are back after each command, for others in the process."""
    import fast_downward.translate.translate as translation  # pyright: ignore[reportMissingImports]
    import tatsu.contexts  # pyright: ignore[reportMissingImports]
    from textworld.envs.pddl import textgen  # pyright: ignore[reportMissingImports]

    environment = make_environment("textworld", {"data": households, "max_turns": 4})
    task = environment.tasks("train")[0]
    own = textgen.copy_context
    before = played(environment, task, "random")
    assert textgen.copy_context is own
    costly = []
    for owner, name in ((tatsu.contexts.ParseContext, "parse"), (translation, "pddl_to_sas")):
        monkeypatch.setattr(owner, name, lambda *_, **__: costly.append(1))
    assert played(environment, task, "random") == before
    assert costly == []


def test_a_game_is_translated_once_whatever_is_played_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step plays many games, and comes back to each."""
    import fast_downward.translate.translate as translation  # pyright: ignore[reportMissingImports]

    for seed in range(12):
        make_household(tmp_path / "train", KINDS[0], seed, rooms=range(401, 431))
    environment = make_environment("textworld", {"data": tmp_path, "max_turns": 2})
    before = [played(environment, task, "random") for task in environment.tasks("train")]
    translations = []
    monkeypatch.setattr(translation, "pddl_to_sas", lambda *_: translations.append(1))
    assert [played(environment, task, "random") for task in environment.tasks("train")] == before
    assert translations == []


def test_what_is_no_command_costs_a_turn_and_changes_nothing(adventures: Path) -> None:
    environment = make_environment("textworld", {"data": adventures, "max_turns": 4})
    environment.reset(environment.tasks("train")[0], seed=0)
    before = environment.state_key().rpartition(":")[2]
    for text in ("undo", "quit", "look. look"):
        observation, reward, terminated, _, info = environment.step(text)
        assert observation.startswith("Nothing happens.\nPossible: ")
        assert (reward, terminated, info) == (0.0, False, {"invalid_action": True})
    assert environment.state_key().rpartition(":")[2] == before
    assert environment.step("take " + "9" * 100_000)[3]  # Frotz would crash


def test_a_grammar_with_code_is_refused_before_it_runs(tmp_path: Path) -> None:
    path = make_household(tmp_path / "train", KINDS[0], 0)
    mark = tmp_path / "ran"
    code = f"{{open('{mark}', 'w') and r.name}}"
    text = path.read_text("utf-8").replace("{r.name or r.id}", code)
    path.write_text(text, encoding="utf-8")
    environment = make_environment("textworld", {"data": tmp_path})
    with pytest.raises(EnvironmentDataError, match="would run Python code: .open"):
        environment.reset(environment.tasks("train")[0], seed=0)
    assert not mark.exists()


@pytest.fixture
def kitchen(tmp_path: Path) -> TextEnvironment:
    """Two things to take, one of them with a capital letter, and one that must not be taken."""
    from textworld import GameMaker  # pyright: ignore[reportMissingImports]
    from textworld.generator import Event, Quest  # pyright: ignore[reportMissingImports]

    game = GameMaker()
    room = game.new_room("Kitchen")
    game.set_player(room)
    for name in ("Coke can", "apple", "knife"):
        room.add(game.new(type="o", name=name))
    can, knife = (game.find_by_name(name) for name in ("Coke can", "knife"))
    carried = [game.new_fact("in", thing, game.inventory) for thing in (can, knife)]
    won, lost = (Event(conditions={fact}) for fact in carried)
    game.quests = [Quest(win_events=[won], fail_events=[lost], reward=1)]
    folder = tmp_path / "train"
    folder.mkdir()
    game.compile(str(folder / "kitchen.z8"))
    return make_environment("textworld", {"data": tmp_path})


def test_a_name_with_a_capital_letter_can_be_said_in_any_case(kitchen: TextEnvironment) -> None:
    observation, _ = kitchen.reset(kitchen.tasks("train")[0], seed=0)
    assert "take Coke can" in observation
    text, reward, terminated, _, info = kitchen.step("Take coke  can")
    assert text.startswith("You pick up the Coke can")
    assert "***" not in text
    assert (reward, terminated, info) == (1.0, True, {"success": True})


def test_a_lost_game_is_over_without_a_menu(kitchen: TextEnvironment) -> None:
    kitchen.reset(kitchen.tasks("train")[0], seed=0)
    text, reward, terminated, _, info = kitchen.step("take knife")
    assert "RESTART" not in text
    assert (reward, terminated, info) == (0.0, True, {"success": False})


def test_what_is_told_in_another_order_is_another_state(kitchen: TextEnvironment) -> None:
    """Inform lists things in the order in which they were moved."""
    keys = []
    for commands in (("take apple", "drop apple"), ("look", "look")):
        kitchen.reset(kitchen.tasks("train")[0], seed=0)
        for command in commands:
            kitchen.step(command)
        keys.append((kitchen.state_key(), kitchen.step("look")[0]))
    (one, seen), (other, also_seen) = keys
    assert (one == other) == (seen == also_seen)


def test_a_broken_game_is_named(tmp_path: Path) -> None:
    path = make_household(tmp_path / "train", KINDS[0], 0)
    path.write_text(path.read_text("utf-8").replace("(openable ", "(nosuch ", 1), encoding="utf-8")
    environment = make_environment("textworld", {"data": tmp_path})
    with pytest.raises(EnvironmentDataError, match=f"{path} cannot be played: .*predicate"):
        environment.reset(environment.tasks("train")[0], seed=0)


def test_planners_are_used_again(households: Path) -> None:
    """Each holds a copy of a C library."""
    environment = make_environment("textworld", {"data": households, "max_turns": 2})
    task = environment.tasks("valid_unseen")[0]
    counts = set()
    for _ in range(3):
        played(environment, task, "random")
        counts.add(Path("/proc/self/maps").read_text().count("downward"))
    assert len(counts) == 1


def test_the_expert_gives_up_and_the_episode_goes_on(tmp_path: Path) -> None:
    """It looks for what is not in the room, 200 times."""
    path = make_household(tmp_path / "train", KINDS[0], 0, rooms=KITCHENS)
    told = path.with_name("traj_data.json")
    about = json.loads(told.read_text("utf-8"))
    about["pddl_params"]["object_target"] = "AlarmClock"
    told.write_text(json.dumps(about), encoding="utf-8")
    environment = make_environment("textworld", {"data": tmp_path})
    player = environment.scripted_policies()["oracle"]()
    player.begin(environment.tasks("train")[0], seed=0)
    mistakes = [player.act("").is_mistake for _ in range(210)]
    assert not all(mistakes[:200])
    assert all(mistakes[201:])


def test_equal_rooms_have_equal_keys_on_other_ways(adventures: Path) -> None:
    environment = make_environment("textworld", {"data": adventures})
    task = environment.tasks("train")[0]

    def key_after(*commands: str) -> str:
        environment.reset(task, seed=0)
        for command in commands:
            environment.step(command)
        return environment.state_key()

    assert key_after("look", "look") == key_after("inventory", "look")


def test_the_pages_configuration_trains(adventures: Path, tmp_path: Path) -> None:
    config: Mapping[str, dict[str, object]] = yaml.safe_load(_block("yaml", 1))
    config["environment"] |= {"data": str(adventures), "max_turns": 3}
    config["warm_start"] |= {"copy": {"max_steps": 2}}
    config["warm_start"]["demonstrations"] |= {"num_steps": 2}  # pyright: ignore[reportOperatorIssue]
    config["training"] |= {"max_steps": 1, "tasks_per_step": 4, "eval_every": None}
    config["evaluation"] |= {"num_episodes": 2}
    run = ragen_apo.train(config, tmp_path / "run")
    results = ragen_apo.evaluate(run)
    assert results["baselines"].keys() >= {"reference", "heuristic", "random"}
    assert {row["episodes"] for row in results["baselines"].values()} == {2}
