"""A Python process beside this one that answers each line with a line.

Here is the parent's side; `answering` is the child's. The child ends when its input does, so it
outlives no parent, however that ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO

# The paths of the parent come first of all: no file of the working folder may be imported.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; import {module}; {module}.main()"


class LineProcess:
    """A running process, which calls `main()` of a module."""

    def __init__(self, module: str, *, errors: int | None = None) -> None:
        """`errors` is where its standard error goes; None for that of this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(module=module), module, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, of itself or otherwise."""
        return self._process.poll() is None

    def send(self, line: str) -> None:
        """Gives it a line; to one that has ended, nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def answer(self, *, within_seconds: float | None) -> str | None:
        """Its next line; None where it gave none, and then it is of no more use.

        One that takes longer is killed.
        """
        assert self._process.stdout is not None
        with self._deadline(within_seconds):
            line = self._process.stdout.readline()
        return line if line.endswith("\n") else None

    def ending(self, *, within_seconds: float = 10.0) -> str:
        """How it ended, in words, once it has; after that time it is killed."""
        with self._deadline(within_seconds):
            status = self._process.wait()
        if status >= 0:
            return f"status {status}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
        return f"signal {-status}"

    def end_input(self) -> None:
        """Tells it that nothing more comes, so that it ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was not written is of no use to it
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends it and closes its pipes."""
        self._process.kill()
        self.end_input()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()

    @contextlib.contextmanager
    def _deadline(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        deadline = threading.Timer(seconds, self._process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            yield
        finally:
            deadline.cancel()


def answering() -> tuple[IO[str], IO[str]]:
    """In the child: where lines come from, and where answers go.

    Nothing else can read or write them: what libraries print goes to standard error. Ctrl-C in the
    terminal is the parent's.
    """
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return lines, answers
