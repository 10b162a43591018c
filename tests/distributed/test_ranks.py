"""What ranks ask of each other, between forks that are connected by gloo."""

import os
import signal

import pytest
import torch
from torch import nn

from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.errors import ConfigError, RanksError
from tests.distributed.processes import answers, in_ranks


def gathered(ranks: Ranks) -> list[bytes]:
    return ranks.gather(b"a" * ranks.rank, "letters")


def test_every_rank_gathers_the_bytes_of_all_in_their_order() -> None:
    assert answers(in_ranks(3, gathered)) == 3 * [[b"", b"a", b"aa"]]


def shares(ranks: Ranks) -> list[int]:
    ranks.gather(b"", "all have joined")  # who leaves earlier breaks the others' connections
    return list(range(5))[ranks.share]


def test_the_shares_of_all_ranks_are_the_whole_list_once() -> None:
    assert answers(in_ranks(2, shares)) == [[0, 2, 4], [1, 3]]


def told(ranks: Ranks) -> dict[str, float]:
    return ranks.from_first(lambda: {"rank": ranks.rank, "value": float("inf")}, "a value")


def test_all_ranks_are_told_what_the_first_one_has_made() -> None:
    assert answers(in_ranks(2, told)) == 2 * [{"rank": 0, "value": float("inf")}]


def refused(ranks: Ranks) -> str:
    def make() -> None:
        raise ConfigError("there is no such thing")

    with pytest.raises((ConfigError, RanksError), match="there is no such thing") as caught:
        ranks.from_first(make, "a thing")
    return type(caught.value).__name__


@pytest.mark.slow
def test_what_the_first_rank_cannot_make_is_an_error_on_all() -> None:
    assert answers(in_ranks(2, refused)) == ["ConfigError", "RanksError"]


def summed_gradients(ranks: Ranks) -> list[list[float] | None]:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abc"})
    if ranks.rank == 0:  # the other rank has no share of the update
        (model["a"] * torch.tensor([1.0, 2.0])).sum().backward()
    (model["b"] * (ranks.rank + 1.0)).sum().backward()
    ranks.add_gradients([model])
    return [None if p.grad is None else p.grad.tolist() for p in model.values()]


@pytest.mark.slow
def test_gradients_add_up_and_what_no_rank_has_reached_has_none() -> None:
    assert answers(in_ranks(2, summed_gradients)) == 2 * [[[1.0, 2.0], [3.0, 3.0], None]]


def differing(ranks: Ranks) -> str:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0 + 1e-7 * (ranks.rank == 1))
        model.bias.fill_(0.0)
    with pytest.raises(RanksError) as caught:
        ranks.require_equal_weights([model])
    return str(caught.value)


@pytest.mark.slow
def test_weights_that_differ_in_one_bit_between_ranks_are_found() -> None:
    for message in answers(in_ranks(2, differing)):
        assert message.startswith("rank 1 of 2 has other weights than rank 0")


def elsewhere(ranks: Ranks) -> str:
    ranks.enter("stage 2")
    with pytest.raises(RanksError) as caught:
        ranks.total(1.0, what="losses" if ranks.rank == 0 else "returns")
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_come_to_different_meetings_say_which() -> None:
    first, second = answers(in_ranks(2, elsewhere))
    assert "rank 0 of 2 is at 'stage 2: losses'" in first
    assert "rank 1 was last at 'stage 2: returns'" in first
    assert "rank 0 was last at 'stage 2: losses'" in second


def without_rank_1(ranks: Ranks, how: str) -> str:
    ranks.enter("stage 1")
    ranks.total(1.0, what="returns")
    assert ranks.store is not None
    if ranks.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ranks.rank == 1:
        ranks.store.wait(["the other is over"])
        return "hangs"
    with pytest.raises(RanksError) as caught:
        ranks.total(1.0, what="losses")
    ranks.store.set("the other is over", "")
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_rank_that_is_missing_is_named_with_where_it_was_last(how: str) -> None:
    message = in_ranks(2, without_rank_1, how, timeout_seconds=2.0)[0]
    assert message.startswith("rank 0 of 2 is without the others at 'stage 1: losses'"), message
    assert "rank 1 was last at 'stage 1: returns'" in message
    assert "--resume" in message


def seconds(ranks: Ranks) -> dict[str, float]:
    began = ranks.seconds
    ranks.total(1.0, what="losses")
    spent = ranks.mean_seconds(since=began)
    afterwards = ranks.mean_seconds(since=ranks.seconds)
    return spent | {"afterwards": afterwards["waiting_seconds"]}


@pytest.mark.slow
def test_the_seconds_of_waiting_and_of_communication_are_means_over_the_ranks() -> None:
    first, second = answers(in_ranks(2, seconds))
    assert first == second
    assert first["num_ranks"] == 2
    assert first["waiting_seconds"] > 0
    assert first["communication_seconds"] > 0
    assert first["afterwards"] < first["waiting_seconds"], "what came before is forgotten"


def test_one_process_gets_back_what_it_gave() -> None:
    tensor = torch.ones(2)
    ALONE.add_up(tensor, "ones")
    assert tensor.tolist() == [1.0, 1.0]
    assert ALONE.gather(b"x", "letters") == [b"x"]
    assert ALONE.total(1.0, 2, what="numbers") == (1.0, 2)
    assert ALONE.from_first(lambda: (1, 2), "a pair") == (1, 2)
    assert ALONE.mean_seconds(since=ALONE.seconds) == {}
    assert list(range(3))[ALONE.share] == [0, 1, 2]
