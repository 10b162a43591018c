"""Every return that Stage 1 sampled, with its trajectory, in one SQLite file.

Consumes trajectories of the frozen reference and the conditions they were sampled under; produces
raw returns, successes, trajectories, and V* for any beta computed from the raw returns. V* itself
is never stored.

Samples are written in one transaction to SQLite's write-ahead log. A killed process loses only what
it was writing, a power cut perhaps the last samples. Several processes of one host may read and
write at the same time; network file systems do not work. The first sample under a key stays:
writing the same key again changes nothing.

    conditions    digest -> JSON of SamplingConditions
    samples       (conditions, task_id, sample_index) -> return, success, number of turns
    trajectories  the same key -> zlib-compressed JSON, apart so that reading returns stays quick

No torch here.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from ragen_apo.errors import MissingValueError, ValueStoreError
from ragen_apo.files import parse_json, parse_record
from ragen_apo.plural import counted
from ragen_apo.types import Trajectory
from ragen_apo.values.conditions import SamplingConditions, describe_differences
from ragen_apo.values.estimator import soft_value

SCHEMA_VERSION = 1
BUSY_TIMEOUT_SECONDS = 60.0
_APPLICATION_ID = 0x41504F56  # "APOV": tells a value store from any other SQLite file
_NUM_SHOWN = 3
_TRAJECTORY = TypeAdapter(Trajectory)
_RESTORE = "Restore a copy, or move it away and sample again: `ragen-apo estimate-values`"

_TABLES = (
    """CREATE TABLE conditions (
        digest TEXT PRIMARY KEY,
        json TEXT NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE samples (
        conditions TEXT NOT NULL REFERENCES conditions (digest),
        task_id TEXT NOT NULL,
        sample_index INTEGER NOT NULL,
        episode_return REAL NOT NULL,
        success INTEGER NOT NULL,
        num_turns INTEGER NOT NULL,
        created_unix_seconds REAL NOT NULL,
        PRIMARY KEY (conditions, task_id, sample_index)
    ) WITHOUT ROWID""",
    """CREATE TABLE trajectories (
        conditions TEXT NOT NULL,
        task_id TEXT NOT NULL,
        sample_index INTEGER NOT NULL,
        zlib_json BLOB NOT NULL,
        PRIMARY KEY (conditions, task_id, sample_index)
    )""",
)


class ValueStore:
    """A value store on disk; a context manager. One instance per process and thread.

    With `create=False` the file must exist already. A writer waits up to `BUSY_TIMEOUT_SECONDS` for
    another one. Raises ValueStoreError for a file that is not a value store or has another schema
    version, and leaves that file as it was.
    """

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        self.path = Path(path)
        if not create and not self.path.exists():
            raise ValueStoreError(
                f"there is no value store at {self.path}; `ragen-apo estimate-values` makes one, "
                "or give the path of an existing one"
            )
        with self._translated_errors("open"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch()  # SQLite would take the group's right to write, against the umask
            self._connection = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None
            )
        try:
            with self._translated_errors("open"):
                self._prepare(deadline=time.monotonic() + BUSY_TIMEOUT_SECONDS)
                self._connection.execute("PRAGMA synchronous=NORMAL")
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> ValueStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._connection.close()

    def add_many(
        self, conditions: SamplingConditions, samples: Iterable[tuple[int, Trajectory]]
    ) -> int:
        """Stores (sample_index, trajectory) pairs in one transaction, all or none.

        Returns the number of new ones; a key that is stored already keeps its sample. Raises
        ValueStoreError for a return that is not finite, a negative index, a trajectory of another
        environment, and when the disk is full.
        """
        digest, num_added = conditions.digest, 0
        samples = list(samples)
        for sample_index, trajectory in samples:
            _check_sample(conditions, sample_index, trajectory)
        with self._translated_errors("write to"), self._transaction():
            self._connection.execute(
                "INSERT INTO conditions VALUES (?, ?) ON CONFLICT DO NOTHING",
                (digest, json.dumps(conditions.to_json(), sort_keys=True)),
            )
            for sample_index, trajectory in samples:
                num_added += self._insert(digest, sample_index, trajectory)
        return num_added

    def sample_indices(self, conditions: SamplingConditions, task_id: str) -> list[int]:
        """The indices that are stored for one task, ascending; gaps are possible after a kill."""
        rows = self._read(
            "SELECT sample_index FROM samples WHERE conditions = ? AND task_id = ? "
            "ORDER BY sample_index",
            (conditions.digest, task_id),
        )
        return [int(self._number(index, "sample_index", task_id)) for (index,) in rows]

    def returns_by_task(self, conditions: SamplingConditions) -> dict[str, list[float]]:
        """The returns of every task that has any, in the order of their sample index."""
        return self._column_by_task("episode_return", conditions)

    def successes_by_task(self, conditions: SamplingConditions) -> dict[str, list[bool]]:
        """The successes of every task that has any sample, in the order of their sample index."""
        by_task = self._column_by_task("success", conditions)
        return {task_id: [bool(value) for value in values] for task_id, values in by_task.items()}

    def trajectories(self, conditions: SamplingConditions, task_id: str) -> list[Trajectory]:
        """The trajectories of one task in the order of their sample index."""
        rows = self._read(
            "SELECT task_id, sample_index, zlib_json FROM trajectories "
            "WHERE conditions = ? AND task_id = ? ORDER BY sample_index",
            (conditions.digest, task_id),
        )
        return [self._unpacked(*row) for row in rows]

    def num_response_tokens(self, *, split: str) -> list[int]:
        """Tokens that were sampled in all tasks of a split: one number for each conditions, in the
        order of their first samples, so for each reference of a run.
        """
        order = self._read(
            "SELECT conditions FROM samples GROUP BY conditions ORDER BY MIN(created_unix_seconds)"
        )
        tokens = Counter({digest: 0 for (digest,) in order})
        stored = self._read("SELECT conditions, task_id, sample_index, zlib_json FROM trajectories")
        for digest, *row in stored:
            trajectory = self._unpacked(*row)
            if trajectory.task.split == split:
                tokens[digest] += trajectory.num_response_tokens
        return list(tokens.values())

    def values(
        self, conditions: SamplingConditions, task_ids: Collection[str], *, beta: float
    ) -> dict[str, float]:
        """V* of each task at `beta` from its stored returns.

        Raises MissingValueError if any task has no return; the message names tasks and, where the
        store has them under other conditions, the fields that differ.
        """
        stored = self.returns_by_task(conditions)
        missing = [task for task in task_ids if task not in stored]
        if missing:
            raise MissingValueError(self._missing_message(conditions, missing, len(task_ids)))
        return {task: soft_value(stored[task], beta=beta) for task in task_ids}

    def _prepare(self, *, deadline: float) -> None:
        """Checks the file and makes the tables of a new one, once if two processes try."""
        if self._is_blank():
            self._switch_to_write_ahead_log(deadline=deadline)
            with self._transaction():
                if self._is_blank():
                    for table in _TABLES:
                        self._connection.execute(table)
                    self._connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
                    self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        application_id, version = self._pragma("application_id"), self._pragma("user_version")
        if application_id != _APPLICATION_ID:
            raise ValueStoreError(
                f"{self.path} is an SQLite file of another program (application id "
                f"{application_id}, expected {_APPLICATION_ID}); give another path"
            )
        if version != SCHEMA_VERSION:
            raise ValueStoreError(
                f"{self.path} has value store schema {version}, this version of ragen-apo reads "
                f"schema {SCHEMA_VERSION}; use the version that wrote it, or give a new path and "
                "run `ragen-apo estimate-values` again"
            )

    def _is_blank(self) -> bool:
        num_objects = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return num_objects == 0 and self._pragma("application_id") == 0

    def _pragma(self, name: str) -> int:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    def _switch_to_write_ahead_log(self, *, deadline: float) -> None:
        # SQLite does not apply its busy timeout to this switch when two processes try it at once.
        while True:
            try:
                mode = self._connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise ValueStoreError(
                f"{self.path} is on a file system without write-ahead log (SQLite says {mode!r}); "
                "keep the value store on a local disk"
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite ends some failed transactions (disk full) by itself.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _translated_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError) as error:
            # A damaged schema makes Python fail on SQLite's own message about it.
            reason = "malformed text" if isinstance(error, UnicodeError) else str(error)
            raise ValueStoreError(
                f"cannot {verb} the value store {self.path}: {reason}. {_advice(reason)}"
            ) from error

    def _insert(self, digest: str, sample_index: int, trajectory: Trajectory) -> int:
        key = (digest, trajectory.task.task_id, sample_index)
        # Not INSERT OR IGNORE, which would also swallow violations of NOT NULL.
        inserted = self._connection.execute(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (conditions, task_id, sample_index) DO NOTHING",
            (
                *key,
                float(trajectory.episode_return),
                int(trajectory.success),
                len(trajectory.turns),
                time.time(),
            ),
        ).rowcount
        if inserted:
            text = json.dumps(trajectory.to_json())
            self._connection.execute(
                "INSERT INTO trajectories VALUES (?, ?, ?, ?)", (*key, zlib.compress(text.encode()))
            )
        return inserted

    def _read(self, query: str, parameters: tuple[str, ...] = ()) -> list[tuple]:
        with self._translated_errors("read"):
            return self._connection.execute(query, parameters).fetchall()

    def _unpacked(self, task_id: str, sample_index: int, zlib_json: bytes) -> Trajectory:
        try:
            return parse_record(_TRAJECTORY, parse_json(zlib.decompress(zlib_json)))
        except (zlib.error, ValueError, TypeError) as error:
            raise self._damaged(f"sample {sample_index} of task {task_id}", str(error)) from error

    def _damaged(self, what: str, problem: str) -> ValueStoreError:
        return ValueStoreError(
            f"the value store {self.path} is damaged: {what}: {problem}. {_RESTORE}"
        )

    def _number(self, value: object, column: str, task_id: str) -> float:
        """SQLite gives back whatever stands in a column, of any type."""
        if isinstance(value, int | float) and math.isfinite(value):
            return value
        raise self._damaged(f"{column} of task {task_id}", f"{value!r:.40}, expected a number")

    def _column_by_task(self, column: str, conditions: SamplingConditions) -> dict[str, list]:
        rows = self._read(
            f"SELECT task_id, {column} FROM samples WHERE conditions = ? "
            "ORDER BY task_id, sample_index",
            (conditions.digest,),
        )
        by_task: dict[str, list] = {}
        for task_id, value in rows:
            by_task.setdefault(task_id, []).append(self._number(value, column, task_id))
        return by_task

    def _missing_message(
        self, asked: SamplingConditions, missing: list[str], num_asked: int
    ) -> str:
        shown = ", ".join(missing[:_NUM_SHOWN]) + (", ..." if len(missing) > _NUM_SHOWN else "")
        lines = [
            f"{self.path} has no sampled return of {len(missing)} of {counted(num_asked, 'task')} "
            f"under the conditions asked for. Tasks: {shown}."
        ]
        elsewhere = self._tasks_under_other_conditions(asked, set(missing))
        if not elsewhere:
            lines.append("The store has no return of these tasks under other conditions either.")
        for other, num_tasks in elsewhere[:_NUM_SHOWN]:
            lines.append(f"{num_tasks} of them were sampled under conditions that differ in")
            lines += [f"  {difference}" for difference in describe_differences(other, asked)]
        lines.append(
            "Restore the settings that the stored returns were sampled with, or sample these tasks "
            "with `ragen-apo estimate-values` in the run that the store belongs to."
        )
        return "\n".join(lines)

    def _tasks_under_other_conditions(
        self, asked: SamplingConditions, task_ids: set[str]
    ) -> list[tuple[SamplingConditions, int]]:
        """Other conditions with the number of these tasks they cover, the most similar first."""
        rows = self._read("SELECT DISTINCT conditions, task_id FROM samples")
        covered = Counter(digest for digest, task_id in rows if task_id in task_ids)
        del covered[asked.digest]
        found = [
            (self._conditions(digest, text), covered[digest])
            for digest, text in self._read("SELECT digest, json FROM conditions ORDER BY digest")
            if digest in covered
        ]
        return sorted(found, key=lambda entry: len(describe_differences(entry[0], asked)))

    def _conditions(self, digest: str, text: str) -> SamplingConditions:
        try:
            found = SamplingConditions(**parse_json(text))
            if found.digest == digest:
                return found
            problem = "their digest is another one"
        except (ValueError, TypeError, AttributeError, ValueStoreError) as error:
            problem = str(error)
        raise self._damaged(f"conditions {digest}", problem)


def _check_sample(
    conditions: SamplingConditions, sample_index: int, trajectory: Trajectory
) -> None:
    where = f"sample {sample_index} of task {trajectory.task.task_id}"
    if not math.isfinite(trajectory.episode_return):
        raise ValueStoreError(
            f"{where} has the return {trajectory.episode_return}, expected a finite number; "
            "the environment's rewards are wrong"
        )
    if sample_index < 0:
        raise ValueStoreError(f"{where}: a sample index counts from 0")
    if trajectory.task.environment != conditions.environment:
        raise ValueStoreError(
            f"{where} comes from environment {trajectory.task.environment!r}, expected "
            f"{conditions.environment!r} as in the conditions"
        )


def _advice(error: str) -> str:
    """Advice for an error of SQLite or the file system."""
    if "full" in error:
        return "What was stored before is safe: free some space and run the same command again."
    if "locked" in error:
        return "Another process kept it busy for longer than the timeout; try again later."
    if "not a database" in error:
        return f"Give the path of a value store, or of a new file. If it was one: {_RESTORE}"
    if "malformed" in error:
        return f"The file is damaged. {_RESTORE}"
    return "Check that the path is on a local disk and that this user may write there."
