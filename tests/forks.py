"""Processes without the seconds of their imports, in tests: forks of this one."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ragen_apo import cli

SECONDS = 300.0


class Fork:
    """A fork that does its work and ends, as a process of its own would."""

    def __init__(self, output: Path, work: Callable[[], object]) -> None:
        """What it prints, also as an error, goes to the end of the file `output`."""
        self._output = output
        output.touch()
        self.pid = os.fork()
        if self.pid == 0:
            status: object = 1
            try:
                _begin(output)
                work()
                status = 0
            except SystemExit as end:
                status = end.code or 0
            finally:
                try:
                    if sys.exc_info()[0]:
                        traceback.print_exc()
                    sys.stdout.flush()
                finally:  # also where nothing can be written; it would go on as another pytest
                    os._exit(status if isinstance(status, int) else 1)
        self.returncode: int | None = None

    @property
    def printed(self) -> str:
        """So far."""
        return self._output.read_text()

    def is_running(self) -> bool:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode is None

    def ended(self, *, seconds: float = SECONDS) -> str:
        """What was printed until the end."""
        end = time.monotonic() + seconds
        while self.is_running():
            assert time.monotonic() < end, self.printed
            time.sleep(0.02)
        return self.printed

    def says(self, pattern: str, *, seconds: float = SECONDS) -> str:
        """Waits until it has printed what the pattern finds."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.printed)):
            assert self.is_running() and time.monotonic() < end, self.printed
            time.sleep(0.02)
        return found[0]

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if self.is_running():
            os.kill(self.pid, number)


def _begin(output: Path) -> None:
    """Signals as a process of a terminal has them; a file past what pytest has put there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115


def forked_command(
    output: Path, *arguments: object, before: Callable[[], object] = lambda: None
) -> Fork:
    """`ragen-apo` with these arguments; `before` is called in the fork."""

    def work() -> None:
        before()
        sys.argv = ["ragen-apo", *map(str, arguments)]
        cli.main()

    return Fork(output, work)
