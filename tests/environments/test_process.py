"""Environments in processes of their own: they answer as here, and what ends them ends no run."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.agent.assembly import build_environments
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.environments.answers import state_key_of
from ragen_apo.environments.base import Reply, close_environment, make_environment
from ragen_apo.environments.process import ProcessEnvironment
from ragen_apo.errors import ConfigError, EnvironmentFaultError, EnvironmentRaisedError
from tests.forks import Fork

pytestmark = pytest.mark.slow

ODD = '''
import os, sys, time
import numpy as np
from ragen_apo.environments.questions.with_tools import questions_with_tools


class Odd:
    """Does what the action says."""

    def __init__(self, folder, words=None, **options):
        self._words = words
        self._world = questions_with_tools([multiply], num_train_tasks=4, num_test_tasks=2)
        self._folder = folder
        for name in ("properties", "tasks", "scripted_policies"):
            setattr(self, name, getattr(self._world, name))

    def state_key(self):
        if self._words == "keyless":
            return None
        return b"bytes" if self._words == "bytes" else self._world.state_key()

    def reset(self, task, *, seed):
        if self._words == {1: (2, 3)}:
            return "as here", {}
        print("this is no answer", flush=True)
        os.write(1, b"nor is this")
        return self._world.reset(task, seed=seed)

    def step(self, action):
        if action == "raise":
            raise KeyError("nothing")
        if action == "exit":
            sys.exit(0)
        if action == "crash":
            os.abort()
        if action.startswith("fork and"):
            if os.fork() == 0:  # the child holds whatever its parent has open
                time.sleep(600)
            return self.step(action.removeprefix("fork and "))
        if action == "crash once":
            path = f"{self._folder}/crashed"
            if not os.path.exists(path):
                open(path, "w").close()
                os.abort()
        if action == "hang":
            time.sleep(600)
        if action == "read":
            return (repr(sys.stdin.read()), 0.0, False, False, {})
        if action == "numpy":
            info = {"metrics": {"size": np.float32(0.5)}, "success": np.bool_(True), "more": self}
            return ("Done.", np.float32(0.1), np.bool_(True), False, info)
        if action == "wrong":
            return ("Done.", float("nan"), False, False, {})
        return self._world.step(action)

    def close(self):
        if os.path.isdir(self._folder):  # a failed episode is held until garbage is collected
            open(f"{self._folder}/closed-{os.getpid()}", "w").close()


def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


def make_odd(**options):
    return Odd(**options)
'''


@pytest.fixture
def odd(tmp_path: Path) -> EnvironmentConfig:
    """An environment whose actions say what is to go wrong."""
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    options = {"folder": str(tmp_path)}
    return EnvironmentConfig(name=f"{tmp_path / 'odd.py'}:make_odd", **options)


def managed(environment: EnvironmentConfig, **rollouts: Any) -> EnvironmentManager:
    keys = {"environment_processes": True, **rollouts}
    return build_environments(environment, AgentConfig(), RolloutsConfig(**keys))


class Saying:
    """A scripted policy that does one thing."""

    def __init__(self, action: str) -> None:
        self._action = action

    def begin(self, task: object, *, seed: int) -> None:
        pass

    def act(self, observation: str) -> Reply:
        return Reply("", self._action)


def played(environments: EnvironmentManager, *actions: str) -> list[Any]:
    """An episode of each action."""
    task = environments.tasks("train")[0]
    found = []
    for action in actions:
        requests = [EpisodeRequest(task, seed=7)]
        found += play_scripted_episodes(
            lambda action=action: Saying(action), environments, requests, policy_version="scripted"
        )
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("frozen_lake", {}),
        ("sokoban", {}),
        ("bandit", {}),
        ("countdown", {}),
        ("questions", {}),
        ("shop", {"num_products": 24}),
        ("webshop", {"data": "generated:200"}),
        ("mixture", {"parts": {"shop": {}, "lake": {"name": "frozen_lake"}}}),
    ],
)
def test_it_answers_as_it_would_here(name: str, options: Mapping[str, Any]) -> None:
    here = make_environment(name, options)
    there = ProcessEnvironment(name, options, like=here)
    assert there.properties == here.properties
    try:
        for seed, task in enumerate(there.tasks("train")[:2]):
            policy = here.scripted_policies()["random"]()
            policy.begin(task, seed=seed)
            observation, _ = here.reset(task, seed=seed)
            assert there.reset(task, seed=seed)[0] == observation
            is_over = False
            while not is_over:
                assert there.state_key() == here.state_key()
                action = policy.act(observation).action
                observation, _, terminated, truncated, info = answer = here.step(action)
                assert there.step(action) == (*answer[:4], told(info))
                is_over = terminated or truncated
    finally:
        close_environment(there)


def told(info: Mapping[str, Any]) -> dict[str, Any]:
    """What is read of an info."""
    names = ("flags", "invalid_action", "metrics", "success")
    return {
        name: list(info[name]) if name == "flags" else info[name] for name in names if name in info
    }


def test_what_it_prints_and_reads_is_no_part_of_the_conversation(odd: EnvironmentConfig) -> None:
    environments = managed(odd)
    environment, observation = environments.start(environments.tasks("train")[0], seed=0)
    assert observation.startswith("QUESTION:")
    assert environment.step("read")[0] == "''"
    assert environment.step("numpy") == (
        "Done.",
        pytest.approx(0.1),
        True,
        False,
        {"metrics": {"size": 0.5}, "success": True},
    )


@pytest.mark.parametrize(
    ("action", "error", "said"),
    [
        (
            "raise",
            EnvironmentRaisedError,
            r"it raised KeyError\('nothing'\) in .*odd\.py, line \d+ ",
        ),
        ("exit", EnvironmentFaultError, r"it tried to end the process \(SystemExit\(0\)\) "),
        ("crash", EnvironmentRaisedError, r"its process ended during step \(SIGABRT\) "),
        ("hang", EnvironmentRaisedError, r"step took longer than 2 s, and its process was ended"),
        ("fork and crash", EnvironmentRaisedError, r"its process ended during step \(SIGABRT\) "),
        ("fork and hang", EnvironmentRaisedError, r"step took longer than 2 s, and its process"),
        ("wrong", EnvironmentFaultError, r"the reward is nan; expected a finite number "),
    ],
)
def test_what_goes_wrong_there_is_said_here(
    odd: EnvironmentConfig, action: str, error: type[EnvironmentFaultError], said: str
) -> None:
    environments = managed(odd, environment_timeout_seconds=2)
    where = rf"\(task \w+, seed 7, turn 1, action '{action}'\)"
    with pytest.raises(EnvironmentFaultError, match=f"{odd.name}': {said}.*{where}") as caught:
        played(environments, action)
    assert type(caught.value) is error


def test_an_episode_whose_process_crashed_begins_again_in_another_one(
    odd: EnvironmentConfig,
) -> None:
    environments = managed(odd, environment_retries=1)
    (again,) = played(environments, "crash once")
    assert again.turns[0].flags == ("invalid_action",)
    with pytest.raises(EnvironmentRaisedError, match="SIGABRT"):
        played(environments, "crash")


def closed(odd: EnvironmentConfig) -> list[Path]:
    return sorted(Path(odd.options["folder"]).glob("closed-*"))


def test_a_process_is_used_again_and_closes_its_environment_at_the_end(
    odd: EnvironmentConfig,
) -> None:
    environments = managed(odd)
    played(environments, "multiply(2, 3)", "numpy")
    assert closed(odd) == []
    del environments
    assert len(closed(odd)) == 1 + 1  # with the one that only has the tasks


def test_a_process_whose_parent_was_killed_closes_its_environment_and_ends(
    odd: EnvironmentConfig, tmp_path: Path
) -> None:
    def play() -> None:
        environments = managed(odd)
        environments.start(environments.tasks("train")[0], seed=0)
        (tmp_path / "started").touch()
        time.sleep(600)

    parent = Fork(tmp_path / "output", play)
    wait_for(tmp_path / "started")
    os.kill(parent.pid, signal.SIGKILL)
    parent.ended()
    end = time.monotonic() + 60
    while not closed(odd):
        assert time.monotonic() < end
        time.sleep(0.02)
    child = int(closed(odd)[0].name.removeprefix("closed-"))
    assert child != parent.pid
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_options_arrive_as_they_are(odd: EnvironmentConfig) -> None:
    options = {**odd.options, "words": {1: (2, 3)}}
    here = make_environment(odd.name, options)
    there = ProcessEnvironment(odd.name, options, like=here)
    task = replace(here.tasks("train")[0], payload={1: (2, 3)})
    assert there.reset(task, seed=0)[0] == "as here"
    close_environment(there)


def test_a_state_key_that_is_no_text_is_a_fault(odd: EnvironmentConfig) -> None:
    environments = managed(EnvironmentConfig(name=odd.name, **odd.options, words="bytes"))
    with pytest.raises(EnvironmentFaultError, match=r"state_key answered b'bytes'; expected a tex"):
        environments.start(environments.tasks("train")[0], seed=0)


def test_an_environment_need_not_say_its_state(odd: EnvironmentConfig) -> None:
    config = EnvironmentConfig(name=odd.name, **odd.options, words="keyless")
    here = make_environment(config.name, config.options)
    there = ProcessEnvironment(config.name, config.options, like=here)
    for environment in (here, there):
        environment.reset(here.tasks("train")[0], seed=0)
        assert state_key_of(environment) is None
    close_environment(there)


def test_an_environment_of_the_script_that_runs_is_refused(
    odd: EnvironmentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = odd.name.rpartition(":")[0]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    environments = managed(odd)
    with pytest.raises(ConfigError, match="environment_processes: .*make_odd is defined in what"):
        environments.start(environments.tasks("train")[0], seed=0)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    gc.collect()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if children.exists():
        assert "process_host" not in " ".join(
            Path(f"/proc/{pid}/cmdline").read_text() for pid in children.read_text().split()
        )
