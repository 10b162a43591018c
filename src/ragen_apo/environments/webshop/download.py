"""WebShop's data from its public places, checked and put in place whole.

`download_data` consumes the name of a size (`small`, `full`) and fills `store.real_data_folder`
with the files of `SOURCES`, from the network or a folder at hand, and a SHA-256 beside each. The
folder appears when every file is there and a catalogue was prepared from them, so that every record
was read; until then the parts of a download lie in `<size>.download` beside it, where the next call
goes on. A folder at hand is only ever read.

Upstream publishes no checksums: what the first download brought is recorded in `<file>.sha256` (the
format of sha256sum) and compared whenever the command runs again. A checksum in `SOURCES` is
compared as well.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ragen_apo.environments.webshop.checked_folders import file_checksum
from ragen_apo.environments.webshop.fetch import (
    DEFAULT_PATIENCE,
    FetchError,
    Patience,
    fetch,
    forget,
)
from ragen_apo.environments.webshop.json_streams import stream_json_array, stream_json_object
from ragen_apo.environments.webshop.store import open_catalog, real_data_folder
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.files import PARTIAL_MARK, sync_to_disk, write_text_atomically
from ragen_apo.progress import Progress

DRIVE_ADDRESS: Final = "https://drive.google.com/uc?export=download&id={drive_id}"
NUM_RECORDS_READ = 100
"""So many records of a file are looked at as soon as it came; preparing reads all."""
TAIL_BYTES = 4096
COPY_BYTES = 1 << 20
_MEGABYTE = 1_000_000
_AT_HAND = "download the file with a browser and give its folder with --from"


@dataclass(frozen=True)
class RemoteFile:
    """One of upstream's files and where it is published."""

    name: str
    drive_id: str
    """Of Google Drive, as upstream's setup script names it."""
    sha256: str | None = None
    """What the content must hash to; None: whatever the first download brought is recorded."""
    max_bytes: int = 1_000_000_000
    """More than this is another file: no server may fill the disk."""
    required: bool = True
    """Without the human instructions everything but the goals `human` works."""


_HUMAN: Final = RemoteFile(
    "items_human_ins.json", "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O", required=False
)
SOURCES: Final[dict[str, tuple[RemoteFile, ...]]] = {
    "small": (
        RemoteFile("items_shuffle_1000.json", "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib"),
        RemoteFile("items_ins_v2_1000.json", "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu"),
        _HUMAN,
    ),
    "full": (
        RemoteFile(
            "items_shuffle.json", "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB", max_bytes=50_000_000_000
        ),
        RemoteFile("items_ins_v2.json", "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi"),
        _HUMAN,
    ),
}


def download_data(
    size: str,
    *,
    source: Path | None = None,
    force: bool = False,
    progress: Progress,
    patience: Patience = DEFAULT_PATIENCE,
) -> Path:
    """The folder with the checked files of a size, fetched unless it is there.

    `source` is a folder to take the files from instead of the network; `force` replaces what is
    there and what an earlier call left unfinished. Raises EnvironmentDataError; a folder that was
    there before is then unchanged.
    """
    folder = real_data_folder(size)
    unfinished = folder.with_name(f"{size}.download")
    try:
        if source is not None:
            _check_source(size, source, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise EnvironmentDataError(f"{folder} is no folder; move it away, the data goes there")
        with _locked(folder):
            for leftover in _leftovers(folder):
                _remove(leftover)
            if folder.is_dir() and not force:
                _check_present(size, folder, source, progress)
                return folder
            if force:
                _remove(unfinished)
            if source is None:
                unfinished.mkdir(exist_ok=True)
                _fill(size, unfinished, None, progress, patience)
                _prepare(unfinished, "what was downloaded", progress)
                _put_in_place(unfinished, folder)
            else:
                _copy_in_place(size, source, folder, progress, patience)
                _remove(unfinished)
    except OSError as error:
        raise _disk_error(error, folder.parent) from error
    return folder


def _copy_in_place(
    size: str, source: Path, folder: Path, progress: Progress, patience: Patience
) -> None:
    copy = _fresh_name(folder)
    copy.mkdir()
    try:
        _fill(size, copy, source, progress, patience)
        _prepare(copy, str(source), progress)
        _put_in_place(copy, folder)
    finally:
        _remove(copy)


def _prepare(staging: Path, origin: str, progress: Progress) -> None:
    """Reads every record; equal content finds the same catalogue when it is in place."""
    try:
        open_catalog(str(staging), progress=progress)
    except EnvironmentDataError as error:
        raise EnvironmentDataError(
            f"{str(error).replace(str(staging), origin)} (a download is begun anew with --force)"
        ) from error


def _fresh_name(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{PARTIAL_MARK}{uuid.uuid4().hex[:8]}")


def _leftovers(folder: Path) -> list[Path]:
    """What killed calls left behind: names that `_fresh_name` gives, and no others."""
    name = re.compile(f"{re.escape(folder.name + PARTIAL_MARK)}[0-9a-f]{{8}}")
    return [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one: where it leads to stays as it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _disk_error(error: OSError, place: Path) -> EnvironmentDataError:
    if error.errno == errno.ENOSPC:
        return EnvironmentDataError(
            f"the disk of {place} is full: {error.strerror}; free space, or set RAGEN_APO_DATA to "
            "another disk, and run the command again: it continues where it stopped"
        )
    return EnvironmentDataError(
        f"the WebShop data cannot be stored in {place}: {error}; expected a folder that can be "
        "written; set RAGEN_APO_DATA to another one"
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Refuses a second download of the same size."""
    with folder.with_name(f".{folder.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentDataError(
                f"another process is fetching the data of {folder}; wait for it or stop it first"
            ) from None
        yield


def _fill(
    size: str, staging: Path, source: Path | None, progress: Progress, patience: Patience
) -> None:
    """Gathers every file of a size in `staging`, each with its checksum."""
    for remote in SOURCES[size]:
        path = staging / remote.name
        if source is None:
            _obtain(
                remote, path, lambda partial, r=remote: _download(r, partial, progress, patience)
            )
        elif (source / remote.name).exists():
            origin = source / remote.name
            _obtain(
                remote, path, lambda partial, o=origin: _copy(o, partial, progress), str(origin)
            )
        else:
            progress.say(f"{source} has no {remote.name}: there will be no human goals")


def _check_source(size: str, source: Path, folder: Path) -> None:
    """Refuses a source without the files, and one in a folder that this command writes or clears.

    Names are compared as the disk resolves them, those of the single files as well, so that no link
    leads around it.
    """
    own = [folder, folder.with_name(f"{size}.download")]
    own += _leftovers(folder) if folder.parent.is_dir() else []
    taken = {Path(os.path.realpath(path)) for path in own}
    for origin in (source, *(source / remote.name for remote in SOURCES[size])):
        real = Path(os.path.realpath(origin))
        if not taken.isdisjoint((real, *real.parents)):
            raise EnvironmentDataError(
                f"--from {source}: {real} lies where this command itself keeps data "
                f"({folder} and its temporary folders); leave out --from to use what is there, or "
                "move the files elsewhere"
            )
    for remote in SOURCES[size]:
        origin = source / remote.name
        if origin.exists() and not origin.is_file():
            raise EnvironmentDataError(
                f"--from {source}: {remote.name} is no regular file; expected the file of upstream"
            )
    missing = [r.name for r in SOURCES[size] if r.required and not (source / r.name).is_file()]
    if missing:
        found = sorted(p.name for p in source.glob("*.json")) if source.is_dir() else "no folder"
        raise EnvironmentDataError(
            f"--from {source}: {' and '.join(missing)} not there, found {found}; expected the "
            f"files of --size {size} under upstream's names"
        )


def _obtain(
    remote: RemoteFile, path: Path, bring: Callable[[Path], None], origin: str = ""
) -> None:
    """Brings a file, checks it and records its checksum, unless an earlier call did."""
    if path.exists() and _checksum_path(path).exists():
        return
    partial = path.with_name(f"{path.name}.part")
    bring(partial)
    try:
        check_file(partial, name=remote.name)
        _check_configured(remote, checksum := file_checksum(partial))
    except EnvironmentDataError as error:
        forget(partial)  # More of it would not make it right.
        origin = origin or DRIVE_ADDRESS.format(drive_id=remote.drive_id)
        raise EnvironmentDataError(f"{origin}: {error}; nothing of it was kept") from error
    partial.replace(path)
    forget(partial)
    write_text_atomically(_checksum_path(path), f"{checksum}  {path.name}\n")


def _download(remote: RemoteFile, partial: Path, progress: Progress, patience: Patience) -> None:
    address = DRIVE_ADDRESS.format(drive_id=remote.drive_id)
    bar = _ByteBar(progress, f"download {remote.name}")
    try:
        fetch(
            address,
            partial,
            max_bytes=remote.max_bytes,
            patience=patience,
            told=bar.told,
            say=progress.say,
        )
    except FetchError as error:
        kept = partial.stat().st_size if partial.exists() else 0
        raise EnvironmentDataError(
            f"{remote.name} cannot be fetched from {address}: {error}. {kept:,} bytes of it are "
            f"kept; run the command again to continue, or {_AT_HAND}"
        ) from error


def _copy(origin: Path, partial: Path, progress: Progress) -> None:
    bar = _ByteBar(progress, f"copy {origin.name}")
    total, done = origin.stat().st_size, 0
    with origin.open("rb") as reading, partial.open("wb") as writing:
        while block := reading.read(COPY_BYTES):
            writing.write(block)
            done += len(block)
            bar.told(done, total)


class _ByteBar:
    """Bytes told as megabytes, with the rate."""

    def __init__(self, progress: Progress, phase: str) -> None:
        self._progress, self._phase = progress, phase
        self._started: tuple[float, int] | None = None

    def told(self, done: int, total: int | None) -> None:
        if self._started is None:
            self._progress.start(f"{self._phase} (MB)", -(-(total or 0) // _MEGABYTE))
            self._started = (time.monotonic(), done)
        seconds = max(time.monotonic() - self._started[0], 1e-3)
        rate = max(done - self._started[1], 0) / seconds / _MEGABYTE
        self._progress.update(-(-done // _MEGABYTE), f"{rate:.1f} MB/s")


def _put_in_place(staging: Path, folder: Path) -> None:
    """Renames the whole folder to its name; what was there goes."""
    for path in sorted(staging.iterdir()):
        sync_to_disk(path)
    sync_to_disk(staging)
    retired = _fresh_name(folder)
    if folder.exists() or folder.is_symlink():
        folder.rename(retired)
    staging.rename(folder)
    sync_to_disk(folder.parent)
    _remove(retired)


def _check_present(size: str, folder: Path, source: Path | None, progress: Progress) -> None:
    """Compares what lies in place with its checksums and, where one is given, with a source."""
    progress.start("compare checksums", len(SOURCES[size]))
    for number, remote in enumerate(SOURCES[size]):
        path = folder / remote.name
        if not path.exists():
            if remote.required:
                raise EnvironmentDataError(f"{path} is missing; get it anew with --force")
            continue
        checksum = file_checksum(path)
        recorded = _recorded_checksum(path)
        if recorded is None:  # Somebody put the file there by hand.
            check_file(path, name=remote.name)
            write_text_atomically(_checksum_path(path), f"{checksum}  {path.name}\n")
        elif recorded != checksum:
            raise EnvironmentDataError(
                f"{path} is not what was downloaded: its SHA-256 is {checksum}, recorded is "
                f"{recorded}; get it anew with --force"
            )
        _check_configured(remote, checksum)
        if source is not None and (source / remote.name).exists():
            _check_same(source / remote.name, path, checksum)
        progress.update(number + 1)
    progress.say(f"{folder} is there already and its checksums are right; --force replaces it")


def _check_same(origin: Path, path: Path, checksum: str) -> None:
    if file_checksum(origin) != checksum:
        raise EnvironmentDataError(
            f"{path} is there already and differs from {origin}; replace it with --force"
        )


def _check_configured(remote: RemoteFile, checksum: str) -> None:
    if remote.sha256 is not None and checksum != remote.sha256.lower():
        raise EnvironmentDataError(
            f"{remote.name} has the SHA-256 {checksum}, expected {remote.sha256.lower()}: the file "
            "was changed or damaged on its way"
        )


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _recorded_checksum(path: Path) -> str | None:
    try:
        words = _checksum_path(path).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return words[0] if words else None


def check_file(path: Path, *, name: str) -> None:
    """Looks at the first records and the end of a file; raises EnvironmentDataError.

    Enough to tell a page, another file or a cut-off one from the file of this name.
    """
    kind = _kind(name)
    stream = stream_json_array if kind.brackets == "[]" else stream_json_object
    try:
        beginning = [value for value, _ in itertools.islice(stream(path), NUM_RECORDS_READ)]
        if not any(kind.holds(value) for value in beginning):
            fields = ", ".join(kind.fields)
            raise ValueError(f"none of its first {len(beginning)} records has the fields {fields}")
        _check_end(path, kind.brackets[1].encode())
    except ValueError as error:
        raise EnvironmentDataError(
            f"what came is not {name} of WebShop but {path.stat().st_size:,} bytes that begin "
            f"{_beginning(path)!r} ({str(error)[:200]})"
        ) from error


@dataclass(frozen=True)
class _Kind:
    """What a file of upstream looks like."""

    brackets: str
    fields: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Whether this is a record of such a file: an object, or key and object or objects."""
        record = value[1] if self.brackets == "{}" else value
        record = record[0] if isinstance(record, list) and record else record
        return isinstance(record, dict) and set(self.fields) <= set(record)


def _kind(name: str) -> _Kind:
    if name.startswith("items_shuffle"):
        return _Kind("[]", ("asin", "name", "category", "query", "product_category"))
    if name.startswith("items_ins_v2"):
        return _Kind("{}", ("attributes",))
    return _Kind("{}", ("instruction", "instruction_attributes", "instruction_options"))


def _check_end(path: Path, bracket: bytes) -> None:
    with path.open("rb") as stream:
        stream.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        end = stream.read().rstrip(b" \t\r\n")
    if not end.endswith(bracket):
        raise ValueError(f"it does not end with {bracket.decode()}: the file is cut off")


def _beginning(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(60).decode("utf-8", "replace")
