"""The runs of a folder, and which paths may be read: those that lie in it, links followed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import require_regular_file
from ragen_apo.run_directory import RunDirectory

MAX_DEPTH = 4
"""Folders between the given one and a run: a comparison has two."""
ITSELF = "."
"""The name of a run that is the folder itself."""


@dataclass(frozen=True)
class RunsFolder:
    """A folder with runs in it, or a run."""

    root: Path
    """Absolute, without links."""

    def names(self) -> list[str]:
        """The runs' paths below the folder, that which changed last first. Links are left out."""
        found = [
            (last_change(RunDirectory(self.root / name)), name)
            for name in _runs_below(self.root, "", MAX_DEPTH)
        ]
        return [name for _, name in sorted(found, key=lambda each: (-each[0], each[1]))]

    def run(self, name: str) -> RunDirectory:
        """The run of this name. Raises RunDirectoryError where there is none in the folder."""
        path = self._inside(self.root / name) if "\0" not in name else None
        if path is None or not _is_run(path):
            raise RunDirectoryError(f"there is no run {name!r:.200} in {self.root}")
        return RunDirectory(path)

    def readable(self, path: Path) -> Path | None:
        """The path of a file that may be read; None where there is none.

        Raises RunDirectoryError for one outside the folder, also by a link, and for a pipe.
        """
        if not path.exists():
            return None
        inside = self._inside(path)
        if inside is None:
            raise RunDirectoryError(f"{path} leads out of {self.root} and is not shown")
        require_regular_file(inside)
        return inside

    def _inside(self, path: Path) -> Path | None:
        """The path without links, if it lies in the folder."""
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError):  # links in a circle
            return None
        return resolved if resolved.is_relative_to(self.root) else None


def open_folder(path: Path) -> RunsFolder:
    """Raises RunDirectoryError for what is no folder, or one that this user may not read."""
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a folder; give one that holds runs, or a run")
    if not os.access(path, os.R_OK | os.X_OK):
        raise RunDirectoryError(
            f"this user may not read the folder {path}; its owner lets others in with `chmod -R "
            f"a+rX {shlex.quote(str(path))}`"
        )
    return RunsFolder(path.resolve())


def last_change(run: RunDirectory) -> float:
    """When a file that a run writes on its way was last written, in seconds since 1970."""
    journal = run.values.with_name(f"{run.values.name}-wal")
    files = (run.metrics, run.results, run.status, run.warm_start, run.distillation, journal)
    return max(_changed(file) for file in (*files, run.config, run.api_config))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_run(path: Path) -> bool:
    run = RunDirectory(path)
    return run.config.is_file() or run.is_of_api


def _runs_below(folder: Path, name: str, depth: int) -> Iterator[str]:
    try:
        if _is_run(folder):
            yield name or ITSELF
            return
        if depth == 0:
            return
        with os.scandir(folder) as entries:
            folders = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:  # not ours to read
        return
    for each in sorted(folders):
        if not each.startswith("."):
            yield from _runs_below(folder / each, f"{name}/{each}" if name else each, depth - 1)
