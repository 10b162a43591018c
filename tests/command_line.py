"""The command line in a test: what a command printed, its exit status, and what files it left."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Standard error on one line."""
        return " ".join(self.err.split())


Command = Callable[..., Result]


def assert_refused(result: Result, *parts: object) -> None:
    """An error that has all these parts, read as one line, and exit status 2."""
    assert result.status == 2, result.err
    assert result.err.startswith("error: "), result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert str(part) in result.message, result.err


def assert_one_line(result: Result, *parts: object) -> None:
    """An error as `assert_refused` has it, that is printed on a single line."""
    assert_refused(result, *parts)
    assert result.err.count("\n") == 1, result.err


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
