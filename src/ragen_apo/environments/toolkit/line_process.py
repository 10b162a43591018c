"""A Python process beside this one that answers each line with a line.

Here is the parent's side; `answering` is the child's. The child ends when its input does, however
the parent ends. It is the first of a session: Ctrl-C in the terminal does not reach it, and what it
has started ends with it. POSIX only.
"""

import contextlib
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO

POLL_SECONDS = 0.5
"""Between two looks whether the process has ended, where nothing is heard of it."""
MAX_FILES = 10_240
"""That a process may have open, where the system allows as many; macOS allows no more."""

# The paths of the parent come first of all: no file of the working folder may be imported.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; import {module}; {module}.main()"


class LineProcess:
    """A running process, which calls `main()` of a module."""

    def __init__(
        self, module: str, *, errors: int | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """`errors` is where its standard error goes; None for that of this process.

        It has these environment variables besides those of this process. Raises OSError if it
        cannot be started.
        """
        allow_open_files()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(module=module), module, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, of itself or otherwise."""
        return self._process.poll() is None

    def send(self, line: str) -> None:
        """Gives it a line; to one that has ended, nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def answer(self, *, within_seconds: float | None) -> str | None:
        """Its next line; None where it gave none, and then it is of no more use.

        One that takes longer is killed.
        """
        assert self._process.stdout is not None
        pipe, parts = self._process.stdout.fileno(), list[bytes]()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        end = math.inf if within_seconds is None else time.monotonic() + within_seconds
        while (left := end - time.monotonic()) > 0:
            has_ended = not self.is_running
            if poll.poll(1000 * min(left, POLL_SECONDS)):
                part = os.read(pipe, 1 << 16)
                parts.append(part)
                if part.endswith(b"\n"):
                    return b"".join(parts).decode()
                if not part:
                    return None
            elif has_ended:  # what it has started may hold the pipe open
                return None
        self._end_all()
        return None

    def ending(self, *, within_seconds: float = 10.0) -> str:
        """How it ended, in words, once it has; after that time it is killed."""
        try:
            status = self._process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            self._end_all()
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
        self._end_all()
        self.end_input()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()

    def _end_all(self) -> None:
        """Ends it and the processes that it has started.

        macOS does not permit that where all have ended and nobody has waited for them.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def allow_open_files() -> None:
    """Lets this process open more files: a process takes two, and macOS begins with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def answering() -> tuple[IO[str], IO[str]]:
    """In the child: where lines come from, and where answers go.

    Nothing else can read or write them: what libraries print goes to standard error.
    """
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return lines, answers
