"""The environment manager: steps many environments and adds the costs of faulty responses.

Consumes parsed responses, produces observations and rewards. Costs for a bad format or an invalid
action are added here, once, so Stage 1, Stage 2 and evaluation cannot score differently.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.agent.tool_calls import expected_calls
from ragen_apo.environments.answers import (
    endlessness,
    problem_with_flags,
    problem_with_reward,
    problem_with_text,
    turn_limit,
)
from ragen_apo.environments.base import EnvironmentProperties, ScriptedPolicy, TextEnvironment
from ragen_apo.environments.tools import Tool
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.printable import shortened
from ragen_apo.types import Task, TurnFlag

FORMAT_HINT = "Answer with <think>...</think><answer>action</answer>."


@dataclass(frozen=True)
class Outcome:
    """The answer of one environment to one response."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    flags: tuple[str, ...]


def tools_to_call(properties: EnvironmentProperties) -> tuple[Tool, ...]:
    """The environment's tools; raises ConfigError if it declares none."""
    if not properties.tools:
        raise ConfigError(
            f"agent.response_format is tool_call, and the environment {properties.name!r} declares "
            "no tools; expected some in properties.tools. Set agent.response_format to think_answer"
        )
    return properties.tools


class EnvironmentManager:
    """A pool of environments, one for each episode in progress."""

    def __init__(
        self,
        make_environment: Callable[[], TextEnvironment],
        *,
        format_penalty: float,
        invalid_action_penalty: float,
        calls_tools: bool = False,
    ) -> None:
        """`calls_tools`: responses call the environment's tools; ConfigError if it has none."""
        self._make_environment = make_environment
        self.format_penalty, self.invalid_action_penalty = format_penalty, invalid_action_penalty
        self._prototype = make_environment()
        self.tools = tools_to_call(self.properties) if calls_tools else ()
        self._hint = expected_calls(self.tools) if calls_tools else FORMAT_HINT
        self._idle: list[TextEnvironment] = []
        self._num_turns: dict[int, int] = {}
        """Turns of the present episode of each environment, by the identity of the object."""

    def with_own_pool(self) -> EnvironmentManager:
        """The same kind of environments at the same costs, none of them shared: for a thread."""
        other = copy.copy(self)
        other._idle, other._num_turns = [], {}
        return other

    @property
    def properties(self) -> EnvironmentProperties:
        return self._prototype.properties

    def tasks(self, split: str) -> Sequence[Task]:
        """The environment's tasks of a split in their fixed order."""
        with self._stays_alive():
            return self._prototype.tasks(split)

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        """The environment's policies by name."""
        return self._prototype.scripted_policies()

    def start(self, task: Task, *, seed: int) -> tuple[TextEnvironment, str]:
        """An environment in which this task has begun, and its first observation.

        Here and in `step`, EnvironmentFaultError is raised for an environment that ends the
        process, raises OSError, answers something else than text and a finite reward, or never ends
        an episode.
        """
        environment = self._idle.pop() if self._idle else self._make_environment()
        with self._stays_alive():
            observation, _ = environment.reset(task, seed=seed)
        self._refuse(problem_with_text(observation))
        self._num_turns[id(environment)] = 0
        return environment, observation

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
        return Outcome(observation, reward, terminated, truncated, success, tuple(flags))

    def _answer(
        self, environment: TextEnvironment, action: str
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The environment's answer in Python's types, checked, also for an end of the episode."""
        with self._stays_alive():
            observation, reward, terminated, truncated, info = environment.step(action)
        self._refuse(
            problem_with_text(observation)
            or problem_with_reward(reward)
            or problem_with_flags(info)
        )
        num_turns = self._num_turns.get(id(environment), 0) + 1
        self._num_turns[id(environment)] = num_turns
        if num_turns >= turn_limit(self.properties) and not (terminated or truncated):
            self._refuse(endlessness(self.properties))
        return observation, float(reward), bool(terminated), bool(truncated), info

    @contextlib.contextmanager
    def _stays_alive(self) -> Iterator[None]:
        """Says whose fault it is where the error would pass for one of this process."""
        try:
            yield
        except SystemExit as error:
            self._refuse(f"it tried to end the process ({error!r:.80})", cause=error)
        except OSError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raised = f"{type(error).__name__} ({shortened(str(error), 300)})"
            where = f"{frame.filename}, line {frame.lineno}"
            self._refuse(f"it raised {raised} in {where}", cause=error)

    def _refuse(self, problem: str | None, *, cause: BaseException | None = None) -> None:
        if problem is not None:
            name = self.properties.name
            raise EnvironmentFaultError(
                f"the environment {name!r}: {problem}. `ragen-apo check` says what else it does "
                "that no environment may"
            ) from cause
