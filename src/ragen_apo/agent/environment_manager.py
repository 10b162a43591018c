"""The environment manager: steps many environments and adds the costs of faulty responses.

Consumes parsed responses, produces observations and rewards. Costs for a bad format or an invalid
action are added here, once, so Stage 1, Stage 2 and evaluation cannot score differently.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_apo.agent.context import ParsedResponse
from ragen_apo.environments.answers import (
    endlessness,
    problem_with_flags,
    problem_with_reward,
    problem_with_text,
    turn_limit,
)
from ragen_apo.environments.base import EnvironmentProperties, ScriptedPolicy, TextEnvironment
from ragen_apo.errors import EnvironmentFaultError
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


class EnvironmentManager:
    """A pool of environments, one for each episode in progress."""

    def __init__(
        self,
        make_environment: Callable[[], TextEnvironment],
        *,
        format_penalty: float,
        invalid_action_penalty: float,
    ) -> None:
        self._make_environment = make_environment
        self.format_penalty, self.invalid_action_penalty = format_penalty, invalid_action_penalty
        self._prototype = make_environment()
        self._idle: list[TextEnvironment] = []
        self._num_turns: dict[int, int] = {}
        """Turns of the present episode of each environment, by the identity of the object."""

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
        `format_penalty`, and the agent is told the form.
        """
        action = response.action if response.is_valid else ""
        observation, reward, terminated, truncated, info = self._answer(environment, action)
        flags = [str(flag) for flag in info.get("flags", ())]
        if not response.is_valid:
            flags.append(TurnFlag.FORMAT_ERROR.value)
            reward += self.format_penalty
            observation = f"{FORMAT_HINT}\n{observation}"
        elif info.get("invalid_action"):
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
