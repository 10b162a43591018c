"""Child processes that end when their parent ends, however it ends.

The parent holds the writing end of a pipe and each child the reading end. However the parent goes,
SIGKILL included, the system closes its end; the child sees the end of the pipe and leaves. No
signal is involved, so this holds on Linux and macOS alike, and from any thread of the parent.

    python -m ragen_apo.comparison.lifeline FD MODULE [ARGUMENT ...]

is the child's side: it runs a module as `python -m` does.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

CUT_OFF = 143
"""Exit status of a child whose parent is gone; that of a process ended by SIGTERM."""


class Lifeline:
    """A pipe to the children of this process; `cut` ends all of them."""

    def __init__(self) -> None:
        # Neither end is inherited unless `call` says so: a child that held the writing end would
        # keep itself alive.
        self._reading, self._writing = os.pipe()
        self._is_cut = False

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        os.close(self._reading)

    def cut(self) -> None:
        """Ends all children, and those started from now on."""
        if not self._is_cut:
            self._is_cut = True
            os.close(self._writing)

    def call(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: IO[bytes] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> int:
        """Runs a module in a process of its own and returns its exit status.

        Its output goes to this process's output, or to `log`. It has these environment variables
        besides those of this process.
        """
        command = [sys.executable, "-m", __name__, str(self._reading), module, *arguments]
        errors = None if log is None else subprocess.STDOUT
        return subprocess.call(
            command,
            pass_fds=[self._reading],
            stdout=log,
            stderr=errors,
            env={**os.environ, **(variables or {})},
        )


def leave_with_the_parent(reading: int) -> None:
    """Ends this process, at once and from a thread of its own, when the pipe ends."""

    def watch() -> None:
        os.read(reading, 1)  # nothing is ever written
        # Not an exception: this thread has no way into the others. Files are whole after any kill.
        os._exit(CUT_OFF)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    fd, name, *rest = sys.argv[1:]
    leave_with_the_parent(int(fd))
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
