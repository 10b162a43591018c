"""The environment `textworld` with the real TextWorld and ALFWorld: `make test-interop`."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import ragen_apo
from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.contract import check_environment
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.types import Task

for _module in ("alfworld", "textworld"):
    pytest.importorskip(_module, reason=f"{_module} is not installed; run `make test-interop`")
from tests.interop.households import KINDS, make_household  # noqa: E402 (needs alfworld)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "text_adventures.md"


@pytest.fixture(scope="module")
def adventures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few games that the page's script makes."""
    folder = tmp_path_factory.mktemp("adventures")
    text = _block("python").replace("range(200)", "range(4)").replace("range(60)", "range(2)")
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


def test_the_promises_are_kept(adventures: Path) -> None:
    found = check_environment(
        lambda: make_environment("textworld", {"data": adventures, "max_turns": 8})
    )
    assert {promise: problems for promise, problems in found.items() if problems} == {}


def test_the_oracle_wins_every_adventure_and_a_win_pays_one(adventures: Path) -> None:
    environment = make_environment("textworld", {"data": adventures})
    for task in environment.tasks("train"):
        total, success, seen = played(environment, task, "oracle")
        assert (total, success) == (1.0, True)
        assert seen[0].startswith(f"TASK: {task.instruction}\n-= ")
        assert re.search(r"\nPossible: .*go ", seen[0])
        assert "Possible" not in seen[-1]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "two" not in kind])
def test_alfworlds_expert_does_the_task_in_our_environment(kind: str, households: Path) -> None:
    environment = make_environment("textworld", {"data": households})
    (task,) = (task for task in environment.tasks("train") if task.category == kind)
    total, success, seen = played(environment, task, "oracle")
    assert (total, success) == (1.0, True)
    assert seen[0].startswith(
        f"TASK: {task.instruction}\nYou are in the middle of a room. Looking quickly around you, "
        "you see a "
    )


def test_alfworld_itself_says_the_same(households: Path) -> None:
    """Random commands in its own wrappers and in ours, and what an episode is worth."""
    import textworld  # pyright: ignore[reportMissingImports]
    from alfworld.agents.environment.alfred_tw_env import (  # pyright: ignore[reportMissingImports]
        AlfredDemangler,
    )

    environment = make_environment("textworld", {"data": households, "commands": False})
    draw = random.Random(0)
    for task, path in zip(
        environment.tasks("train"), sorted(households.glob("train/*/*/*.tw-pddl")), strict=True
    ):
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
    config: Mapping[str, dict[str, object]] = yaml.safe_load(_block("yaml"))
    config["environment"] |= {"data": str(adventures), "max_turns": 3}
    config["warm_start"] |= {"copy": {"max_steps": 2}}
    config["warm_start"]["demonstrations"] |= {"num_steps": 2}  # pyright: ignore[reportOperatorIssue]
    config["training"] |= {"max_steps": 1, "tasks_per_step": 4, "eval_every": None}
    config["evaluation"] |= {"num_episodes": 2}
    run = ragen_apo.train(config, tmp_path / "run")
    results = ragen_apo.evaluate(run)
    assert results["baselines"].keys() >= {"reference", "heuristic", "random"}
    assert {row["episodes"] for row in results["baselines"].values()} == {2}
