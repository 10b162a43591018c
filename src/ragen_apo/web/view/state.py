"""Whether a run is running, finished or stopped, seen from outside: no lock is taken."""

from __future__ import annotations

import os
import time
from enum import Enum
from pathlib import Path

from ragen_apo.run_directory import RunDirectory
from ragen_apo.web.view.folder import last_change

FRESH_SECONDS = 120.0
"""A process elsewhere that shares the files shows only in them."""
_LOCKS = Path("/proc/locks")


class RunState(str, Enum):
    """What a run does."""

    RUNNING = "running"
    EVALUATED = "finished"
    TRAINED = "trained"
    """It has its policy, and no evaluation yet."""
    WARM_STARTED = "warm-started"
    """It ended with its reference, as it was asked to, and `train --resume` goes on."""
    STOPPED = "stopped"
    """Nobody works on it, and `train --resume` goes on."""


def state_of(run: RunDirectory) -> RunState:
    """The state now; one that is STOPPED may have been asked for its reference only."""
    if is_locked(run.lock):
        return RunState.RUNNING
    if os.path.exists(run.results):  # not Path.exists, which raises where we may not look
        return RunState.EVALUATED
    if os.path.exists(run.policy):
        return RunState.TRAINED
    is_fresh = time.time() - last_change(run) < FRESH_SECONDS
    return RunState.RUNNING if is_fresh else RunState.STOPPED


def is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the lock file; where Linux does not say, False."""
    try:
        file = path.stat()
        locks = _LOCKS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    return any(device in line.split() for line in locks.splitlines())
