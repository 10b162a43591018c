import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ragen_apo.agent.assembly import build_environments, build_proxy, sampling_conditions
from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.stages.collect_values import collect_values
from ragen_apo.types import Task
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.estimator import MAX_ERROR, SampleSchedule, success_rate_error
from ragen_apo.values.store import ValueStore
from tests import factories

pytestmark = pytest.mark.slow

SCHEDULE = SampleSchedule(first=2, cap=4)
NUM_TASKS = 7


@dataclass
class Sampler:
    """Stage 1 with the tiny run's reference."""

    proxy: AgentProxy
    conditions: SamplingConditions
    tasks: list[Task]

    def fill(self, path: Path, *, schedule: SampleSchedule = SCHEDULE) -> list[tuple]:
        with ValueStore(path) as store:
            collect_values(
                self.proxy, store, self.tasks, conditions=self.conditions, schedule=schedule, seed=5
            )
        return stored(path)


def stored(path: Path) -> list[tuple]:
    connection = sqlite3.connect(path)
    found = connection.execute(
        "SELECT task_id, sample_index, episode_return, success, zlib_json FROM samples "
        "JOIN trajectories USING (conditions, task_id, sample_index) ORDER BY task_id, sample_index"
    ).fetchall()
    connection.close()
    return found


@pytest.fixture(scope="module")
def sampler(finished_run: Path) -> Sampler:
    config = factories.config("--training.num_rows=8")
    reference = load_language_model(finished_run / "references/0", device=torch.device("cpu"))
    environments = build_environments(config.environment, config.agent)
    return Sampler(
        proxy=build_proxy(config, reference, environments),
        conditions=sampling_conditions(config, reference, environments),
        tasks=list(environments.tasks("train"))[:NUM_TASKS],
    )


@pytest.fixture(scope="module")
def whole(sampler: Sampler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a Stage 1 that was not interrupted; read only."""
    path = tmp_path_factory.mktemp("whole") / "values.sqlite"
    sampler.fill(path)
    return path


def counts(rows: list[tuple]) -> dict[str, tuple[int, int]]:
    """(samples, successes) by task."""
    found: dict[str, tuple[int, int]] = {}
    for task_id, _, _, success, _ in rows:
        num_samples, num_successes = found.get(task_id, (0, 0))
        found[task_id] = num_samples + 1, num_successes + success
    return found


def test_rounds_double_until_a_task_is_known_well_enough(sampler: Sampler, whole: Path) -> None:
    by_task = counts(stored(whole))
    assert by_task.keys() == {task.task_id for task in sampler.tasks}
    for num_samples, num_successes in by_task.values():
        assert num_samples in (2, 4)
        error = success_rate_error(num_successes=num_successes, num_samples=num_samples)
        assert num_samples == 4 or error <= MAX_ERROR


def test_a_second_run_samples_nothing(
    sampler: Sampler, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(whole)
    monkeypatch.setattr(sampler.proxy, "rollout", None)
    assert sampler.fill(whole) == before


def test_a_larger_schedule_adds_to_what_is_stored(sampler: Sampler, tmp_path: Path) -> None:
    path = tmp_path / "values.sqlite"
    few = sampler.fill(path, schedule=SampleSchedule(first=1, cap=1))
    more = sampler.fill(path, schedule=SampleSchedule(first=3, cap=3))
    assert set(few) < set(more)
    assert [row[1] for row in more] == [0, 1, 2] * len(sampler.tasks)


class InterruptedStageError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("num_writes", [1, 12])
def test_an_interrupted_stage_one_ends_with_the_rows_of_one_that_was_not(
    num_writes: int, sampler: Sampler, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stored(whole)
    add_many, num_calls = ValueStore.add_many, 0

    def interrupted(self: ValueStore, *args: object) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_writes:
            raise InterruptedStageError
        return add_many(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ValueStore, "add_many", interrupted)
        with pytest.raises(InterruptedStageError):
            sampler.fill(tmp_path / "part.sqlite")
    part = stored(tmp_path / "part.sqlite")
    assert 0 < len(part) < len(expected)
    # An exception leaves rows of the engine in use, which a killed process does not.
    sampler.proxy.engine.__init__(
        sampler.proxy.engine.model,
        num_rows=sampler.proxy.engine.num_rows,
        capacity=sampler.proxy.engine.capacity,
    )
    assert sampler.fill(tmp_path / "part.sqlite") == expected


def test_progress_counts_the_episodes_of_each_round(sampler: Sampler, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with ValueStore(tmp_path / "values.sqlite") as store:
        collect_values(
            sampler.proxy,
            store,
            sampler.tasks,
            conditions=sampler.conditions,
            schedule=SampleSchedule(first=1, cap=1),
            seed=5,
            on_progress=lambda done, total: reports.append((done, total)),
        )
    assert reports[0] == (0, NUM_TASKS)
    assert reports[-1] == (NUM_TASKS, NUM_TASKS)
    assert reports == sorted(reports)


def test_without_a_task_nothing_is_announced(sampler: Sampler, tmp_path: Path) -> None:
    def refuse(done: int, total: int) -> None:
        raise AssertionError(f"announced {done} of {total}")

    with ValueStore(tmp_path / "values.sqlite") as store:
        collect_values(
            sampler.proxy,
            store,
            [],
            conditions=sampler.conditions,
            schedule=SCHEDULE,
            seed=5,
            on_progress=refuse,
        )
