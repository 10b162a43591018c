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
    """One line of error that has all these parts, and exit status 2."""
    assert result.status == 2, result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    for part in parts:
        assert str(part) in result.err, result.err


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
