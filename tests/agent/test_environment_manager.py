"""Costs, flags and hints are added in one place."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_apo.agent.environment_manager import FORMAT_HINT, EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.agent.tool_calls import ToolCalls
from ragen_apo.environments.base import EnvironmentProperties, Reply
from ragen_apo.environments.tools import Tool
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.policy.call_form import CallForm
from ragen_apo.types import Task, make_task
from tests.forks import Fork

TASK = make_task(environment="echo", instruction="say", split="train", category="c", payload={})
WELL_FORMED = ParsedResponse(thought="t", action="go", is_valid=True)
MALFORMED = ParsedResponse(thought="", action="", is_valid=False)


class Billions(int):
    """A number of another library, which is told only by `float`."""

    __abs__ = None  # pyright: ignore[reportAssignmentType]

    def __float__(self) -> float:
        return 1e9 * int(self)


class Echo:
    """Says what it was told; `bad` and the empty text are no actions, `win` ends the episode."""

    properties = EnvironmentProperties(
        name="echo",
        version="1",
        reward_version="1",
        deterministic=True,
        return_range=(-1.0, 1.0),
        splits=("train",),
        rules="",
    )

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def tasks(self, split: str) -> list[Task]:
        return [TASK]

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.seeds.append(seed)
        return "start", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        info: dict[str, Any] = {"flags": ("seen",)} if action == "look" else {}
        if action in {"", "bad"}:
            info["invalid_action"] = True
        if action == "win":
            info["success"] = True
        return f"heard {action!r}", 1, action == "win", action == "late", info

    def state_key(self) -> str:
        return "key"

    def scripted_policies(self) -> dict:
        return {}


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (lambda _: {}["policies"], "raised KeyError"),
        (lambda _: None, "scripted_policies returned None; expected a dictionary"),
    ],
)
def test_scripted_policies_that_cannot_be_had_are_a_fault_of_the_environment(
    faulty: Callable[[object], Any], said: str
) -> None:
    made = type("Faulty", (Echo,), {"scripted_policies": faulty})
    environments = EnvironmentManager(made, format_penalty=0, invalid_action_penalty=0)
    with pytest.raises(EnvironmentFaultError, match=f"'echo'.*{said}"):
        environments.scripted_policies()


@pytest.fixture
def manager() -> EnvironmentManager:
    return EnvironmentManager(Echo, format_penalty=-0.25, invalid_action_penalty=-0.5)


def act(action: str) -> ParsedResponse:
    return ParsedResponse(thought="t", action=action, is_valid=True)


def test_a_valid_action_earns_what_the_environment_says(manager: EnvironmentManager) -> None:
    environment, observation = manager.start(TASK, seed=3)
    assert observation == "start"
    outcome = manager.step(environment, act("look"))
    assert (outcome.observation, outcome.reward, outcome.flags) == ("heard 'look'", 1.0, ("seen",))
    assert not (outcome.terminated or outcome.truncated or outcome.success)


def test_a_bad_format_costs_its_penalty_and_the_agent_is_told(manager: EnvironmentManager) -> None:
    environment, _ = manager.start(TASK, seed=0)
    outcome = manager.step(environment, MALFORMED)
    # The environment gives 1 for the turn; only the penalty for the format is added, -0.25.
    assert outcome.reward == 0.75
    assert outcome.flags == ("format_error",)
    assert outcome.observation == f"{FORMAT_HINT}\nheard ''"


def test_an_invalid_action_costs_its_penalty(manager: EnvironmentManager) -> None:
    environment, _ = manager.start(TASK, seed=0)
    outcome = manager.step(environment, act("bad"))
    assert (outcome.reward, outcome.flags) == (0.5, ("invalid_action",))
    assert FORMAT_HINT not in outcome.observation


def test_a_call_of_an_unknown_tool_is_an_invalid_action_whatever_the_environment_says() -> None:
    class Calls(Echo):
        properties = dataclasses.replace(
            Echo.properties, tools=(Tool("look", "Look.", "look", {}),)
        )

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return f"heard {action!r}", 1.0, False, False, {}

    manager = EnvironmentManager(
        Calls, format_penalty=-0.25, invalid_action_penalty=-0.5, calls_tools=True
    )
    environment, _ = manager.start(TASK, seed=0)
    calls = ToolCalls(manager.tools, CallForm())
    for name, reward, flags in (("look", 1.0, ()), ("jump", 0.5, ("invalid_action",))):
        call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        outcome = manager.step(environment, calls.parse(call))
        assert (outcome.reward, outcome.flags) == (reward, flags)


@pytest.mark.parametrize(
    ("action", "terminated", "truncated", "success"),
    [("win", True, False, True), ("late", False, True, False)],
)
def test_the_end_is_passed_on(
    manager: EnvironmentManager, action: str, terminated: bool, truncated: bool, success: bool
) -> None:
    environment, _ = manager.start(TASK, seed=0)
    outcome = manager.step(environment, act(action))
    assert (outcome.terminated, outcome.truncated) == (terminated, truncated)
    assert outcome.success is success


def test_an_end_without_a_word_on_success_is_refused_and_does_not_count_as_failure() -> None:
    """As with `info["won"]`: every rate of success would be 0 beside returns of 1."""

    class Won(Echo):
        def step(self, action: str) -> Any:
            return "heard", 1.0, action == "win", action == "late", {"won": True}

    manager = EnvironmentManager(Won, format_penalty=0.0, invalid_action_penalty=0.0)
    environment, _ = manager.start(TASK, seed=0)
    assert manager.step(environment, act("go")).success is False
    with pytest.raises(EnvironmentFaultError, match=r"ended an episode.*no 'success'.*turn 2"):
        manager.step(environment, act("win"))
    assert manager.step(manager.start(TASK, seed=0)[0], act("late")).success is False


def test_each_environment_answers_its_own_response(manager: EnvironmentManager) -> None:
    environments = [manager.start(TASK, seed=0)[0] for _ in range(3)]
    responses = [act("a"), MALFORMED, act("c")]
    outcomes = [manager.step(*pair) for pair in zip(environments, responses, strict=True)]
    assert [outcome.observation for outcome in outcomes] == [
        "heard 'a'",
        f"{FORMAT_HINT}\nheard ''",
        "heard 'c'",
    ]


def test_a_released_environment_plays_again_with_its_new_seed(manager: EnvironmentManager) -> None:
    first, _ = manager.start(TASK, seed=1)
    second, _ = manager.start(TASK, seed=2)
    assert first is not second
    manager.release(first)
    third, _ = manager.start(TASK, seed=3)
    assert third is first
    assert isinstance(third, Echo)
    assert third.seeds == [1, 3]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("heard \ud83d", 0.0, False, False, {}), "a lone surrogate stands in the text 'heard"),
        ((b"heard", 0.0, False, False, {}), "b'heard' is no text"),
        (("heard", 0.0, False, False, {"flags": 5}), r"info\['flags'\] is 5; expected a list"),
        (("heard", 0.0, False, False, {"flags": "seen"}), r"info\['flags'\] is 'seen'"),
        (("heard", 0.0, False, False, {"flags": ["mistake"]}), r"info\['flags'\] has mistake"),
        (("heard", 0.0, False, False, {"flags": ["format_error"]}), "info.*has format_error"),
        (("heard", 0.0, False, False, {"metrics": 5}), r"info\['metrics'\] is 5; expected a dict"),
        (
            ("heard", 0.0, False, False, {"metrics": {"a b": 1}}),
            ".*has the name 'a b'; expected up",
        ),
        (("heard", 0.0, False, False, {"metrics": {3: 1}}), ".*has the name 3; expected up"),
        (
            ("heard", 0.0, False, False, {"metrics": {"passed": math.nan}}),
            r"info\['metrics'\]\['passed'\] is nan; expected a finite number",
        ),
        (
            ("heard", 0.0, False, False, {"metrics": {"passed": 10**5000}}),
            r"info\['metrics'\]\['passed'\] is <int without a text>; expected a finite number",
        ),
        (("heard", 0.0, False, False, None), "info is None"),
        (("heard", 0.0, False, False, {"success": "false"}), r"info\['success'\] is 'false'"),
        (
            ("heard", 0.0, False, False, {"success": 0.5}),
            r"info\['success'\] is 0.5; expec",
        ),
        (("heard", 0.0, "no", False, {}), "terminated is 'no'; expected true or false"),
        (("heard", 0.0, False, {}), "step answered .*; expected .observation, reward"),
        (("heard", None, False, False, {}), "the reward is None; expected a finite number"),
        (("heard", "1", False, False, {}), "the reward is '1'"),
        (("heard", math.nan, False, False, {}), "the reward is nan"),
        (("heard", 10**400, False, False, {}), "the reward is 1000"),
        (("heard", -1e300, False, False, {}), r"the reward is -1e\+300; expected at most 1e9 in s"),
        (("heard", np.zeros(2), False, False, {}), "the reward is array"),
        (("heard", np.int64(-(2**63)), False, False, {}), "the reward is .*; expected at most 1e9"),
        (("heard", Billions(-10), False, False, {}), "the reward is .*; expected at most 1e9"),
    ],
)
def test_an_answer_that_would_make_trouble_later_is_refused_by_name(
    answer: tuple, words: str
) -> None:
    class Odd(Echo):
        def step(self, action: str) -> Any:
            return answer

    manager = EnvironmentManager(Odd, format_penalty=0.0, invalid_action_penalty=0.0)
    environment, _ = manager.start(TASK, seed=0)
    with pytest.raises(EnvironmentFaultError, match=f"the environment 'echo': {words}") as caught:
        manager.step(environment, act("go"))
    assert f"(task {TASK.task_id}, seed 0, turn 1, action 'go')" in str(caught.value)


@pytest.mark.parametrize("answer", [None, "start", ("start",), (b"start", {})])
def test_a_reset_that_answers_something_else_is_refused(answer: object) -> None:
    class Odd(Echo):
        def reset(self, task: Task, *, seed: int) -> Any:
            return answer

    manager = EnvironmentManager(Odd, format_penalty=0.0, invalid_action_penalty=0.0)
    with pytest.raises(EnvironmentFaultError, match=rf"\(task {TASK.task_id}, seed 3\)"):
        manager.start(TASK, seed=3)


def test_a_state_key_that_is_no_text_is_refused_before_it_is_stored() -> None:
    class Odd(Echo):
        def state_key(self) -> Any:
            return ("start", 0)

    with pytest.raises(
        EnvironmentFaultError, match=r"'echo': state_key: \('start', 0\) is no text"
    ):
        play_one(Wins, Odd)


class Wins:
    def begin(self, task: Task, *, seed: int) -> None: ...

    def act(self, observation: str) -> Any:
        return Reply("", "win")


class Falls(Wins):
    def begin(self, task: Task, *, seed: int) -> None:
        raise KeyError("plan")


class Stumbles(Wins):
    def act(self, observation: str) -> Any:
        raise KeyError("word")


class SaysText(Wins):
    def act(self, observation: str) -> Any:
        return "win"


def play_one(policy: Any, environment: type[Echo]) -> None:
    manager = EnvironmentManager(environment, format_penalty=0.0, invalid_action_penalty=0.0)
    play_scripted_episodes(policy, manager, [EpisodeRequest(TASK, 0)], policy_version="wins")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Falls, r"KeyError\('plan'\)"),
        (Stumbles, r"KeyError\('word'\)"),
        (Wins(), "'Wins' object is not callable"),
    ],
)
def test_what_a_scripted_policy_raises_is_said_in_its_environments_name(
    policy: Any, words: str
) -> None:
    with pytest.raises(EnvironmentFaultError, match=f"'echo': a scripted policy raised .*{words}"):
        play_one(policy, Echo)


def test_a_scripted_policy_that_replies_with_text_is_named() -> None:
    with pytest.raises(EnvironmentFaultError, match=r"SaysText: act returned str; .* a Reply"):
        play_one(SaysText, Echo)


def test_what_a_state_key_raises_is_said_in_the_name_of_the_environment() -> None:
    class Odd(Echo):
        def state_key(self) -> Any:
            raise KeyError("board")

    with pytest.raises(EnvironmentFaultError, match=r"'echo': state_key raised KeyError"):
        play_one(Wins, Odd)


def test_an_environment_that_exits_in_a_step_does_not_end_training_with_status_0() -> None:
    class Exits(Echo):
        def step(self, action: str) -> Any:
            raise SystemExit(0)

    manager = EnvironmentManager(Exits, format_penalty=0.0, invalid_action_penalty=0.0)
    environment, _ = manager.start(TASK, seed=0)
    with pytest.raises(EnvironmentFaultError, match="tried to end the process"):
        manager.step(environment, act("go"))


def test_numbers_and_ends_of_numpy_become_those_of_python() -> None:
    class Numpy(Echo):
        def step(self, action: str) -> Any:
            is_last = action == "last"
            info = {"success": np.bool_(is_last)}
            return "heard", np.float32(0.5), np.bool_(is_last), np.bool_(False), info

    manager = EnvironmentManager(Numpy, format_penalty=-0.25, invalid_action_penalty=0.0)
    environment, _ = manager.start(TASK, seed=0)
    for response, reward, terminated in ((MALFORMED, 0.25, False), (act("last"), 0.5, True)):
        outcome = manager.step(environment, response)
        row = {key: getattr(outcome, key) for key in ("reward", "terminated", "truncated")}
        expected = {"reward": reward, "terminated": terminated, "truncated": False}
        assert json.loads(json.dumps(row)) == expected


def test_an_episode_has_the_last_value_of_what_its_environment_measures() -> None:
    class Measures(Echo):
        def step(self, action: str) -> Any:
            metrics = {"seen": {"first": True, "look": np.float32(0.5)}.get(action)}
            info = {"success": True} if action == "win" else {"metrics": metrics}
            return "heard", 0.0, action == "win", False, info

    class Three:
        def begin(self, task: Task, *, seed: int) -> None:
            self.actions = ["first", "look", "win"]

        def act(self, observation: str) -> Reply:
            return Reply(thought="", action=self.actions.pop(0))

    manager = EnvironmentManager(Measures, format_penalty=0.0, invalid_action_penalty=0.0)
    requests = [EpisodeRequest(TASK, seed=0)] * 2
    for episode in play_scripted_episodes(Three, manager, requests, policy_version="three"):
        assert json.loads(json.dumps(episode.metrics)) == {"seen": 0.5}


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), FileNotFoundError(2, "x", "/s")])
@pytest.mark.parametrize("method", ["tasks", "reset", "step"])
def test_an_error_of_the_system_in_an_environment_does_not_pass_for_one_of_this_process(
    method: str, error: OSError
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    broken = type("Broken", (Echo,), {method: fails})
    manager = EnvironmentManager(broken, format_penalty=0.0, invalid_action_penalty=0.0)

    def play() -> None:
        assert manager.tasks("train") == [TASK]
        manager.step(manager.start(TASK, seed=0)[0], act("go"))

    with pytest.raises(EnvironmentFaultError) as caught:
        play()
    message = str(caught.value)
    assert f"the environment 'echo': it raised {type(error).__name__} ({error})" in message
    assert f"in {__file__}, line {fails.__code__.co_firstlineno + 1}" in message
    assert caught.value.__cause__ is error


def test_an_error_beside_other_threads_names_the_key_that_lets_one_thread_do_all() -> None:
    class OfOneThread(Echo):
        def step(self, action: str) -> Any:
            raise RuntimeError("made in another thread")

    for num_workers, is_told in ((1, False), (2, True)):
        manager = EnvironmentManager(
            OfOneThread, format_penalty=0.0, invalid_action_penalty=0.0, num_workers=num_workers
        )
        with pytest.raises(EnvironmentFaultError, match="made in another thread") as caught:
            manager.step(manager.start(TASK, seed=0)[0], act("go"))
        assert ("set rollouts.num_environment_workers: 1" in str(caught.value)) is is_told


@pytest.mark.parametrize("declared", [None, 3])
def test_an_episode_that_never_ends_is_refused_after_the_declared_or_a_generous_limit(
    declared: int | None,
) -> None:
    class Endless(Echo):
        properties = dataclasses.replace(Echo.properties, max_turns=declared)

    manager = EnvironmentManager(Endless, format_penalty=0.0, invalid_action_penalty=0.0)
    limit = declared or 1_000
    for _ in range(2):  # the count begins anew with each episode
        environment, _ = manager.start(TASK, seed=0)
        for _ in range(limit - 1):
            manager.step(environment, act("go"))
        manager.release(environment)
    environment, _ = manager.start(TASK, seed=0)
    for _ in range(limit - 1):
        manager.step(environment, act("go"))
    with pytest.raises(EnvironmentFaultError, match=f"not over after {limit:,} turns"):
        manager.step(environment, act("go"))


class Holds(Echo):
    """Holds a sandbox until it is closed; `drop` makes it raise."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__()
        self.held = held
        held.append(self)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "drop":
            raise TimeoutError
        return super().step(action)

    def close(self) -> None:
        self.held.remove(self)


def holding(held: list[Any]) -> EnvironmentManager:
    return EnvironmentManager(
        lambda: Holds(held), format_penalty=0.0, invalid_action_penalty=0.0, num_retries=1
    )


def test_environments_are_closed_once_the_manager_is_no_longer_used() -> None:
    """In an episode, idle, the prototype, and those of a pool for a thread; none twice."""
    held: list[Any] = []
    manager = holding(held)
    manager.release(manager.start(TASK, seed=0)[0])
    manager.start(TASK, seed=0)
    manager.with_own_pool().start(TASK, seed=0)
    assert len(held) == 3
    del manager
    assert held == []


def test_an_environment_stays_open_while_a_pool_for_a_thread_is_used() -> None:
    held: list[Any] = []
    own = holding(held).with_own_pool()
    own.start(TASK, seed=0)
    assert len(held) == 2
    del own
    assert held == []


def test_an_environment_without_the_tools_that_are_asked_for_is_closed() -> None:
    held: list[Any] = []
    with pytest.raises(ConfigError, match="declares no tools"):
        EnvironmentManager(
            lambda: Holds(held),
            format_penalty=0.0,
            invalid_action_penalty=0.0,
            calls_tools=True,
        )
    assert held == []


def test_an_environment_that_raised_is_closed_at_once_and_not_again() -> None:
    held: list[Any] = []
    manager = holding(held)
    environment, _ = manager.start(TASK, seed=0)
    assert manager.step_or_failure(environment, act("drop")).failure
    assert len(held) == 1
    assert environment not in held
    del manager
    assert held == []


def test_a_close_that_raises_does_not_keep_the_others_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Holds):
        def close(self) -> None:
            super().close()
            raise OSError("the sandbox is gone already")

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest has its own
    held: list[Any] = []
    manager = EnvironmentManager(
        lambda: Stuck(held), format_penalty=0.0, invalid_action_penalty=0.0, num_retries=1
    )
    environment, _ = manager.start(TASK, seed=0)
    assert manager.step_or_failure(environment, act("drop")).failure
    manager.start(TASK, seed=0)
    del manager
    assert held == []
    assert "the sandbox is gone already" in capsys.readouterr().err


def test_a_fork_leaves_the_environments_of_its_parent_open(tmp_path: Path) -> None:
    held: list[Any] = []
    manager = holding(held)
    manager.start(TASK, seed=0)

    def forget() -> None:
        nonlocal manager
        del manager
        print("still held:", len(held))

    fork = Fork(tmp_path / "said", forget)
    assert "still held: 2" in fork.ended()
