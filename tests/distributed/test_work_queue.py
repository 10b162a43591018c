"""Who takes which item of a list: between forks that have a store in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from unittest.mock import patch

import pytest

from ragen_apo.choices import EpisodeSchedule
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.distributed.work_queue import WorkQueue
from ragen_apo.errors import ConfigError, RanksError
from tests import factories
from tests.distributed.processes import answers, in_ranks
from tests.sweeps import quick_first


def taken(
    ranks: Ranks, lengths: Sequence[int], schedule: EpisodeSchedule, most: int
) -> list[list[int]]:
    """The indices that this rank takes of each list, the last of several ranks while others wait.

    It is so slow that the others take all but what it has taken first.
    """
    found: list[list[int]] = []
    for number, length in enumerate(lengths):
        ranks.total(0.0, what="the start")
        queue = WorkQueue(ranks, length, schedule=schedule, what="items")
        own = list(queue.take(most))
        if ranks.store is not None and ranks.rank == ranks.size - 1:
            others = [f"{number}/{rank}" for rank in range(ranks.rank)]
            ranks.store.wait(others)
        while not queue.is_empty:
            own += queue.take(most)
        if ranks.store is not None:
            ranks.store.set(f"{number}/{ranks.rank}", "")
        assert list(queue.take(most)) == []
        found.append(own)
    return found


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_one_process_takes_all(schedule: EpisodeSchedule) -> None:
    assert taken(ALONE, [5, 0], schedule, 2) == [[0, 1, 2, 3, 4], []]


def test_a_static_share_does_not_depend_on_the_clock() -> None:
    assert answers(in_ranks(2, taken, [5], "static", 2)) == [[[0, 2, 4]], [[1, 3]]]


@pytest.mark.parametrize("most", quick_first([1, 3]))
def test_every_item_of_each_list_is_drawn_once_and_a_slow_rank_draws_less(most: int) -> None:
    lengths = [60, 0, 1, 50]
    each_rank = answers(in_ranks(3, taken, lengths, "dynamic", most))
    for number, length in enumerate(lengths):
        drawn = [own[number] for own in each_rank]
        assert sorted(chain(*drawn)) == list(range(length))
        assert all(own == sorted(own) for own in drawn)
        assert len(drawn[-1]) <= most


def without_store(ranks: Ranks) -> str:
    ranks.enter("stage 2")
    assert ranks.store is not None
    with (
        patch.object(type(ranks.store), "add", lambda *_: time.sleep(60.0)),
        pytest.raises(RanksError) as caught,
    ):
        WorkQueue(ranks, 4, schedule="dynamic", what="episodes").take(1)
    return str(caught.value)


@pytest.mark.slow
def test_a_store_that_does_not_answer_ends_the_rank_in_time() -> None:
    began = time.perf_counter()
    for message in answers(in_ranks(2, without_store, timeout_seconds=2.0)):
        assert "is without the others at 'stage 2: episodes'" in message
        assert "the store of torchrun does not answer" in message
    assert time.perf_counter() - began < 30.0


def test_a_run_that_promises_the_same_bits_is_static() -> None:
    keys = ("--machine.deterministic=true", "--rollouts.schedule=dynamic")
    with pytest.raises(ConfigError, match="set one of them to its default"):
        factories.config(*keys)
    assert factories.config(keys[0]).rollouts.schedule == "static"
