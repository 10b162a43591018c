"""The value store under kill -9, two writers and a reader."""

import contextlib
import json
import signal
import sqlite3
import threading
import time

import pytest

from ragen_apo.errors import ValueStoreError
from ragen_apo.values import store as store_module
from ragen_apo.values.store import ValueStore
from tests import factories
from tests.forks import Fork


def write(path, conditions, played, indices):
    with ValueStore(path) as store:
        for index in indices:
            print(index, store.add_many(conditions, [(index, played)]) == 1)


def start_writer(path, conditions, played, indices):
    output = path.with_name(f"writer-{indices.start}")
    return Fork(output, lambda: write(path, conditions, played, indices))


@pytest.mark.parametrize("num_before_kill", [1, 7, 30])
def test_kill_9_loses_at_most_the_sample_in_flight(tmp_path, conditions, num_before_kill):
    path, played = tmp_path / "values.sqlite", factories.played("a mug", rewards=(0.1,) * 50)
    writer = start_writer(path, conditions, played, range(10**9))
    writer.says(rf"(?m)^{num_before_kill - 1} True$")
    writer.send(signal.SIGKILL)
    lines = writer.ended().splitlines(keepends=True)
    assert writer.returncode == -signal.SIGKILL
    reported = [int(line.split()[0]) for line in lines if line.endswith("\n")]
    with ValueStore(path) as store:
        stored = store.sample_indices(conditions, played.task.task_id)
        assert stored in (reported, [*reported, reported[-1] + 1])
        assert store.trajectories(conditions, played.task.task_id) == [played] * len(stored)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_writers_that_make_the_same_new_store_lose_nothing(tmp_path, conditions):
    path, played = tmp_path / "values.sqlite", factories.played("a mug")
    writers = [
        start_writer(path, conditions, played, range(first, first + 60)) for first in (0, 40)
    ]
    outputs = [writer.ended().split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    with ValueStore(path) as store:
        assert store.sample_indices(conditions, played.task.task_id) == list(range(100))
    # The indices 40 to 59 are written by both, and exactly one of the two was first.
    assert sum(output.count("True") for output in outputs) == 100
    assert sum(output.count("False") for output in outputs) == 20


@pytest.mark.slow
def test_many_processes_may_make_the_same_store_at_once(tmp_path, conditions):
    path, played = tmp_path / "values.sqlite", factories.played("a mug")
    writers = [
        start_writer(path, conditions, played, range(first, first + 1)) for first in range(6)
    ]
    for writer in writers:
        writer.ended()
    with ValueStore(path) as store:
        assert store.sample_indices(conditions, played.task.task_id) == list(range(6))


@contextlib.contextmanager
def writing(path):
    """Another writer in the middle of a transaction, which it commits at the end."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")


def test_reading_goes_on_while_another_one_writes(tmp_path, conditions):
    path, played = tmp_path / "values.sqlite", factories.played("a mug")
    with ValueStore(path) as reader:
        reader.add_many(conditions, [(0, played), (1, played)])
        with writing(path) as writer:
            writer.execute("DELETE FROM samples WHERE sample_index = 1")
            assert reader.sample_indices(conditions, played.task.task_id) == [0, 1]
        assert reader.sample_indices(conditions, played.task.task_id) == [0]


@pytest.mark.parametrize("store_exists", [True, False])
def test_a_writer_waits_for_another_one(tmp_path, conditions, store_exists):
    path, played = tmp_path / "values.sqlite", factories.played("a mug")
    if store_exists:
        ValueStore(path).close()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, lambda: other.execute("COMMIT"))
    release.start()
    with ValueStore(path) as store:
        assert store.add_many(conditions, [(0, played)])
    release.join()
    other.close()


def test_a_writer_that_waits_too_long_says_who_is_in_the_way(tmp_path, conditions, monkeypatch):
    path = tmp_path / "values.sqlite"
    monkeypatch.setattr(store_module, "BUSY_TIMEOUT_SECONDS", 0.05)
    with ValueStore(path) as waiting:
        with writing(path), pytest.raises(ValueStoreError, match="Another process kept it"):
            waiting.add_many(conditions, [(0, factories.played("a mug"))])
        assert waiting.add_many(conditions, [(0, factories.played("a mug"))])


def read(path, conditions, task_ids, begin):
    with ValueStore(path, create=False) as store:
        print("open")
        while not begin.exists():
            time.sleep(0.01)
        returns = [
            [episode.episode_return for episode in store.trajectories(conditions, task_id)]
            for _ in range(20)
            for task_id in task_ids
        ]
        print(json.dumps([store.values(conditions, task_ids, beta=0.5), returns]))


@pytest.mark.slow
def test_runs_that_share_a_store_read_it_at_the_same_time(tmp_path, conditions):
    path, begin = tmp_path / "values.sqlite", tmp_path / "begin"
    episodes = [factories.played(name, rewards=(0.1, 0.4)) for name in ("a mug", "a cup")]
    task_ids = [episode.task.task_id for episode in episodes]
    with ValueStore(path) as store:
        for episode in episodes:
            store.add_many(conditions, [(index, episode) for index in range(30)])
        expected = store.values(conditions, task_ids, beta=0.5)
    readers = [
        Fork(tmp_path / name, lambda: read(path, conditions, task_ids, begin))
        for name in ("one", "other")
    ]
    for reader in readers:
        reader.says("open\n")
    begin.touch()  # both have the file open before either reads
    outputs = [json.loads(reader.ended().splitlines()[-1]) for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0]
    assert outputs == [[expected, [[0.5] * 30] * 40]] * 2
