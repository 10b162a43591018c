"""Visits to a server: each is found by its id alone, 192 random bits that only one browser has.

Idle visits end, and there are never more than a given number. For any number of threads.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ragen_apo.errors import RagenApoError

NUM_ID_BYTES = 24
MAX_IDLE_SECONDS = 2 * 60 * 60.0


class FullError(RagenApoError):
    """There are as many visits as the server takes."""


class Session(Protocol):
    """What a server keeps of one visitor."""

    last_seen: float
    """In seconds of the clock of `Sessions`, whose lock guards it."""


SessionT = TypeVar("SessionT", bound=Session)


class Sessions(Generic[SessionT]):
    """All visits of a server."""

    def __init__(
        self,
        *,
        max_visits: int,
        max_idle_seconds: float = MAX_IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_visits, self._max_idle_seconds = max_visits, max_idle_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: dict[str, SessionT] = {}

    def __len__(self) -> int:
        with self._lock:
            self._end_idle_ones()
            return len(self._by_id)

    def add(self, make: Callable[[str], SessionT]) -> SessionT:
        """A new visit, made of its id; raises FullError where there are too many."""
        with self._lock:
            self._end_idle_ones()
            if len(self._by_id) >= self._max_visits:
                raise FullError(
                    f"{self._max_visits} people are here, as many as this server takes; come back "
                    "when somebody has left"
                )
            visit_id = secrets.token_urlsafe(NUM_ID_BYTES)
            visit = make(visit_id)
            visit.last_seen = self._clock()
            self._by_id[visit_id] = visit
            return visit

    def find(self, visit_id: str) -> SessionT | None:
        """The visit of an id, if it has not ended; it is not idle now."""
        with self._lock:
            self._end_idle_ones()
            visit = self._by_id.get(visit_id)
            if visit is not None:
                visit.last_seen = self._clock()
            return visit

    def close(self, visit_id: str) -> SessionT | None:
        """Ends a visit, if there is one, and returns it."""
        with self._lock:
            return self._by_id.pop(visit_id, None)

    def idle_seconds(self, visit: SessionT) -> float:
        """Since the last request of its visitor."""
        with self._lock:
            return self._clock() - visit.last_seen

    def _end_idle_ones(self) -> None:
        oldest = self._clock() - self._max_idle_seconds
        for visit_id in [key for key, each in self._by_id.items() if each.last_seen < oldest]:
            del self._by_id[visit_id]
