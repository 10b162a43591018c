"""The lines of a run's JSONL files: rows of metrics, and an index of episodes.

Consumes files that another process may be writing: a line without an end waits for it. What a line
says is checked where it is shown.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic_core import from_json

from ragen_apo.files import broken_line, parse_json
from ragen_apo.report.load import finite, mapping, series
from ragen_apo.web.view.episodes import StoredEpisode, stored_episode

BLOCK_BYTES = 1 << 18
"""What is read of a file at a time; a small one is read to its end at once."""
MAX_LINE_BYTES = 1 << 27
"""A line that is longer is no episode; reading it would take the memory of this machine."""


def parse_row(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises ValueError where it is none."""
    try:
        row = from_json(line)  # in half of the time of `json`
    except ValueError:  # halves of characters, too, which `json` writes and reads
        row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    return row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file. Raises RunDirectoryError for a line that is no JSON object."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            raise broken_line(path, number, f"is no row ({error})") from error
    return rows


@dataclass(frozen=True)
class Progress:
    """What a list says of a file of metrics: its last row, and its best evaluation."""

    last: Mapping[str, Any]
    best: float | None = None
    """The highest success rate of an evaluation, or of the rollouts where none was evaluated."""
    best_step: float | None = None
    is_evaluated: bool = False


def progress(rows: Sequence[Mapping[str, Any]]) -> Progress:
    """The progress that these rows show."""
    last = rows[-1] if rows else {}
    for key, is_evaluated in (("eval_success_rate", True), ("success_rate", False)):
        steps, values = series(rows, key)
        if values:
            best = max(range(len(values)), key=values.__getitem__)
            return Progress(last, values[best], steps[best], is_evaluated)
    return Progress(last)


def num_answers(path: Path) -> tuple[int, int]:
    """How many answers of a model behind an API a file has, and of how many episodes.

    Raises RunDirectoryError for a line that is no JSON object.
    """
    rows = read_rows(path)
    return len(rows), len({json.dumps(row.get("episode")) for row in rows})


class EpisodeIndex:
    """Where each episode begins, and what lists are made of: about 100 bytes an episode.

    It grows with its file, only as far as it is asked to; several threads may use one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self.end = 0
        """Of the last line that was read, in bytes."""
        self._last_line = b""
        self.offsets: array[int] = array("Q")
        self.returns: array[float] = array("d")
        self.num_turns: array[int] = array("L")
        self.successes = bytearray()
        self.failures: list[str] = []
        """Empty for a success."""
        self.task_ids: list[str] = []

    def __len__(self) -> int:
        return len(self.offsets)

    def refresh(self, path: Path, *, num_episodes: int | None = None) -> None:
        """Reads the lines that are new; with `num_episodes` until it has at least this number.

        Raises RunDirectoryError for a line that is no JSON object.
        """
        with self._lock, path.open("rb", buffering=BLOCK_BYTES) as stream:
            # It was cut back, or replaced: a new file may have the inode of an old one.
            stream.seek(self.end - len(self._last_line))
            if stream.read(len(self._last_line)) != self._last_line:
                self._clear()
            start = stream.seek(self.end)
            while (
                num_episodes is None or len(self) < num_episodes or self.end - start < BLOCK_BYTES
            ):
                line = stream.readline(MAX_LINE_BYTES)
                if len(line) == MAX_LINE_BYTES:
                    raise broken_line(path, len(self) + 1, "is too long to be one")
                if not line.endswith(b"\n"):
                    return
                try:
                    self._take(parse_row(line))
                except ValueError as error:
                    raise broken_line(path, len(self) + 1, f"is no row ({error})") from error
                self.end += len(line)
                self._last_line = line

    def _take(self, row: Mapping[str, Any]) -> None:
        turns = row.get("turns")
        self.failures.append(sys.intern(str(row.get("failure") or "")))
        self.num_turns.append(len(turns) if isinstance(turns, list) else 0)
        self.returns.append(finite(row.get("return")) or 0.0)
        self.successes.append(row.get("success") is True)
        self.task_ids.append(str(mapping(row.get("task")).get("task_id") or ""))
        self.offsets.append(self.end)

    def read(self, path: Path, numbers: Sequence[int]) -> dict[int, StoredEpisode]:
        """Some episodes by their number in the file, from 0, in this order.

        Raises RunDirectoryError for one that is no episode.
        """
        episodes: dict[int, StoredEpisode] = {}
        with path.open("rb") as stream:
            for number in numbers:
                stream.seek(self.offsets[number])
                try:
                    row = parse_row(stream.readline(MAX_LINE_BYTES))
                    episodes[number] = stored_episode(row)
                except ValueError as error:
                    raise broken_line(path, number + 1, f"is no episode ({error})") from error
        return episodes

    def containing(self, path: Path, text: str) -> set[int]:
        """The episodes whose line has this text, as JSON writes it, in any case.

        The names of fields do not count.
        """
        # Within a text a quote is escaped, so an unescaped one with a colon ends a name.
        needle = re.compile(rf'{"".join(map(_spelled, text))}(?![^"\\]*":)'.encode(), re.IGNORECASE)
        quick = json.dumps(text)[1:-1].lower().encode() if text.isascii() else b""
        with path.open("rb", buffering=BLOCK_BYTES) as stream:
            lines = zip(range(len(self)), stream, strict=False)
            return {
                number for number, line in lines if quick in line.lower() and needle.search(line)
            }


def _spelled(character: str) -> str:
    """A pattern of it in JSON, in any case: `re.IGNORECASE` knows only that of ASCII in bytes."""
    cases = {character} if character.isascii() else {character.lower(), character.upper()}
    return f"(?:{'|'.join(re.escape(json.dumps(case)[1:-1]) for case in sorted(cases))})"
