"""Stage 1 of a run as its value store has it, read without writing a byte.

Consumes values.sqlite; produces tasks with V*, and single samples. SQLite writes beside a database
in write-ahead mode even to read it, so it is opened as unchangeable, or, while somebody writes it,
with that process's own journal.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import parse_json, parse_record
from ragen_apo.types import Trajectory
from ragen_apo.values.coverage import coverage_report
from ragen_apo.values.estimator import soft_value

MAX_UNPACKED_BYTES = 1 << 28
_TRAJECTORY = TypeAdapter(Trajectory)


@dataclass(frozen=True)
class StoredTask:
    """What Stage 1 knows of a task."""

    task_id: str
    v_star: float
    mean_return: float
    num_successes: int
    num_samples: int


@dataclass(frozen=True)
class StoredValues:
    """The samples under one set of conditions, which is one reference."""

    tasks: tuple[StoredTask, ...]
    """The lowest V* first."""
    coverage: Mapping[str, Any]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write. Raises RunDirectoryError where the file cannot be read."""
    journal, shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    is_written = journal.exists() and journal.stat().st_size > 0 and shared.exists()
    how = "mode=ro&readonly_shm=1" if is_written else "mode=ro&immutable=1"
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?{how}", uri=True, timeout=5.0)
        ) as connection:
            yield connection
    except (sqlite3.Error, UnicodeError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read now: {error}. If the run is writing it, load the page again"
        ) from error
    except (zlib.error, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error


def all_conditions(path: Path) -> dict[str, Mapping[str, Any]]:
    """The conditions of the store by their digest, those that were sampled first at the front."""
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT digest, json FROM conditions ORDER BY (SELECT min(created_unix_seconds) "
            "FROM samples WHERE samples.conditions = digest)"
        )
        return {digest: parse_json(text) for digest, text in rows}


def stored_values(path: Path, digest: str, *, beta: float) -> StoredValues:
    """All tasks under these conditions with V* at `beta`."""
    returns: dict[str, list[float]] = {}
    successes: dict[str, list[bool]] = {}
    with reading(path) as connection:
        for task_id, value, success in connection.execute(
            "SELECT task_id, episode_return, success FROM samples WHERE conditions = ? "
            "ORDER BY task_id, sample_index",
            (digest,),
        ):
            returns.setdefault(task_id, []).append(float(value))
            successes.setdefault(task_id, []).append(bool(success))
        tasks = [
            StoredTask(
                task_id=task_id,
                v_star=soft_value(values, beta=beta),
                mean_return=sum(values) / len(values),
                num_successes=sum(successes[task_id]),
                num_samples=len(values),
            )
            for task_id, values in returns.items()
        ]
        coverage = coverage_report(returns, successes, beta=beta) if returns else {}
    return StoredValues(
        tuple(sorted(tasks, key=lambda task: (task.v_star, task.task_id))), coverage
    )


def trajectories(path: Path, digest: str, task_id: str) -> dict[int, Trajectory]:
    """The samples of a task by their index."""
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT sample_index, zlib_json FROM trajectories "
            "WHERE conditions = ? AND task_id = ? ORDER BY sample_index",
            (digest, task_id),
        )
        return {index: _unpacked(packed) for index, packed in rows}


def sample_numbers(path: Path, digest: str, task_id: str) -> list[tuple[int, float, bool, int]]:
    """Index, return, success and turns of each sample of a task."""
    with reading(path) as connection:
        return connection.execute(
            "SELECT sample_index, episode_return, success, num_turns FROM samples "
            "WHERE conditions = ? AND task_id = ? ORDER BY sample_index",
            (digest, task_id),
        ).fetchall()


def instructions(path: Path, digest: str, task_ids: Sequence[str]) -> dict[str, str]:
    """The instructions of some tasks, as one of their samples has them."""
    found: dict[str, str] = {}
    with reading(path) as connection:
        for task_id in task_ids:
            row = connection.execute(
                "SELECT zlib_json FROM trajectories WHERE conditions = ? AND task_id = ? LIMIT 1",
                (digest, task_id),
            ).fetchone()
            found[task_id] = _unpacked(row[0]).task.instruction if row else ""
    return found


def _unpacked(packed: bytes) -> Trajectory:
    text = zlib.decompressobj().decompress(packed, MAX_UNPACKED_BYTES)
    return parse_record(_TRAJECTORY, parse_json(text))
