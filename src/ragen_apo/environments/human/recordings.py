"""Episodes that people played, kept as JSON lines by `ragen-apo play --record` and `serve shop`.

A line is a finished episode: the environment's version, the seed, the task, and observation, action
and reward of each turn. `select_recordings` gives those that can be demonstrations of a given
environment's training tasks. It names the others with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ragen_apo.environments.base import HasTasks
from ragen_apo.environments.human.play import PlayedEpisode
from ragen_apo.errors import ConfigError
from ragen_apo.files import check_writable, parse_json, parse_record, require_regular_file

SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Recording:
    """A played episode, with the version and the seed that reproduce it."""

    environment_version: str
    seed: int
    episode: PlayedEpisode

    def to_row(self) -> dict[str, Any]:
        """The record as JSON values."""
        return dataclasses.asdict(self)

    def to_line(self) -> str:
        """The record as its line of a file, in ASCII."""
        return json.dumps(self.to_row())


_RECORDING = TypeAdapter(Recording)


def require_recordable(path: Path) -> None:
    """Raises ConfigError where no recording could be added to this file, which stays as it is."""
    try:
        if os.path.lexists(path):
            require_regular_file(path)
            path.open("ab").close()
        else:
            check_writable(path)
    except OSError as error:
        raise ConfigError(
            f"--record {path}: no episode can be recorded there ({error.strerror or error}); name "
            "a file in a folder that you may write to"
        ) from error


def append_recording(path: Path, recording: Recording) -> None:
    """Adds a line to the file, in one piece, after anything that a killed writer left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - 1, 0))
        start = b"" if stream.read(1) in (b"", b"\n") else b"\n"
        stream.write(start + recording.to_line().encode() + b"\n")


def read_recordings(path: Path) -> tuple[list[Recording], list[str]]:
    """The episodes in a file, or in all `*.jsonl` of a folder, and the lines that are none.

    A line that was cut off does not stand in the way of the others. Raises ConfigError if there is
    no such file or folder.
    """
    if not path.exists():
        raise ConfigError(
            f"warm_start.demonstrations.recordings: there is no {path}; record episodes with "
            "`ragen-apo play ENVIRONMENT --record FILE`"
        )
    recordings: list[Recording] = []
    unreadable: list[str] = []
    for file in sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]:
        if not file.is_file():
            raise ConfigError(
                f"warm_start.demonstrations.recordings: {file} is a pipe, a device or a folder; "
                "expected a file of JSON lines"
            )
        lines = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                recording = parse_record(_RECORDING, parse_json(line))
            except ValueError:
                recording = None
            if recording is not None and recording.episode.turns:
                recordings.append(recording)
            else:
                unreadable.append(f"{file}, line {number}")
    return recordings, unreadable


@dataclass(frozen=True)
class Selection:
    """The usable recordings, and in words the others; empty if there are none."""

    recordings: tuple[Recording, ...]
    left_out: str


def select_recordings(path: Path, environment: HasTasks) -> Selection:
    """The recordings of this environment's training tasks, in file order; ConfigError for none."""
    recordings, unreadable = read_recordings(path)
    training = {task.task_id for task in environment.tasks("train")}
    properties = environment.properties
    usable: list[Recording] = []
    reasons: Counter[str] = Counter()
    for recording in recordings:
        task, version = recording.episode.task, recording.environment_version
        if task.environment != properties.name:
            reasons[f"of the environment {task.environment}"] += 1
        elif version != properties.version:
            reasons[f"of version {version}"] += 1
        elif task.task_id not in training:
            reasons[f"of a task that is not for training (split {task.split})"] += 1
        else:
            usable.append(recording)
    left_out = [f"{count} {reason}" for reason, count in sorted(reasons.items())]
    if unreadable:
        left_out.append(f"{len(unreadable)} unreadable (cut off?): {', '.join(unreadable[:3])}")
    if not usable:
        raise ConfigError(
            f"warm_start.demonstrations.recordings: {path} has no episode of a training task of "
            f"{properties.name}, version {properties.version}; left out: "
            f"{'; '.join(left_out) or 'nothing, there is none'}. Play with the options of the "
            "configuration's section environment: a version stands for data, text and turn limit"
        )
    return Selection(tuple(usable), "; ".join(left_out))
