"""The seconds of a run's phases, for its run.json."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ragen_apo.distributed.ranks import Ranks
from ragen_apo.run_directory import RunDirectory

SECONDS_NOTED_EVERY = 2.0
"""What of its time a phase may lose in a kill, if it notes more than checkpoints.

Stage 1 keeps its samples: with much more a comparison would have them nearly free. A note takes
some 5 to 60 ms, so that each batch of samples cannot have one.
"""


class PhaseClock:
    """Notes how long phases take, which the first rank writes.

    The seconds of a phase within another are its own alone, so all phases add up to the clock on
    the wall.
    """

    def __init__(self, run: RunDirectory, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._phases: list[str] = []
        """Those under way, each inside the one before it."""
        self._noted = 0.0
        """Until when seconds are noted."""
        self._saving = 0.0
        """Seconds of checkpoints since then."""
        self._exchanged = (0.0, 0.0)
        """What `Ranks.seconds` was then."""

    @contextlib.contextmanager
    def timed(self, phase: str, *, since: float | None = None) -> Iterator[None]:
        """Notes the seconds of a phase, an interrupted one included.

        `since` is when the phase began, if that was earlier and outside of all others.
        """
        self._ranks.enter(phase)
        self.note()
        self._noted = time.perf_counter() if since is None or self._phases else since
        self._phases.append(phase)
        try:
            with self._ranks.naming_failures():
                yield
        finally:
            self.note()
            self._phases.pop()
            self._ranks.enter(self._phases[-1] if self._phases else "end")

    def note(self, *, every: float = 0.0) -> None:
        """Notes what the phase under way has taken so far, so that a kill loses no more.

        Nothing is written if that was done less than `every` seconds ago.
        """
        now, exchanged = time.perf_counter(), self._ranks.seconds
        if not (self._ranks.is_first and self._phases and now - self._noted >= every):
            return
        parts = {
            "checkpoint_seconds": self._saving,
            "waiting_seconds": exchanged[0] - self._exchanged[0],
            "communication_seconds": exchanged[1] - self._exchanged[1],
        }
        parts = {name: spent for name, spent in parts.items() if spent}
        self._run.add_seconds(self._phases[-1], now - self._noted, **parts)
        self._noted, self._saving, self._exchanged = now, 0.0, exchanged

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Counts what is inside as the making of a checkpoint, a part of the phase under way."""
        started = time.perf_counter()
        yield
        self._saving += time.perf_counter() - started
        self.note()
