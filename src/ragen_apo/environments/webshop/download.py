"""WebShop's data from its public places, checked and put in place whole.

`download_data` consumes the name of a size (`small`, `full`). It fills `store.real_data_folder`
with the files of `SOURCES`, from the network or from a given folder, and with `SHA256SUMS`. The
folder appears only when every file is there and a catalogue was prepared from them, so every record
was read. Until then the parts of a download are in `<size>.download` beside it, where the next call
continues. A given folder is only read.

Upstream publishes no checksums. So the checksums of the first download are recorded, and compared
whenever the command runs again. A checksum in `SOURCES` is compared as well.
"""

import filecmp
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ragen_apo.environments.webshop.fetch import (
    DEFAULT_PATIENCE,
    FetchError,
    Patience,
    fetch,
    forget,
)
from ragen_apo.environments.webshop.goals import GoalKind
from ragen_apo.environments.webshop.store import open_catalog, real_data_folder
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.files import (
    CHECKSUMS,
    check_checksums,
    directory_written_atomically,
    locked,
    partial_files,
    remove,
    remove_partial_files,
    replace_directory,
    write_checksums,
)
from ragen_apo.progress import Progress

DRIVE_ADDRESS: Final = "https://drive.google.com/uc?export=download&id={drive_id}"


@dataclass(frozen=True)
class RemoteFile:
    """One of upstream's files and where it is published."""

    name: str
    drive_id: str
    """Of Google Drive, as upstream's setup script names it."""
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
            _check_source(size, source, folder, unfinished)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise EnvironmentDataError(f"{folder} is no folder; move it away, the data goes there")
        busy = f"another process is fetching the data of {folder}; wait for it or stop it first"
        with locked(folder.with_name(f".{size}.lock"), EnvironmentDataError(busy)):
            remove_partial_files(folder.parent, name=size)
            if folder.is_dir() and not force:
                _check_present(size, folder, source, progress)
                return folder
            if force:
                remove(unfinished)
            if source is None:
                _download(size, unfinished, progress, patience)
                write_checksums(unfinished)
                replace_directory(folder, unfinished)
            else:
                with directory_written_atomically(folder) as partial:
                    _copy(size, source, partial, progress)
                    write_checksums(partial)
                remove(unfinished)
    except OSError as error:
        raise EnvironmentDataError(
            f"the WebShop data cannot be stored in {folder.parent}: {error}; free space, or set "
            "RAGEN_APO_DATA to another folder, and run the command again: it continues where it "
            "stopped"
        ) from error
    return folder


def _download(size: str, unfinished: Path, progress: Progress, patience: Patience) -> None:
    """Makes `unfinished` the files of a size, prepared; those that are there are not asked for."""
    unfinished.mkdir(exist_ok=True)
    for remote in SOURCES[size]:
        path = unfinished / remote.name
        partial = path.with_name(f"{path.name}.part")
        if path.exists():
            continue
        address = DRIVE_ADDRESS.format(drive_id=remote.drive_id)
        try:
            fetch(
                address, partial, max_bytes=remote.max_bytes, patience=patience, progress=progress
            )
        except FetchError as error:
            kept = partial.stat().st_size if partial.exists() else 0
            raise EnvironmentDataError(
                f"{remote.name} cannot be fetched from {address}: {error}. {kept:,} bytes of it "
                "are kept; run the command again to continue, or download the file with a browser "
                "and give its folder with --from"
            ) from error
        partial.replace(path)
        forget(partial)
    _prepare(unfinished, "what was downloaded", progress)


def _copy(size: str, source: Path, partial: Path, progress: Progress) -> None:
    """Copies the files of a size into `partial` and prepares them."""
    for remote in SOURCES[size]:
        origin = source / remote.name
        if not origin.exists():
            progress.say(f"{source} has no {remote.name}: there will be no human goals")
            continue
        progress.say(f"copying {origin}")
        shutil.copyfile(origin, partial / remote.name)
    _prepare(partial, str(source), progress)


def _prepare(staging: Path, origin: str, progress: Progress) -> None:
    """Reads every record; equal content finds the same catalogue when it is in place."""
    try:
        catalog = open_catalog(str(staging), progress=progress)
        if not len(catalog.goal_index(GoalKind.SYNTHETIC.value).order):
            raise EnvironmentDataError(f"no instruction in {staging} is about one of its products")
    except EnvironmentDataError as error:
        raise EnvironmentDataError(
            f"{str(error).replace(str(staging), origin)} (a download is begun anew with --force)"
        ) from error


def _check_source(size: str, source: Path, folder: Path, unfinished: Path) -> None:
    """Refuses a source without the files, and one in a folder that this command writes or clears.

    Names are compared as the disk resolves them, those of the single files as well, so that no link
    leads around it.
    """
    cleared = [folder, unfinished, *partial_files(folder.parent, name=size)]
    taken = {Path(os.path.realpath(path)) for path in cleared}
    for origin in (source, *(source / remote.name for remote in SOURCES[size])):
        real = Path(os.path.realpath(origin))
        if not taken.isdisjoint((real, *real.parents)):
            raise EnvironmentDataError(
                f"--from {source}: {real} lies where this command itself keeps data "
                f"({folder} and its temporary folders); leave out --from to use what is there, or "
                "move the files elsewhere"
            )
    wrong = [
        remote.name
        for remote in SOURCES[size]
        if not (source / remote.name).is_file()
        and (remote.required or (source / remote.name).exists())
    ]
    if wrong:
        found = sorted(p.name for p in source.glob("*.json")) if source.is_dir() else "no folder"
        raise EnvironmentDataError(
            f"--from {source}: {' and '.join(wrong)} is no regular file, found {found}; "
            f"expected the files of --size {size} under upstream's names"
        )


def _check_present(size: str, folder: Path, source: Path | None, progress: Progress) -> None:
    """Compares what lies in place with its checksums and, where one is given, with a source."""
    names = [r.name for r in SOURCES[size] if r.required or (folder / r.name).exists()]
    progress.start("compare checksums", 1)
    try:
        if not (folder / CHECKSUMS).exists():  # Somebody put the files there by hand.
            write_checksums(folder)
        check_checksums(folder, names)
    except ValueError as error:
        raise EnvironmentDataError(
            f"{folder} is not what was downloaded: {error}; get it anew with --force"
        ) from error
    for remote in SOURCES[size]:
        path = folder / remote.name
        origin = None if source is None else source / remote.name
        if origin is None or not origin.exists():
            continue
        if not path.exists():
            raise EnvironmentDataError(
                f"{folder} has no {remote.name}, and {source} has one; take it over with --force"
            )
        if not filecmp.cmp(origin, path, shallow=False):
            raise EnvironmentDataError(
                f"{path} is there already and differs from {origin}; replace it with --force"
            )
    progress.update(1)
    progress.say(f"{folder} is there already and its checksums are right; --force replaces it")
