"""Folders that are written once and only read afterwards, with a list of their files' checksums.

`provide_folder` consumes a path and a function that fills a folder; afterwards the path is such a
folder, whole. One that lacks a file, or has a file with another content than was written, is made
anew. Writers work beside the place and rename; a second one waits for the first.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from ragen_apo.files import directory_written_atomically, remove_partial_files, sha256_of_file
from ragen_apo.progress import Progress

LIST_NAME = "checksums.json"
TRUSTED_BYTES = 1 << 26
"""Larger files are read once: later their size and time of change are trusted."""


def provide_folder(folder: Path, write: Callable[[Path], None], *, progress: Progress) -> None:
    """Makes `folder` what `write` puts into an empty one, unless it is there and undamaged."""
    if folder.exists() and not damage_of(folder):
        return
    with FileLock(folder.with_name(f".{folder.name}.lock"), fallback_to_soft=False):
        remove_partial_files(folder.parent, name=folder.name)
        if folder.exists():  # who has a damaged one mapped keeps what was mapped
            damage = damage_of(folder)
            if not damage:
                return
            progress.say(f"{folder} is damaged ({damage}); it is made anew")
        with directory_written_atomically(folder) as partial:
            write(partial)
            listed = {path.name: _facts(path) for path in sorted(partial.iterdir())}
            (partial / LIST_NAME).write_text(json.dumps(listed, indent=1), encoding="utf-8")


def damage_of(folder: Path) -> str:
    """What is wrong with a folder that `provide_folder` made, in words; empty for nothing."""
    try:
        listed = json.loads((folder / LIST_NAME).read_text(encoding="utf-8"))
        present = {path.name for path in folder.iterdir()} - {LIST_NAME}
        if not isinstance(listed, dict) or present != set(listed):
            return f"its files are not those in {LIST_NAME}"
        changed = [
            name for name in sorted(present) if not _is_unchanged(folder / name, listed[name])
        ]
    except (OSError, ValueError, RecursionError) as error:
        return f"it cannot be read: {error}"
    return f"{changed[0]} is not what was written" if changed else ""


def _facts(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "time": status.st_mtime_ns, "sha256": sha256_of_file(path)}


def _is_unchanged(path: Path, listed: Any) -> bool:
    if not isinstance(listed, dict):
        return False
    status = path.stat()
    if status.st_size != listed.get("size"):
        return False
    trusted = status.st_size > TRUSTED_BYTES and status.st_mtime_ns == listed.get("time")
    return trusted or sha256_of_file(path) == listed.get("sha256")
