"""The command line in a test: what a command printed, its exit status, and what files it left."""

from collections.abc import Callable
from pathlib import Path


class Result:
    """What a command left behind."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, " ".join(err.split())


Command = Callable[..., Result]


def assert_refused(result: Result, *parts: str) -> None:
    assert result.status == 2, result.err
    assert result.err.startswith("error: "), result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err, result.err


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
