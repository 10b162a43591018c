"""A process that answers lines, where the system is not Linux."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragen_apo.environments.toolkit.line_process import LineProcess


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LineProcess]:
    """Starts a process that gives a line back and ends."""
    (tmp_path / "one_echo.py").write_text("def main():\n    print(input())\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: LineProcess("one_echo")


@pytest.fixture
def start_with_few_files(start: Callable[[], LineProcess]) -> Iterator[Callable[[], LineProcess]]:
    """The same, where this process may open hardly a file more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    newest = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (newest + 1, hard))
    yield start
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.close(newest)


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


def test_it_starts_where_the_limit_of_open_files_is_low_and_may_be_raised(
    start_with_few_files: Callable[[], LineProcess],
) -> None:
    """macOS begins with 256, and the episodes side by side take two each."""
    process = start_with_few_files()
    assert says_seven(process)
    process.kill()
