"""Files that are either whole or not there: write beside, flush to disk, rename.

A process killed at any moment leaves the old file or the new one, never half of one. What a killed
writer left behind is named `*.partial-*` and is ignored by every reader.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_apo.errors import RunDirectoryError

PARTIAL_MARK = ".partial-"


def _partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}{PARTIAL_MARK}{uuid.uuid4().hex[:8]}")


def require_regular_file(path: Path) -> None:
    """Raises OSError for a folder, a pipe (reading may never begin) or a device (nor end)."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))


def sync_to_disk(path: Path) -> None:
    """Asks the operating system to put a file or a directory entry on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Replaces `path` by a file with this text, or leaves it untouched and raises OSError."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` by a file with this content, or leaves it untouched and raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    try:
        partial.write_bytes(content)
        sync_to_disk(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def write_json_atomically(path: Path, value: Any) -> None:
    """Writes a JSON document as `write_text_atomically` does."""
    write_text_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def directory_written_atomically(path: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `path` when the block ends without an exception.

    An existing `path` is replaced: for an instant neither name exists, so readers that must never
    see a gap point to a fresh name each time (see `training.checkpoint`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    partial.mkdir()
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            sync_to_disk(file)
        sync_to_disk(partial)
        if path.exists():
            retired = _partial_path(path)
            path.rename(retired)
            partial.rename(path)
            shutil.rmtree(retired)
        else:
            partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_to_disk(path.parent)


def remove_partial_files(directory: Path) -> None:
    """Removes what killed writers left directly in `directory`."""
    for leftover in directory.glob(f"*{PARTIAL_MARK}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Appends one JSON object as a line and flushes it."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(dict(row), sort_keys=True) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSONL file; a last line cut off by a kill is left out.

    An absent file has no lines. Raises RunDirectoryError for any other line that is no JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):
                break
            raise broken_line(path, number, f"is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise broken_line(path, number, f"must hold a JSON object, got {row!r:.80}")
        rows.append(row)
    return rows


def broken_line(path: Path, number: int, problem: str) -> RunDirectoryError:
    """The error for a line that was damaged after it was written."""
    return RunDirectoryError(
        f"{path}, line {number} {problem}. Expected a JSON object, as a run writes one a line; "
        "only the last line may be cut off, by a kill. Put an undamaged copy of the file in its "
        "place, or delete this line and do without what it said"
    )


def write_json_lines_atomically(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a JSONL file as `write_text_atomically` does."""
    write_text_atomically(
        path, "".join(json.dumps(dict(row), sort_keys=True) + "\n" for row in rows)
    )
