"""What torchrun tells a process through the environment. Without torchrun there is one process.

No torch here, so that the command line can ask before anything heavy is imported.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Worker:
    """Where a process stands among those that torchrun has started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among those of its host: the number of its GPU."""
    local_size: int = 1
    num_restarts: int = 0
    """How often `torchrun --max-restarts` has started all of them again."""

    @property
    def name(self) -> str:
        """Which one of them it is, and where, for messages."""
        return f"rank {self.rank} of {self.size} on {platform.node()}"


def this_worker() -> Worker:
    """The worker that the environment names; alone where it names none."""
    if "RANK" not in os.environ:
        return Worker()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    defaults = (0, 1, 0, 1, 0)
    read = (
        int(os.environ.get(name, default)) for name, default in zip(names, defaults, strict=True)
    )
    return Worker(*read)
