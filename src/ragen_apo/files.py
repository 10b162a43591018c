"""Atomic files: write beside, flush to disk, rename.

A process killed at any moment leaves the old file or the new one, never half of one. What a killed
writer left behind is named `NAME.partial-` and eight hexadecimal digits; every reader ignores it.

Readers check: text that is not JSON, too deep nesting and wrong types raise an error with the
file's name. `SHA256SUMS` holds the checksums of a folder's files.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from ragen_apo.errors import RunDirectoryError

Record = TypeVar("Record")

PARTIAL_MARK = ".partial-"
CHECKSUMS = "SHA256SUMS"
"""A folder's checksums in the form of the program `sha256sum`."""
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_CHUNK_BYTES = 1 << 20

_CLASS_NAME = re.compile(r" or (an )?instance of \w+")

_LISTED_LEVELS = 3
"""A run's deepest folder of files, and the one that the run is in."""

MAX_JSON_DEPTH = 100
"""Written files have a few levels; readers walk them by recursion."""


def partial_path(path: Path) -> Path:
    """A fresh name beside `path` for what is to become it."""
    return path.with_name(f"{path.name}{PARTIAL_MARK}{uuid.uuid4().hex[:8]}")


def require_regular_file(path: Path) -> None:
    """Raises OSError for a folder, a pipe (reading may never begin) or a device (nor end)."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors inside name the path: of a write or a flush that fails the system does not say it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_to_disk(path: Path) -> None:
    """Asks the operating system to put a file or a directory entry on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Replaces `path` by a file with this text, or leaves it untouched and raises OSError."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` by a file with this content, or leaves it untouched and raises OSError."""
    make_directory(path.parent)
    partial = partial_path(path)
    try:
        with _naming(path):
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
    make_directory(path.parent)
    partial = partial_path(path)
    partial.mkdir()
    try:
        yield partial
        replace_directory(path, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_directory(path: Path, made: Path) -> None:
    """Flushes the directory `made` to disk and renames it to `path`; what was there is removed.

    Whoever may read the directory may read its files: safetensors makes them the owner's alone.
    """
    mode = made.stat().st_mode & 0o666  # as the umask, or the disk, has made it
    for file in sorted(made.rglob("*")):
        facts = file.lstat()
        if stat.S_ISREG(facts.st_mode) and mode & ~facts.st_mode:
            with contextlib.suppress(OSError):  # not every disk can
                file.chmod(stat.S_IMODE(facts.st_mode) | mode)
        sync_to_disk(file)
    sync_to_disk(made)
    if path.exists() or path.is_symlink():
        retired = partial_path(path)
        path.rename(retired)
        made.rename(path)
        remove(retired)
    else:
        made.rename(path)
    sync_to_disk(path.parent)


def check_writable(path: Path) -> None:
    """Raises the OSError that writing `path` atomically would raise; `path` stays as it is.

    For work that takes long and is lost if its result cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    make_directory(path.parent)
    partial = partial_path(path)
    partial.touch()
    partial.unlink()


def appears(path: Path, *, seconds: float) -> bool:
    """Whether the path is there, or will be within so many seconds.

    A disk of the network may say for a minute that a file is missing that another host has written.
    It looks again when the folder is listed.
    """
    end = time.monotonic() + seconds
    while not path.exists():
        for folder in reversed(path.parents[:_LISTED_LEVELS]):
            with contextlib.suppress(OSError):
                os.listdir(folder)
        if not path.exists() and time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def locked(path: Path, refusal: Exception) -> Iterator[None]:
    """Holds the lock file `path`, which stays; raises `refusal` where another process holds it.

    The operating system frees it with the process, however that ends.
    """
    try:
        lock = FileLock(path, blocking=False, fallback_to_soft=False).acquire()
    except Timeout:
        raise refusal from None
    with lock:
        yield


def make_directory(path: Path) -> None:
    """Makes the folder and those above it, where they are not there; raises OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        link = Path(error.filename)
        if not link.is_symlink() or link.exists():
            raise
        # That it exists would not help anybody.
        reason = "it is a link to something that is not there"
        raise FileNotFoundError(errno.ENOENT, reason, str(link)) from error


def partial_files(directory: Path, *, name: str = "?*") -> list[Path]:
    """What killed writers of the file or folder `name` (a glob) left directly in `directory`."""
    return list(directory.glob(name + PARTIAL_MARK + 8 * "[0-9a-f]"))


def remove_partial_files(directory: Path, *, name: str = "?*") -> None:
    """Removes `partial_files`, where that is possible, and nothing else."""
    for leftover in partial_files(directory, name=name):
        with contextlib.suppress(OSError):
            remove(leftover)


def remove(path: Path) -> None:
    """Removes a file, a folder, or a link, whose target stays, if there is one; raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_checksums(folder: Path) -> None:
    """Writes `SHA256SUMS` for all other files that are in the folder now."""
    sums = folder / CHECKSUMS
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != sums)
    lines = [f"{sha256_of_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    sums.write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path, names: Sequence[str] | None = None) -> None:
    """Raises ValueError if one of these files differs from `SHA256SUMS`.

    Without names, the folder must have all listed files and no others, except hidden ones. An added
    file may change what the others mean, as an adapter does beside a model's weights.
    """
    listed = _read_checksums(folder / CHECKSUMS)
    if names is None:
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        visible = {path.as_posix() for path in paths if not path.name.startswith(".")}
        if added := sorted(visible - {CHECKSUMS} - listed.keys()):
            raise ValueError(f"{added[0]} was added to what was written")
    for name in listed if names is None else names:
        if name not in listed:
            raise ValueError(f"{CHECKSUMS} has no line for {name}")
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        found = sha256_of_file(folder / name)
        if found != listed[name]:
            raise ValueError(
                f"{name} is not what was written: its SHA-256 is {found[:16]}..., expected "
                f"{listed[name][:16]}..."
            )


def _read_checksums(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(
            f"{CHECKSUMS} is missing (older runs have none; where you trust the files, run "
            f"`sha256sum * > {CHECKSUMS}` in their folder)"
        )
    digests: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        matched = _CHECKSUM_LINE.fullmatch(line)
        if matched is None:
            raise ValueError(
                f"{CHECKSUMS}, line {number} is not a checksum and a name: {line!r:.80}"
            )
        digests[matched[2]] = matched[1]
    if not digests:
        raise ValueError(f"{CHECKSUMS} is empty")
    return digests


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """The value of a JSON document in UTF-8.

    Raises ValueError where it is none, or is nested deeper than `MAX_JSON_DEPTH`; with
    `unique_keys` for an object with a key twice, of which JSON would keep the last value.
    """
    deep = f"nested deeper than {MAX_JSON_DEPTH} levels"
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_object_of if unique_keys else None,
        )
    except RecursionError as error:
        raise ValueError(deep) from error
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise ValueError(deep)
        level, depth = [part for each in level for part in _parts(each)], depth + 1
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return value if isinstance(value, list) else ()


def parse_record(kind: TypeAdapter[Record], value: Any) -> Record:
    """A record of the given type from JSON values.

    Raises ValueError, in one line with the field, for values that do not fit.
    """
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the whole"
        problem = _CLASS_NAME.sub("", first["msg"])
        raise ValueError(f"{field}: {problem}, got {first['input']!r:.80}") from error


def read_json(path: Path, kind: TypeAdapter[Record], *, advice: str) -> Record:
    """The record in a file with a JSON object; `advice` ends the message if it cannot be read.

    Raises RunDirectoryError for a file that is not JSON or holds other types, OSError for none.
    """
    content = path.read_bytes()
    try:
        value = parse_json(content)
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not JSON: {error}. {advice}") from error
    if not isinstance(value, dict):
        kind_found = type(value).__name__
        raise RunDirectoryError(f"{path} must hold a JSON object, got {kind_found}. {advice}")
    try:
        return parse_record(kind, value)
    except ValueError as error:
        raise RunDirectoryError(f"{path} cannot be used: {error}. {advice}") from error


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys, at least one, as CSV with a header."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Appends one JSON object as a line and flushes it."""
    line = json.dumps(dict(row), sort_keys=True) + "\n"
    with _naming(path), path.open("a", encoding="utf-8") as stream:
        stream.write(line)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSONL file; a last line cut off by a kill is left out.

    An absent file has no lines. Raises RunDirectoryError for any other line that is no JSON object.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content.splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines) and not content.endswith(b"\n"):
                break
            raise broken_line(path, number, f"is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise broken_line(path, number, f"must hold a JSON object, got {row!r:.80}")
        rows.append(row)
    return rows


def read_records(path: Path, kind: TypeAdapter[Record]) -> list[Record]:
    """The records of a JSONL file. Raises RunDirectoryError as `read_json_lines` does."""
    records: list[Record] = []
    for number, row in enumerate(read_json_lines(path), 1):
        try:
            records.append(parse_record(kind, row))
        except ValueError as error:
            raise broken_line(path, number, f"cannot be used ({error})") from error
    return records


def ends_whole(path: Path) -> bool:
    """Whether a JSONL file has its last line to the end; an empty one has. Raises OSError."""
    with path.open("rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return True
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def cut_line(path: Path) -> RunDirectoryError | None:
    """The error for a last line that was cut off, in a file that nobody writes any more.

    None for a whole file, and for none.
    """
    if not path.exists() or ends_whole(path):
        return None
    lines = path.read_bytes().split(b"\n")
    try:
        parse_json(lines[-1])
    except ValueError:
        return RunDirectoryError(
            f"{path}, line {len(lines)} is cut off, and the run is over: more may be lost. Put an "
            "undamaged copy of the file in its place, or delete this line and do without what it "
            "said"
        )
    return None


class File(NamedTuple):
    """A file as it is now: not equal to what it is once it was written or replaced."""

    path: Path
    inode: int
    size: int
    changed_ns: int


def file_now(path: Path) -> File | None:
    """The state of a file; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return File(path, status.st_ino, status.st_size, status.st_mtime_ns)


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
