"""The value store is read without a byte being written."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_apo.errors import RunDirectoryError
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.store import ValueStore
from ragen_apo.web.view.value_store import (
    all_conditions,
    instructions,
    reading,
    sample_numbers,
    stored_values,
    trajectories,
)
from tests.command_line import snapshot
from tests.factories import conditions, played

EASY, HARD = played("easy"), played("hard", rewards=[-1.0])


def _store(path: Path) -> ValueStore:
    store = ValueStore(path)
    store.add_many(conditions(), [(0, EASY), (1, EASY), (0, HARD)])
    return store


def test_tasks_come_by_value_with_their_samples(tmp_path: Path) -> None:
    with _store(tmp_path / "values.sqlite") as store:
        expected = store.values(conditions(), [HARD.task.task_id, EASY.task.task_id], beta=0.5)
    path, digest = tmp_path / "values.sqlite", conditions().digest
    stored = stored_values(path, digest, beta=0.5)
    assert {task.task_id: task.v_star for task in stored.tasks} == expected
    assert [task.num_samples for task in stored.tasks] == [1, 2]
    assert stored.tasks[1].v_star == soft_value([1.0, 1.0], beta=0.5)
    assert stored.coverage["num_samples"] == 3
    assert all_conditions(path)[digest]["environment"] == "shop"
    assert instructions(path, digest, [EASY.task.task_id]) == {EASY.task.task_id: "easy"}
    assert sample_numbers(path, digest, EASY.task.task_id) == [(0, 1.0, 1, 1), (1, 1.0, 1, 1)]
    assert trajectories(path, digest, HARD.task.task_id) == {0: HARD}
    assert trajectories(path, digest, "another") == {}


def test_reading_a_store_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    _store(tmp_path / "values.sqlite").close()
    before = snapshot(tmp_path)
    assert len(stored_values(tmp_path / "values.sqlite", conditions().digest, beta=1).tasks) == 2
    assert snapshot(tmp_path) == before


READER = """
import sys
from pathlib import Path
from ragen_apo.web.view.value_store import stored_values
print(len(stored_values(Path(sys.argv[1]), sys.argv[2], beta=1).tasks))
"""


@pytest.mark.slow
def test_reading_a_store_that_another_process_writes_leaves_it_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "values.sqlite"
    with _store(path):
        before = snapshot(tmp_path)
        assert {f"{path.name}-wal", f"{path.name}-shm"} <= before.keys()
        command = [sys.executable, "-c", READER, str(path), conditions().digest]
        read = subprocess.run(command, capture_output=True, text=True, check=True)
        assert read.stdout.strip() == "2"
        assert snapshot(tmp_path) == before


def test_the_journal_of_a_killed_process_is_not_waited_for(tmp_path: Path) -> None:
    """Copied without its shared memory: what was last checkpointed is shown."""
    with _store(tmp_path / "values.sqlite") as store:
        store.close()
        ValueStore(tmp_path / "values.sqlite").close()
    (tmp_path / "values.sqlite-wal").write_bytes(b"half of a journal")
    before = snapshot(tmp_path)
    assert len(stored_values(tmp_path / "values.sqlite", conditions().digest, beta=1).tasks) == 2
    assert snapshot(tmp_path) == before


def test_a_connection_cannot_write(tmp_path: Path) -> None:
    _store(tmp_path / "values.sqlite").close()
    with (
        pytest.raises(RunDirectoryError, match="readonly"),
        reading(tmp_path / "values.sqlite") as connection,
    ):
        connection.execute("DELETE FROM samples")


def test_what_is_no_value_store_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all, but long enough" * 30)
    sqlite3.connect(tmp_path / "other").close()
    for name in ("text", "other"):
        with pytest.raises(RunDirectoryError, match="cannot be read"):
            all_conditions(tmp_path / name)
