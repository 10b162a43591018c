"""What a text environment is, and where environments are found by name.

An environment turns a `Task` into text observations and rewards with Gymnasium's five-tuple
semantics. It holds one episode at a time; whatever many episodes share (a catalogue, an index) is
immutable and shared between instances. No torch here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from ragen_apo.errors import ConfigError
from ragen_apo.types import Task

ENTRY_POINT_GROUP = "ragen_apo.environments"


@dataclass(frozen=True)
class EnvironmentProperties:
    """What an environment declares about itself."""

    name: str
    version: str
    """Changes whenever data, text or dynamics change: it is part of the key of a stored return."""
    reward_version: str
    """Changes whenever the same episode would earn something else."""
    deterministic: bool
    """The same task and actions always give the same observations and rewards."""
    return_range: tuple[float, float]
    """Bounds of the return of one episode."""
    splits: tuple[str, ...]
    rules: str
    """What an agent has to know to play; offered to the context manager as system prompt."""


@dataclass(frozen=True)
class Reply:
    """What a scripted policy says in one turn."""

    thought: str
    action: str


class ScriptedPolicy(Protocol):
    """A policy written by hand: a teacher, a baseline, an oracle. It reads text like the model."""

    def begin(self, task: Task, *, seed: int) -> None:
        """Starts an episode. Only an oracle may look at the task's payload."""
        ...

    def act(self, observation: str) -> Reply:
        """The reply to one observation."""
        ...


class TextEnvironment(Protocol):
    """One episode at a time, text in and text out."""

    @property
    def properties(self) -> EnvironmentProperties: ...

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split in a fixed order; raises ConfigError for an unknown split."""
        ...

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode and returns its first observation and info."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Executes any text: observation, reward, terminated, truncated, info.

        Never raises because of what the text is. Text that is no action changes nothing, costs a
        turn and is answered with what is possible. `info` may hold `success` (bool, at the end),
        `invalid_action` (bool) and `flags` (strings for `Turn.flags`).
        """
        ...

    def state_key(self) -> str:
        """Equal keys mean equal futures: task, page and everything that rewards still depend on."""
        ...

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        """Policies by name; `random` and `heuristic` are the baselines of an evaluation."""
        ...


EnvironmentFactory = Callable[..., TextEnvironment]

_BUILT_IN: dict[str, str] = {"shop": "ragen_apo.environments.shop:ShopEnvironment"}
