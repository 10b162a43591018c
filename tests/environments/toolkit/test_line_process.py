"""A process that answers lines, where the system is not Linux."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.environments.toolkit.line_process import LineProcess


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LineProcess]:
    """Starts a process that gives a line back and ends."""
    (tmp_path / "one_echo.py").write_text("def main():\n    print(input())\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: LineProcess("one_echo")


def says_seven(process: LineProcess) -> bool:
    process.send("7")
    return process.answer(within_seconds=60) == "7\n"


def test_it_is_closed_where_a_group_of_ended_processes_may_not_be_killed(
    start: Callable[[], LineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux takes the signal, macOS answers EPERM."""

    def killpg(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "killpg", killpg)
    process = start()
    assert says_seven(process)
    process.kill()
    assert not process.is_running
