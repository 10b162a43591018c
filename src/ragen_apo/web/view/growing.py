"""Files that grow a line at a time, read once: metrics as columns, episodes as an index.

Consumes JSONL files, perhaps of a run that is writing them; produces what pages need of all lines
in a few bytes a line. A file that was replaced, as a resumed run does, is read anew.
"""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import MAX_JSON_DEPTH, broken_line, parse_json
from ragen_apo.report.load import finite, mapping

BLOCK_BYTES = 1 << 18
"""Stays in the processor's cache: in blocks of 4 MiB splitting lines takes three times as long."""
MAX_LINE_BYTES = 1 << 27
"""A line that is longer is no episode; reading it would take the memory of this machine."""
MAX_COUNT = 1 << 31
"""Of turns and steps, so that any number fits its array."""
MAX_METRICS = 300
"""Names; more are not from this package."""


class GrowingFile:
    """Follows a file; a subclass takes its whole lines, in order, each once.

    Several threads may use one: what reads more than one of its columns holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._identity: tuple[int, int] | None = None
        self._end = 0
        """Of the last line that was taken, in bytes."""
        self._taken = 0

    def refresh(self, path: Path, *, num_lines: int | None = None) -> None:
        """Takes the lines that are new; with `num_lines` stops once it has at least this number.

        Raises RunDirectoryError for a line that is no JSON object, unless it is the last one.
        """
        with self.lock:
            status = path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._end:
                self._identity, self._end, self._taken = identity, 0, 0
                self.clear()
            if status.st_size > self._end and (num_lines is None or self._taken < num_lines):
                self._read(path, num_lines)

    @property
    def end(self) -> int:
        """How many bytes were taken."""
        return self._end

    def _read(self, path: Path, num_lines: int | None) -> None:
        begun: list[bytes] = []
        with path.open("rb") as stream:
            stream.seek(self._end)
            while block := stream.read(BLOCK_BYTES):
                begun.append(block)
                if b"\n" in block:
                    *lines, rest = b"".join(begun).split(b"\n")
                    begun = [rest]
                    self._take(path, lines)
                    if num_lines is not None and self._taken >= num_lines:
                        return
                elif len(begun) * BLOCK_BYTES > MAX_LINE_BYTES:
                    raise broken_line(path, self._taken + 1, "is too long to be one")

    def _take(self, path: Path, lines: Sequence[bytes]) -> None:
        try:
            for line in lines:
                self.take(line, self._end)
                self._end += len(line) + 1
                self._taken += 1
        except (ValueError, TypeError) as error:
            raise broken_line(path, self._taken + 1, f"is no row ({error})") from error

    def clear(self) -> None:
        """Forgets all lines."""
        raise NotImplementedError

    def take(self, line: bytes, start: int) -> None:
        """The next line and its offset. Raises ValueError for what is no JSON object."""
        raise NotImplementedError


class Metrics(GrowingFile):
    """The numbers of a file of metrics by name, NaN where a row has none."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.num_rows = 0
        self.last: Mapping[str, Any] = {}
        self._columns: dict[str, array[float]] = {}
        self._phases: list[str] = []

    def take(self, line: bytes, start: int) -> None:
        # What opens no more brackets than that cannot be nested deeper, and need not be walked.
        is_flat = line.count(b"{") + line.count(b"[") < MAX_JSON_DEPTH
        row = json.loads(line) if is_flat else parse_json(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        for name in row.keys() - self._columns.keys():
            if len(self._columns) < MAX_METRICS:
                self._columns[name] = array("d", [math.nan]) * self.num_rows
        for name, column in self._columns.items():
            value = row.get(name)
            if type(value) is not float or not math.isfinite(value):  # few are
                value = finite(value)
            column.append(math.nan if value is None else value)
        self._phases.append(sys.intern(str(row.get("phase") or "")[:40]))
        self.num_rows, self.last = self.num_rows + 1, row

    def series(self, name: str, *, phase: str = "") -> tuple[list[float], list[float]]:
        """The steps and values of one metric, where it is a number; rows without a step count.

        With a phase those of its rows alone.
        """
        with self.lock:
            values = self._columns.get(name, array("d"))
            steps = self._columns.get("step", array("d"))
            pairs = [
                (number if not steps or math.isnan(step := steps[number - 1]) else step, value)
                for number, value in enumerate(values, 1)
                if not math.isnan(value) and phase in ("", self._phases[number - 1])
            ]
        return [float(step) for step, _ in pairs], [value for _, value in pairs]


@dataclass(frozen=True)
class Progress:
    """What a list says of a file of metrics: its last row, and its best evaluation."""

    last: Mapping[str, Any]
    best: float | None = None
    """The highest success rate of an evaluation, or of the rollouts where none was evaluated."""
    best_step: float | None = None
    is_evaluated: bool = False


_RATES = {
    True: re.compile(rb'"eval_success_rate": ([-+.0-9eE]+)'),
    False: re.compile(rb'"success_rate": ([-+.0-9eE]+)'),
}
"""Of an evaluation or not. Two, because each is found by its long beginning."""


def progress(path: Path) -> Progress:
    """Finds the rates without parsing every row: a list shows many runs at once.

    Raises RunDirectoryError where the last row is no JSON object.
    """
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    last = _row_at(path, content, len(content) - 1)
    for is_evaluated, pattern in _RATES.items():
        best = max(pattern.finditer(content), key=lambda found: float(found[1]), default=None)
        if best is not None:
            step = finite(_row_at(path, content, best.start()).get("step"))
            return Progress(last, float(best[1]), step, is_evaluated)
    return Progress(last)


def _row_at(path: Path, content: bytes, position: int) -> Mapping[str, Any]:
    """The row whose line has this byte; empty for no content."""
    start = content.rfind(b"\n", 0, max(0, position)) + 1
    end = content.find(b"\n", start)
    try:
        return mapping(parse_json(content[start:end])) if content else {}
    except ValueError as error:
        number = content.count(b"\n", 0, start) + 1
        raise broken_line(path, number, f"is not JSON ({error})") from error


_BEGINNING = re.compile(
    rb'\{"episode": \d+, "failure": (?:null|"([^"\\]*)"), "final_observation": "'
)
_NUMBERS = re.compile(
    rb'", "num_turns": (\d{1,9}), "policy": "(?:[^"\\]|\\.)*", "return": ([-+.0-9eE]+), '
    rb'(?:"step": (\d{1,9}), )?"stop_reason": "[^"\\]*", "success": (true|false), "task": \{'
)
_TASK = re.compile(rb'"task_id": "([^"\\]*)"\}, "terminated": ')


class EpisodeIndex(GrowingFile):
    """Where each episode begins, and what lists are made of: about 100 bytes an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.offsets: array[int] = array("Q")
        self.returns: array[float] = array("d")
        self.num_turns: array[int] = array("L")
        self.steps: array[int] = array("L")
        """0 where the row says none."""
        self.successes = bytearray()
        self.failures: list[str] = []
        """Empty for a success."""
        self.task_ids: list[str] = []
        self._names: dict[str, str] = {"": ""}

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, line: bytes, start: int) -> None:
        failure, num_turns, value, step, success, task_id = _fields(line)
        self.failures.append(self._names.setdefault(failure, failure))
        self.num_turns.append(num_turns)
        self.returns.append(value)
        self.steps.append(step)
        self.successes.append(success)
        self.task_ids.append(task_id)
        self.offsets.append(start)

    def read(self, path: Path, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The whole rows of some episodes, by their number in the file, from 0."""
        rows: list[dict[str, Any]] = []
        with path.open("rb") as stream:
            for number in numbers:
                stream.seek(self.offsets[number])
                line = stream.readline(MAX_LINE_BYTES)
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise broken_line(path, number + 1, f"is not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise RunDirectoryError(f"{path} has changed; load the page again")
                rows.append(row)
        return rows

    def stretches(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The whole lines of the file, many at a time, each with the number of its first line."""
        first = 0
        with path.open("rb") as stream:
            while first < len(self):
                stream.seek(self.offsets[first])
                after = max(first + 1, bisect_right(self.offsets, stream.tell() + BLOCK_BYTES) - 1)
                end = self.offsets[after] if after < len(self) else self.end
                yield first, stream.read(end - self.offsets[first])
                first = after


def _fields(line: bytes) -> tuple[str, int, float, int, bool, str]:
    """Failure, turns, return, step, success and task of an episode.

    As a run writes a line these stand before the turns, which are long; quotation marks inside a
    text are escaped, so no text can pass for them. Any other line is parsed.
    """
    beginning = _BEGINNING.match(line)
    numbers = beginning and _NUMBERS.search(line, beginning.end() - 1)
    task = numbers and _TASK.search(line, numbers.end())
    if not beginning or not numbers or not task:
        return _parsed_fields(line)
    num_turns, value, step, success = numbers.groups()
    return (
        (beginning[1] or b"").decode(),
        int(num_turns),
        float(value),
        int(step or 0),
        success == b"true",
        task[1].decode(),
    )


def _parsed_fields(line: bytes) -> tuple[str, int, float, int, bool, str]:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    turns = row.get("turns")
    num_turns = finite(row.get("num_turns")) or (len(turns) if isinstance(turns, list) else 0)
    return (
        str(row.get("failure") or ""),
        min(max(0, int(num_turns)), MAX_COUNT),
        finite(row.get("return")) or 0.0,
        min(max(0, int(finite(row.get("step")) or 0)), MAX_COUNT),
        row.get("success") is True,
        str(mapping(row.get("task")).get("task_id") or ""),
    )
