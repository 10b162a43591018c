"""The environment manager: steps many environments in lockstep and prices what the agent did wrong.

Consumes parsed responses, produces observations and rewards. Costs for a bad format or an invalid
action are added here, once, so Stage 1, Stage 2 and evaluation cannot score differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ragen_apo.agent.context import ParsedResponse
from ragen_apo.environments.base import (
    EnvironmentProperties,
    ScriptedPolicy,
    TextEnvironment,
)
from ragen_apo.types import Task, TurnFlag

FORMAT_HINT = "Answer with <think>...</think><answer>action</answer>."


@dataclass(frozen=True)
class Outcome:
    """What one environment answered to one response."""

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

    @property
    def properties(self) -> EnvironmentProperties:
        return self._prototype.properties

    def tasks(self, split: str) -> Sequence[Task]:
        """The environment's tasks of a split in their fixed order."""
        return self._prototype.tasks(split)

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        """The environment's policies by name."""
        return self._prototype.scripted_policies()

    def start(self, task: Task, *, seed: int) -> tuple[TextEnvironment, str]:
        """An environment in which this task has begun, and its first observation."""
        environment = self._idle.pop() if self._idle else self._make_environment()
        observation, _ = environment.reset(task, seed=seed)
        return environment, observation

    def release(self, environment: TextEnvironment) -> None:
        """Gives an environment back for another episode."""
        self._idle.append(environment)

    def step(
        self, environments: Sequence[TextEnvironment], responses: Sequence[ParsedResponse]
    ) -> list[Outcome]:
        """Executes one response in each environment.

        A response without the agreed form reaches its environment as an empty action: it costs a
        turn and `format_penalty`, and the agent is told the form.
        """
        return [
            self._step(environment, response)
            for environment, response in zip(environments, responses, strict=True)
        ]

    def _step(self, environment: TextEnvironment, response: ParsedResponse) -> Outcome:
        action = response.action if response.is_valid else ""
        observation, reward, terminated, truncated, info = environment.step(action)
        flags = [str(flag) for flag in info.get("flags", ())]
        if not response.is_valid:
            flags.append(TurnFlag.FORMAT_ERROR.value)
            reward += self.format_penalty
            observation = f"{FORMAT_HINT}\n{observation}"
        elif info.get("invalid_action"):
            flags.append(TurnFlag.INVALID_ACTION.value)
            reward += self.invalid_action_penalty
        success = bool(info.get("success", False))
        return Outcome(observation, float(reward), terminated, truncated, success, tuple(flags))
