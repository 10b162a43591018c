"""Stage 1: samples trajectories of the frozen reference and writes every return to the value store.

Consumes tasks and an agent proxy that plays the reference; produces rows of the store, from which
V* for any beta is computed. Episodes are played in chunks. Which episodes a chunk has depends only
on the schedule and on returns of earlier rounds. A chunk that is completely stored is skipped. A
chunk that is partly stored is played again, and its stored rows stay. So an interrupted Stage 1
ends with exactly the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task, Trajectory
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.estimator import SampleSchedule
from ragen_apo.values.store import ValueStore

Answer = TypeVar("Answer")


def collect_values(
    proxy: AgentProxy,
    store: ValueStore | None,
    tasks: Sequence[Task],
    *,
    conditions: SamplingConditions,
    schedule: SampleSchedule,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fills the store until every task has the samples that the schedule wants.

    The ranks of the proxy play together. The first one alone has the store, the others None.
    `on_progress(done, total)` counts the episodes of the present round.
    """
    lower, in_round = 0, list(tasks)
    for total in schedule.rounds():
        if not in_round:
            break
        wanted = [(task, index) for task in in_round for index in range(lower, total)]
        _play_missing(proxy, store, wanted, conditions=conditions, seed=seed, report=on_progress)
        successes = asked(proxy.ranks, store, lambda store: store.successes_by_task(conditions))
        in_round = [
            task
            for task in in_round
            if schedule.goes_on(
                num_successes=sum(successes[task.task_id][:total]), num_samples=total
            )
        ]
        lower = total


def asked(
    ranks: Ranks, store: ValueStore | None, question: Callable[[ValueStore], Answer]
) -> Answer:
    """What the store of the first rank says, on all ranks; JSON values."""

    def answer() -> Answer:
        assert store is not None, "the first rank has it"
        return question(store)

    return ranks.from_first(answer, "asking the store")


def _play_missing(
    proxy: AgentProxy,
    store: ValueStore | None,
    wanted: Sequence[tuple[Task, int]],
    *,
    conditions: SamplingConditions,
    seed: int,
    report: Callable[[int, int], None],
) -> None:
    task_ids = list(dict.fromkeys(task.task_id for task, _ in wanted))
    stored = asked(
        proxy.ranks,
        store,
        lambda store: {each: store.sample_indices(conditions, each) for each in task_ids},
    )
    is_stored = {(task_id, index) for task_id, indices in stored.items() for index in indices}
    # Four rounds of rows a chunk: long enough to keep the rows full, short enough to skip by.
    chunk_size = 4 * proxy.engine.num_rows * proxy.ranks.size
    num_done = 0
    report(0, len(wanted))
    for start in range(0, len(wanted), chunk_size):
        chunk = wanted[start : start + chunk_size]
        if not all((task.task_id, index) in is_stored for task, index in chunk):
            requests = [
                EpisodeRequest(task, derive_seed(seed, "stage-1", task.task_id, index))
                for task, index in chunk
            ]

            def save(
                ended: Sequence[tuple[int, Trajectory]], chunk: Sequence[tuple[Task, int]] = chunk
            ) -> None:
                nonlocal num_done
                assert store is not None, "the first rank has it"
                store.add_many(conditions, [(chunk[index][1], episode) for index, episode in ended])
                num_done += len(ended)
                report(num_done, len(wanted))

            proxy.rollout(
                requests,
                temperature=conditions.temperature,
                policy_version=conditions.reference_fingerprint,
                on_finished=save,
            )
        num_done = start + len(chunk)
        report(num_done, len(wanted))
