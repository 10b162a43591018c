"""Progress of long work, as an interface that the work calls and a console implements."""

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one phase after another."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` units begins; the one before it is over."""
        ...

    def update(self, done: int, note: str = "") -> None:
        """`done` units of the present phase are finished; `note` holds its latest metrics."""
        ...

    def say(self, message: str) -> None:
        """A sentence that should stay on the screen; of several ranks the first says it."""
        ...

    def warn(self, message: str) -> None:
        """What went wrong in this process and perhaps in no other: every rank says it."""
        ...


class SilentProgress:
    """Tells nobody; for tests and for use as a library."""

    def start(self, phase: str, total: int) -> None: ...

    def update(self, done: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...
