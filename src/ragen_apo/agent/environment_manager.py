"""The environment manager: steps many environments and adds the costs of faulty responses.

Consumes parsed responses, produces observations and rewards. Costs for a bad format or an invalid
action are added here, once, so Stage 1, Stage 2 and evaluation cannot score differently.

`map` is the one place where environments begin and act side by side, in threads. Everything else
stays with the caller's thread: no other part of the package is used by several at once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.agent.tool_calls import expected_calls
from ragen_apo.config.named_code import FOREIGN_FAILURES
from ragen_apo.environments.answers import (
    endlessness,
    problem_with_reset,
    problem_with_step,
    turn_limit,
)
from ragen_apo.environments.base import (
    EnvironmentProperties,
    ScriptedPolicy,
    TextEnvironment,
    close_environment,
    policies_of,
)
from ragen_apo.environments.process import EnvironmentProcessError, ProcessEnvironment
from ragen_apo.environments.tools import Tool, called
from ragen_apo.errors import (
    ConfigError,
    EnvironmentFaultError,
    EnvironmentRaisedError,
    RagenApoError,
)
from ragen_apo.plural import counted
from ragen_apo.printable import raised_in_words, shortened
from ragen_apo.types import Task, TurnFlag

Result = TypeVar("Result")

IN_A_THREAD = (
    ", called by one of several threads (if what it holds belongs to one thread, set "
    "rollouts.num_environment_workers: 1)"
)
FORMAT_HINT = "Answer with <think>...</think><answer>action</answer>."


@dataclass(frozen=True)
class Outcome:
    """The answer of one environment to one response."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    flags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured in this turn."""
    failure: EnvironmentRaisedError | None = None
    """What the environment raised in place of an answer, where that does not end the run."""


def tools_to_call(properties: EnvironmentProperties) -> tuple[Tool, ...]:
    """The environment's tools; raises ConfigError if it declares none, or several messages."""
    if not called(properties.tools):
        raise ConfigError(
            f"agent.response_format is tool_call, and the environment {properties.name!r} declares "
            "no tools; expected some in properties.tools. Set agent.response_format to think_answer"
        )
    if len(properties.tools) - len(called(properties.tools)) > 1:
        raise ConfigError(
            f"the environment {properties.name!r} declares several tools with is_message; "
            "expected one at most, as a response without a call stands for it"
        )
    return properties.tools


@dataclass
class _Episode:
    """Where an episode is, for messages."""

    task_id: str
    seed: int
    num_turns: int = 0
    action: str | None = None
    """The last; None before the first."""

    def __str__(self) -> str:
        where = f"task {self.task_id}, seed {self.seed}"
        if self.action is None:
            return where
        return f"{where}, turn {self.num_turns}, action {shortened(repr(self.action), 80)}"


class EnvironmentManager:
    """A pool of environments, one for each episode in progress.

    They are closed when it is no longer used, at the latest when the process ends.
    """

    def __init__(
        self,
        make_environment: Callable[[], TextEnvironment],
        *,
        format_penalty: float,
        invalid_action_penalty: float,
        calls_tools: bool = False,
        num_workers: int = 1,
        num_retries: int = 0,
        make_elsewhere: Callable[[TextEnvironment], TextEnvironment] | None = None,
        say: Callable[[str], None] = lambda _: None,
        name: str | None = None,
    ) -> None:
        """`calls_tools`: responses call the environment's tools; ConfigError if it has none.

        `num_workers` is how many environments may be at work at the same time (`map`), and
        `num_retries` how often an episode may begin again because its environment raised. `say`
        tells the user about it. `make_elsewhere` makes those that play, like one in this process
        that only has the tasks. `name` is what the user calls the environment, for messages.
        """
        self.format_penalty, self.invalid_action_penalty = format_penalty, invalid_action_penalty
        self.num_workers, self.num_retries, self._say = num_workers, num_retries, say
        self._prototype = prototype = make_environment()
        self._make_environment = make_environment
        self._name = name or prototype.properties.name
        if make_elsewhere is not None:
            self._make_environment = lambda: make_elsewhere(prototype)
        self._made = {id(self._prototype): self._prototype}
        """All that are not closed, by identity."""
        weakref.finalize(self, _close_all, self._made, owner=os.getpid())
        self.tools = tools_to_call(self.properties) if calls_tools else ()
        self._hint = expected_calls(self.tools) if calls_tools else FORMAT_HINT
        self._idle: list[TextEnvironment] = []
        self._episodes: dict[int, _Episode] = {}
        """The present episode of each environment, by the identity of the object."""
        self._whole: EnvironmentManager | None = None
        """Of a pool for a thread: the one whose end closes its environments."""

    def with_own_pool(self) -> EnvironmentManager:
        """The same kind of environments at the same costs, none of them shared: for a thread.

        They are closed with those of this pool, once neither is used.
        """
        other = copy.copy(self)
        other._idle, other._episodes, other._whole = [], {}, self
        return other

    @property
    def properties(self) -> EnvironmentProperties:
        return self._prototype.properties

    def tasks(self, split: str) -> Sequence[Task]:
        """The environment's tasks of a split in their fixed order."""
        with self._in_its_name():
            return self._prototype.tasks(split)

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        """The environment's policies by name."""
        with self._in_its_name():
            return policies_of(self._prototype)

    def map(self, work: Callable[..., Result], *arguments: Iterable[Any]) -> Iterator[Result]:
        """The results of `work` on environments of their own, in order, as `builtins.map`.

        One worker works when a result is asked for. Several work before the first is handed out,
        each in a thread, and no thread is left then. An exception comes in the place of its result;
        what stands behind it may not have begun.
        """
        calls = zip(*arguments, strict=True)
        if self.num_workers == 1:
            return itertools.starmap(work, calls)
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="environment")
        try:
            futures = [pool.submit(work, *each) for each in calls]
            # They begin in order: those before the first exception have begun and come to an end.
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
        return (future.result() for future in futures)

    def start(self, task: Task, *, seed: int) -> tuple[TextEnvironment, str]:
        """An environment in which this task has begun, and its first observation.

        Here and in `step`, EnvironmentFaultError is raised for an environment that raises
        something (after the retries), ends the process, answers something else than text and a
        finite reward, or never ends an episode. It names the task, the seed, the turn and the
        action.
        """
        num_failures = 0
        while True:
            try:
                return self._started(task, seed=seed)
            except EnvironmentRaisedError as failure:
                num_failures += 1
                self.require_retry(failure, num_failures)

    def require_retry(self, failure: EnvironmentRaisedError, num_failures: int) -> None:
        """Raises the failure of an episode that has failed so often that it may not begin again."""
        if num_failures > self.num_retries:
            raise failure
        self._say(
            f"{failure}. The episode begins again, {num_failures} of "
            f"{counted(self.num_retries, 'time')} at most (rollouts.environment_retries)"
        )

    def _started(self, task: Task, *, seed: int) -> tuple[TextEnvironment, str]:
        environment = None
        with contextlib.suppress(IndexError):  # another thread may take the last one
            environment = self._idle.pop()
        if environment is None:
            environment = self._make_environment()
            self._made[id(environment)] = environment
        self._episodes[id(environment)] = episode = _Episode(task.task_id, seed)
        try:
            with self._in_its_name(episode):
                answer = environment.reset(task, seed=seed)
        except EnvironmentRaisedError:
            self.discard(environment)
            raise
        self._refuse(problem_with_reset(answer), episode)
        return environment, answer[0]

    def release(self, environment: TextEnvironment) -> None:
        """Gives an environment back for another episode."""
        self._idle.append(environment)

    def step(self, environment: TextEnvironment, response: ParsedResponse) -> Outcome:
        """Executes a response.

        One without the agreed form reaches its environment as an empty action: it costs a turn and
        `format_penalty`, and the agent is told the form. A call that none of the tools can execute
        is an empty action, too, and the agent is told the tools.
        """
        action = response.action if response.is_valid else ""
        observation, reward, terminated, truncated, info = self._answer(environment, action)
        flags = [str(flag) for flag in info.get("flags", ())]
        is_no_call = bool(self.tools) and not action
        if not response.is_valid or is_no_call:
            observation = f"{self._hint}\n{observation}"
        if not response.is_valid:
            flags.append(TurnFlag.FORMAT_ERROR.value)
            reward += self.format_penalty
        elif info.get("invalid_action") or is_no_call:
            flags.append(TurnFlag.INVALID_ACTION.value)
            reward += self.invalid_action_penalty
        success = bool(info.get("success", False))
        metrics = {name: float(value) for name, value in info.get("metrics", {}).items()}
        return Outcome(observation, reward, terminated, truncated, success, tuple(flags), metrics)

    def step_or_failure(self, environment: TextEnvironment, response: ParsedResponse) -> Outcome:
        """As `step`; with retries, the end of an episode with a `failure` if it raises something.

        The environment is closed then, and not to be used again.
        """
        try:
            return self.step(environment, response)
        except EnvironmentRaisedError as failure:
            if self.num_retries == 0:
                raise
            self.discard(environment)
            return Outcome("", truncated=True, failure=failure)

    def discard(self, environment: TextEnvironment) -> None:
        """Closes an environment that raised, or is not to be given back; what it raises now does
        not matter.
        """
        if self._made.pop(id(environment), None) is not None:
            with contextlib.suppress(*FOREIGN_FAILURES):
                close_environment(environment)

    def _answer(
        self, environment: TextEnvironment, action: str
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The environment's answer in Python's types, checked, also for an end of the episode."""
        episode = self._episodes[id(environment)]
        episode.num_turns, episode.action = episode.num_turns + 1, action
        with self._in_its_name(episode):
            answer = environment.step(action)
        self._refuse(problem_with_step(answer), episode)
        observation, reward, terminated, truncated, info = answer
        if terminated and "success" not in info:  # it would count as a failure, every time
            self._refuse(
                "it ended an episode, and info has no 'success'; expected true or false", episode
            )
        if episode.num_turns >= turn_limit(self.properties) and not (terminated or truncated):
            self._refuse(endlessness(self.properties), episode)
        return observation, float(reward), bool(terminated), bool(truncated), info

    def _in_its_name(self, episode: _Episode | None = None) -> _InItsName:
        return _InItsName(self, episode)

    def failed(self, error: BaseException, episode: _Episode | None) -> None:
        """Raises EnvironmentFaultError for what was raised inside `_in_its_name`, and says whose.

        Returns for this package's own errors and for interruptions, which go on as they are.
        """
        if isinstance(error, SystemExit):
            self._refuse(f"it tried to end the process ({error!r:.80})", episode, cause=error)
        if isinstance(error, EnvironmentProcessError):
            kind = EnvironmentRaisedError if error.may_pass else EnvironmentFaultError
            self._refuse(str(error), episode, cause=error, kind=kind)
        if not isinstance(error, RagenApoError) and isinstance(error, FOREIGN_FAILURES):
            hint = IN_A_THREAD if self.num_workers > 1 else ""
            self._refuse(
                f"it raised {raised_in_words(error)}{hint}",
                episode,
                cause=error,
                kind=EnvironmentRaisedError,
            )

    def _refuse(
        self,
        problem: str | None,
        episode: _Episode | None,
        *,
        cause: BaseException | None = None,
        kind: type[EnvironmentFaultError] = EnvironmentFaultError,
    ) -> None:
        if problem is not None:
            where = "" if episode is None else f" ({episode})"
            passing = ", and in a run rollouts.environment_retries lets such an episode begin again"
            may_pass = kind is EnvironmentRaisedError and self.num_retries == 0
            raise kind(
                f"the environment {self._name!r}: {problem}{where}. `ragen-apo check` "
                f"says what else it does that no environment may{passing if may_pass else ''}"
            ) from cause


@dataclass(frozen=True)
class _InItsName:
    """Inside, exceptions become those that say whose fault they are.

    Not a generator: since Python 3.13 its frame would keep the exception, and with it the pool and
    all environments, until garbage is collected.
    """

    manager: EnvironmentManager
    episode: _Episode | None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.manager.failed(error, self.episode)


def _close_all(environments: dict[int, TextEnvironment], *, owner: int) -> None:
    """Closes each; what one raises is shown, and the others are closed all the same.

    A process that was forked from the owner leaves them alone: they are the owner's.
    """
    if os.getpid() == owner:
        for environment in environments.values():
            if isinstance(environment, ProcessEnvironment):
                environment.begin_to_close()
        with contextlib.ExitStack() as stack:
            for environment in environments.values():
                stack.callback(close_environment, environment)
