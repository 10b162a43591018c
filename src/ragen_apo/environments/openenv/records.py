"""What travels between a client and the server: action, observation, state."""

from __future__ import annotations

from typing import Annotated, Any

from openenv.core.env_server.types import (  # pyright: ignore[reportMissingImports]
    Action,
    Observation,
    State,
)
from pydantic import BeforeValidator, Field

MAX_ACTION_CHARACTERS = 100_000


def _as_utf8(text: Any) -> Any:
    """Lone surrogates become `?`: JSON can carry them, and nothing that comes after can."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else text


class TextAction(Action):
    """One action. Any text will do; the environment answers what is none with what is possible."""

    text: Annotated[str, BeforeValidator(_as_utf8), Field(max_length=MAX_ACTION_CHARACTERS)]


class TextObservation(Observation):
    """What can be seen; `reward` is that of the last action, `done` says that the episode is over.

    `reward` is None after a reset. `metadata` of a reset names the task: task_id, split, category.
    """

    text: str
    success: bool = False
    """Decided by the environment at the end of the episode."""
    invalid_action: bool = False
    """The last action, or a part of it, was not executed."""


class TextState(State):
    """How far the episode is; `step_count` counts its actions. Repeatable by task_id and seed."""

    task_id: str | None = None
    """None before the first reset."""
    seed: int | None = None
    episode_return: float = 0.0
    """The undiscounted sum of the rewards."""
    done: bool = True
    success: bool = False
