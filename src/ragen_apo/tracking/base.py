"""What a tracker is, and the texts of an episode that trackers show.

A tracker is one file with one class and one row in `run_tracking.TRACKERS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ragen_apo.types import Trajectory


class Tracker(Protocol):
    """Where metrics go beside the run's own files. Whatever it raises ends its part in the run."""

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        """Begins the run of this name, or goes on with it where the tracker has one.

        The name is unique; `config` has JSON values, nested. `folder` is the run's own, for what
        the tracker writes to disk; it may not exist yet.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite numbers at a step; the steps of `copy/loss` are not those of `loss`."""
        ...

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        """Episodes of the evaluation after this step of Stage 2."""
        ...

    def finish(self, *, failed: bool) -> None:
        """Brings to safety what is under way; `failed` where the run did not come to its end."""
        ...


def messages(episode: Trajectory) -> list[dict[str, str]]:
    """The episode as a chat between environment (user) and agent (assistant)."""
    chat = []
    for turn in episode.turns:
        chat += [
            {"role": "user", "content": turn.observation},
            {"role": "assistant", "content": turn.response},
        ]
    return [*chat, {"role": "user", "content": episode.final_observation}]


def facts(episode: Trajectory) -> dict[str, Any]:
    """What is worth knowing of an episode besides its messages."""
    return {
        "task_id": episode.task.task_id,
        "category": episode.task.category,
        "instruction": episode.task.instruction,
        "success": episode.success,
        "return": episode.episode_return,
        "num_turns": len(episode.turns),
        "stop_reason": episode.stop_reason.value,
    }


def flattened(values: Mapping[str, Any], *, separator: str) -> Iterator[tuple[str, Any]]:
    """Each value that is no mapping, with the names that lead to it joined."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            for below, leaf in flattened(value, separator=separator):
                yield f"{name}{separator}{below}", leaf
        else:
            yield name, value
