"""Every environment keeps the contract, whatever its world is, and a little more.

The cases are all built-in environments, some of them under several options, and the one that
docs/adding_an_environment.md shows, installed from the document as a user would install it.
"""

import json
import math
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.config import load_config
from ragen_apo.environments.base import TextEnvironment, environment_names, make_environment
from ragen_apo.environments.contract import (
    PROMISES,
    ROUNDING,
    Promise,
    episodes,
    episodes_in_threads_are_as_one_by_one,
    play,
    random_walks,
)
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from ragen_apo.types import Task, make_task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding_an_environment.md"
MAX_TURNS = 4
ANY_TEXT = st.text(alphabet=st.characters(), max_size=200)

CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "webshop": ("webshop", {"data": "generated"}),
    "sokoban": ("sokoban", {}),
    "sokoban_two_boxes_in_words": (
        "sokoban",
        {
            "num_rows": 7,
            "num_boxes": 2,
            "observation": "words",
            "max_solution_moves": 15,
            "max_actions": 15,
        },
    ),
    "sokoban_coordinates": (
        "sokoban",
        {"observation": "coordinates", "max_actions_per_turn": 1, "max_turns": 20},
    ),
    "frozen_lake": ("frozen_lake", {"slippery": False}),
    "frozen_lake_slippery": ("frozen_lake", {"observation": "grid_and_coordinates"}),
    "bandit_two_armed": ("bandit", {}),
    "bandit_bernoulli": ("bandit", {"kind": "bernoulli", "max_actions_per_turn": 3}),
    "countdown": ("countdown", {}),
    "questions": ("questions", {}),
    "questions_products": (
        "questions",
        {"operations": ["-", "*"], "max_terms": 4, "compare": "number"},
    ),
    "mixture": (
        "mixture",
        {
            "parts": {
                "shop": {"weight": 2},
                "slippery": {"name": "frozen_lake", "weight": 0.5},
                "guess_number": {},
            }
        },
    ),
    "documented": ("guess_number", {}),
}
CASES |= {
    name: (name, {})
    for name in environment_names()
    if name not in {known for known, _ in CASES.values()}
    and name != "textworld"  # needs games: tests/interop/test_textworld.py
}
ORACLES_FAIL_AT_TIMES = {"frozen_lake_slippery": 0.5, "mixture": 0.9, "webshop": 0.95}
"""The share of successes that is asked of oracles that luck or a search engine can defeat."""

TRY_WHAT_MAY_NOT_BE_THERE = {"careful", "hasty", "forgetful"}
"""Policies whose way to find out whether something is there is to try it."""

every_environment = pytest.mark.parametrize("name", CASES)


def block_of_document(language: str, number: int = 0) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S)
    assert len(found) > number, f"{DOCUMENT} has {len(found)} blocks in {language}"
    return found[number]


@pytest.fixture(scope="module", autouse=True)
def documented_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `pip install` leaves in site-packages, on the path as long as this module runs."""
    project, folder = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site-packages")
    (project / "guess_number.py").write_text(block_of_document("python"), encoding="utf-8")
    (project / "pyproject.toml").write_text(block_of_document("toml"), encoding="utf-8")
    # What training leaves beside it must not be taken for the package.
    (project / "runs" / "guess").mkdir(parents=True)
    (project / "runs" / "guess" / "config.yaml").write_text("seed: 0\n")
    settings = tomllib.loads(block_of_document("toml"))["build-system"]
    assert settings["build-backend"] == "setuptools.build_meta"
    build = f"import setuptools.build_meta as backend; backend.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=project, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert not (folder / "runs").exists()
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("guess_number", None)


def as_asked(name: str) -> TextEnvironment:
    environment, options = CASES[name]
    return make_environment(environment, options)


def small(name: str, max_turns: int = MAX_TURNS) -> TextEnvironment:
    """Every environment has the option `max_turns`."""
    environment, options = CASES[name]
    return make_environment(environment, {**options, "max_turns": max_turns})


def first_task(environment: TextEnvironment) -> Task:
    return environment.tasks("train")[0]


def play_texts(environment: TextEnvironment, texts: Sequence[str]) -> list[tuple]:
    environment.reset(first_task(environment), seed=0)
    return [(*environment.step(text), environment.state_key()) for text in texts]


@pytest.mark.slow
def test_the_documented_configuration_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not above: the processes that write texts run this file as well, and need no torch.
    from tests import factories

    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess_number.py").write_text(block_of_document("python"), encoding="utf-8")
    (tmp_path / "guess.yaml").write_text(block_of_document("yaml"), encoding="utf-8")
    short = [
        "--warm_start.demonstrations.num_steps=2",
        "--values.num_samples=1",
        "--agent.max_response_tokens=12",
        "--training.max_tasks=8",
        "--training.tasks_per_step=8",
        "--training.max_steps=1",
    ]
    config = load_config(tmp_path / "guess.yaml", [*short, "--machine.num_threads=1"])
    run = factories.run(config, tmp_path / "run")
    assert run.policy.exists()
    assert [row["num_episodes"] for row in read_json_lines(run.metrics)] == [8]


@pytest.mark.slow
def test_the_documented_configuration_of_a_pretrained_model_trains(
    qwen_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import factories

    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess_number.py").write_text(block_of_document("python"), encoding="utf-8")
    config = tmp_path / "guess_pretrained.yaml"
    config.write_text(block_of_document("yaml", 1), encoding="utf-8")
    smaller = ["--agent.max_context_tokens=512", "--policy.lora.rank=2"]
    model = f"--policy.path={qwen_folder}"
    run = factories.shipped_run(config, tmp_path / "run", model, *smaller)
    assert [row["num_episodes"] for row in read_json_lines(run.metrics)] == [4, 4]
    assert (run.path / "adapter").is_dir()


def texts_of(name: str) -> str:
    """What is written in an environment."""
    return repr(list(episodes(partial(small, name))))


@pytest.fixture(scope="module")
def texts_elsewhere(documented_environment: None) -> dict[str, str]:
    """The texts of a process that hashes strings differently, by environment."""
    variables = {
        **os.environ,
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    finished = subprocess.run(
        [sys.executable, __file__], env=variables, capture_output=True, check=True
    )
    return json.loads(finished.stdout)


@pytest.mark.slow
@every_environment
def test_two_processes_with_different_hash_seeds_write_the_same_text(
    name: str, texts_elsewhere: dict[str, str]
) -> None:
    assert texts_of(name) == texts_elsewhere[name]
    assert len(texts_elsewhere[name]) > 1000


@every_environment
@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_is_kept(name: str, promise: Promise) -> None:
    promise(partial(small, name))


@every_environment
def test_an_environment_can_be_pickled_in_an_episode(name: str) -> None:
    """And goes on alike, as worker processes of others need it."""
    environment = small(name)
    task = environment.tasks("train")[0]
    policy = environment.scripted_policies()["heuristic"]()
    policy.begin(task, seed=0)
    environment.step(policy.act(environment.reset(task, seed=0)[0]).action)
    twin = pickle.loads(pickle.dumps(environment))
    assert twin.state_key() == environment.state_key()
    assert twin.properties == environment.properties
    assert twin.step("\x00") == environment.step("\x00")


@pytest.mark.slow
@every_environment
def test_episodes_in_threads_are_as_one_by_one(name: str) -> None:
    episodes_in_threads_are_as_one_by_one(partial(small, name))


@every_environment
def test_properties_have_the_name_of_the_environment_and_no_split_is_empty(name: str) -> None:
    environment = small(name)
    assert environment.properties.name == CASES[name][0]
    assert all(environment.tasks(split) for split in environment.properties.splits)


@every_environment
def test_the_refusal_of_a_task_of_another_world_names_it(name: str) -> None:
    foreign = make_task(
        environment="elsewhere", instruction="", split="train", category="", payload={}
    )
    with pytest.raises(ConfigError, match=foreign.task_id):
        small(name).reset(foreign, seed=0)


@every_environment
def test_a_text_that_is_no_action_does_not_truncate_an_episode(name: str) -> None:
    (step,) = play_texts(small(name), ["\x00 no action at all"])
    assert step[4]["invalid_action"] is True
    assert not step[3]


@every_environment
def test_random_walks_come_to_the_same_situations_again(name: str) -> None:
    """Otherwise the promise about equal state keys would be kept by all."""
    situations = [situation for situation, _ in random_walks(partial(small, name))]
    assert len(situations) - len(set(situations)) > 100


@every_environment
def test_the_oracle_succeeds_in_both_splits(name: str) -> None:
    environment = as_asked(name)
    tasks = [*environment.tasks("train")[:40], *environment.tasks("test")[:40]]
    make_oracle = environment.scripted_policies()["oracle"]
    wins = [play(environment, task, make_oracle()).success for task in tasks]
    assert sum(wins) / len(wins) >= ORACLES_FAIL_AT_TIMES.get(name, 1.0)


@every_environment
def test_scripted_policies_write_nothing_but_actions(name: str) -> None:
    for policy_name, episode in episodes(partial(small, name)):
        for step in episode.steps:
            may_fail = step.reply.is_mistake or policy_name in TRY_WHAT_MAY_NOT_BE_THERE
            assert may_fail or not step.info.get("invalid_action", False)


@pytest.mark.slow
@every_environment
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=2 * MAX_TURNS))
@settings(max_examples=30, deadline=None)
def test_any_text_is_answered_and_an_episode_cut_off_anywhere_has_a_return_in_the_range(
    name: str, texts: list[str]
) -> None:
    environment, earned = small(name), 0.0
    low, high = environment.properties.return_range
    for observation, reward, terminated, truncated, info, _ in play_texts(environment, texts):
        assert isinstance(observation, str)
        assert isinstance(reward, float)
        assert math.isfinite(reward)
        assert isinstance(terminated, bool)
        assert isinstance(truncated, bool)
        assert isinstance(info, dict)
        earned += reward
        assert low - ROUNDING <= earned <= high + ROUNDING


@every_environment
@pytest.mark.parametrize("text", ["9" * 100_000, "word " * 100_000], ids=["number", "words"])
def test_huge_texts_are_answered(name: str, text: str) -> None:
    """Odd ones are a promise."""
    environment = small(name)
    verbs = ["", *environment.properties.rules.split()]
    for verb in verbs:
        environment.reset(first_task(environment), seed=0)
        environment.step(f"{verb} {text}")


@every_environment
def test_the_turn_limit_truncates_and_later_steps_change_and_earn_nothing(name: str) -> None:
    steps = play_texts(small(name), ["\x00"] * (MAX_TURNS + 3))
    assert [step[3] for step in steps] == [False] * (MAX_TURNS - 1) + [True] * 4
    assert not any(step[2] for step in steps)
    assert steps[MAX_TURNS - 1][4]["success"] is False
    assert [step[1] for step in steps[MAX_TURNS:]] == [0.0] * 3
    assert len({step[5] for step in steps[MAX_TURNS - 1 :]}) == 1


@every_environment
def test_scripted_policies_end_within_the_limit(name: str) -> None:
    for _, episode in episodes(partial(small, name)):
        last = episode.steps[-1]
        assert len(episode.steps) <= MAX_TURNS
        assert last.terminated or last.truncated


@every_environment
def test_another_turn_limit_is_another_version(name: str) -> None:
    other = small(name, MAX_TURNS + 1)
    assert other.properties.version != small(name).properties.version


@every_environment
def test_an_unknown_split_is_an_error_that_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="'tset'.*train.*test"):
        small(name).tasks("tset")


@every_environment
def test_an_unknown_option_is_an_error_with_a_suggestion(name: str) -> None:
    with pytest.raises(ConfigError, match="max_turn: unknown key; did you mean environment.max_t"):
        make_environment(CASES[name][0], {**CASES[name][1], "max_turn": 3})


@every_environment
def test_an_option_of_the_wrong_kind_is_an_error_with_what_was_got(name: str) -> None:
    with pytest.raises(ConfigError, match="environment.max_turns: got 'ten', expected"):
        make_environment(CASES[name][0], {**CASES[name][1], "max_turns": "ten"})


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: texts_of(name) for name in CASES}))
