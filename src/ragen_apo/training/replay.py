"""Replay: trajectories of earlier steps that Stage 2 of A*-PO trains on again.

At the optimal policy the residual (R - V*) - beta2 Delta of every trajectory is 0, so the minimum
of its square does not depend on which policy sampled the trajectories, under two conditions:

    beta1 = beta2      V* has the temperature of the log-ratio that it is compared with
    no luck            else V* over trajectories counts luck as skill (docs/algorithm.md)

The configuration refuses the first, `refuse_luck` the second. What Stage 1 sampled is not replayed:
a trajectory inside its own V* lifts what is subtracted from it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ragen_apo.config.algorithms import ReplayConfig
from ragen_apo.environments.base import EnvironmentProperties
from ragen_apo.errors import ConfigError
from ragen_apo.files import check_checksums, parse_json, parse_record
from ragen_apo.seeding import generator
from ragen_apo.training.checkpoint import checkpoint_errors
from ragen_apo.types import Trajectory

REPLAY_FILE = "replay.jsonl.gz"


@dataclass(frozen=True)
class StoredTrajectory:
    """A trajectory that a step trained on."""

    trajectory: Trajectory
    episode_return: float
    """What it was trained with: the control experiment gives it another one's."""
    step: int
    """The step that played it, from 0."""


_STORED = TypeAdapter(StoredTrajectory)


class ReplayBuffer:
    """The newest trajectories; empty for ever where the configuration asks for no replay."""

    def __init__(self, settings: ReplayConfig, *, seed: int) -> None:
        self.num_drawn = settings.num_trajectories_per_step
        self._seed = seed
        self._stored: deque[StoredTrajectory] = deque(maxlen=settings.capacity)

    def __len__(self) -> int:
        return len(self._stored)

    def draw(self, step: int) -> list[StoredTrajectory]:
        """Different ones for step `step`, all of them where there are not more than it takes."""
        order = generator(self._seed, "replay", step).permutation(len(self._stored))
        return [self._stored[place] for place in sorted(order[: self.num_drawn].tolist())]

    def add(
        self, trajectories: Sequence[Trajectory], *, returns: Sequence[float], step: int
    ) -> None:
        """Keeps what step `step` trained on, in place of the oldest."""
        if self.num_drawn > 0:
            self._stored.extend(
                StoredTrajectory(trajectory, episode_return, step)
                for trajectory, episode_return in zip(trajectories, returns, strict=True)
            )

    def clear(self) -> None:
        """Forgets all: the reference is another one."""
        self._stored.clear()

    def files(self) -> dict[str, bytes]:
        """What a checkpoint has to hold, by file name; nothing without replay."""
        if self.num_drawn == 0:
            return {}
        lines = "".join(json.dumps(asdict(each), sort_keys=True) + "\n" for each in self._stored)
        return {REPLAY_FILE: gzip.compress(lines.encode(), mtime=0)}

    def load(self, checkpoint: Path) -> None:
        """The inverse of `files`, from a checkpoint's folder; raises CheckpointError."""
        if self.num_drawn == 0:
            return
        with checkpoint_errors(checkpoint, REPLAY_FILE):
            check_checksums(checkpoint, [REPLAY_FILE])
            lines = _decompressed((checkpoint / REPLAY_FILE).read_bytes()).splitlines()
            self._stored.extend(parse_record(_STORED, parse_json(line)) for line in lines)


def _decompressed(content: bytes) -> bytes:
    """ValueError for what gzip did not write."""
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"it is not whole: {error}") from error


def refuse_luck(settings: ReplayConfig, properties: EnvironmentProperties) -> None:
    """Raises ConfigError for replay in an environment that is not deterministic."""
    if settings.num_trajectories_per_step > 0 and not properties.deterministic:
        raise ConfigError(
            f"apo.replay needs a deterministic environment, and {properties.name!r} with these "
            "options is not: on trajectories of earlier policies the regression would take luck "
            "for skill. Take the luck out of the environment, or set "
            "apo.replay.num_trajectories_per_step to 0"
        )
