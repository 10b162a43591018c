from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.policy.passes import longest_within, padded_length
from ragen_apo.task_order import epoch_slice
from ragen_apo.training.batching import (
    FEWEST_PASSES,
    TOKENS_PER_PASS,
    collate,
    micro_batches,
    pass_cost,
)
from ragen_apo.types import TrainingSample

CPU = torch.device("cpu")


def sample(length: int) -> TrainingSample:
    return TrainingSample(
        token_ids=tuple(range(1, length + 1)),
        loss_mask=tuple(index > 0 for index in range(length)),
        logprobs=tuple(-0.5 * index for index in range(length)),
    )


def test_collate_pads_on_the_right_up_to_the_longest_sample() -> None:
    batch = collate([sample(2), sample(3)], pad_id=99, device=CPU)
    assert batch.token_ids_RT.tolist() == [[1, 2, 99], [1, 2, 3]]
    assert batch.loss_mask_RT.tolist() == [[False, True, False], [False, True, True]]
    assert batch.sampled_logprobs_RT.tolist() == [[0.0, -0.5, 0.0], [0.0, -0.5, -1.0]]
    assert batch.token_ids_RT.dtype == torch.int64
    assert batch.loss_mask_RT.dtype == torch.bool


COSTS = [TOKENS_PER_PASS, FEWEST_PASSES]


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=20),
    size=st.integers(1, 8),
    cost=st.sampled_from(COSTS),
)
def test_micro_batches_hold_every_episode_once_and_neighbours_in_length(
    lengths: list[list[int]], size: int, cost: int
) -> None:
    episodes = [[sample(length) for length in of_episode] for of_episode in lengths]
    groups = micro_batches(episodes, size=size, pass_cost=cost)
    in_order = [index for group in groups for index in group]
    assert sorted(in_order) == list(range(len(lengths)))
    assert all(len(group) == 1 or num_samples(episodes, group) <= size for group in groups)
    longest = [max(lengths[index]) for index in in_order]
    assert longest == sorted(longest)


def num_samples(episodes: Sequence[Sequence[TrainingSample]], group: Sequence[int]) -> int:
    return sum(len(episodes[index]) for index in group)


@given(
    lengths=st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=2), min_size=1, max_size=8),
    size=st.integers(1, 5),
    pass_cost=st.sampled_from([0, *COSTS]),
)
def test_no_other_micro_batches_of_neighbours_cost_less(
    lengths: list[list[int]], size: int, pass_cost: int
) -> None:
    lengths.sort(key=max)
    episodes = [[sample(length) for length in of_episode] for of_episode in lengths]

    def cost(groups: Sequence[Sequence[int]]) -> int:
        return sum(
            pass_cost + num_samples(episodes, group) * padded_length(max(lengths[group[-1]]))
            for group in groups
        )

    def divisions(begin: int) -> Iterator[list[list[int]]]:
        """All of the episodes from `begin` on, in order."""
        if begin == len(lengths):
            yield []
        for end in range(begin + 1, len(lengths) + 1):
            group = list(range(begin, end))
            if len(group) == 1 or num_samples(episodes, group) <= size:
                for others in divisions(end):
                    yield [group, *others]

    found = micro_batches(episodes, size=size, pass_cost=pass_cost)
    assert cost(found) == min(cost(groups) for groups in divisions(0))


def test_a_long_context_has_a_pass_of_its_own_where_a_pass_costs_less_than_its_padding() -> None:
    episodes = [[sample(length)] for length in (400, 50, 48, 390)]

    def groups(size: int, device: str, *, sharded: bool = False) -> list[list[int]]:
        cost = pass_cost(torch.device(device), sharded=sharded)
        return micro_batches(episodes, size=size, pass_cost=cost)

    assert groups(4, "cpu") == [[2, 1], [3, 0]]
    assert groups(4, "cuda") == [[2, 1, 3, 0]]
    assert groups(4, "cpu", sharded=True) == [[2, 1, 3, 0]], "which gathers all weights"
    assert groups(3, "cuda") == [[2, 1], [3, 0]], "of two passes, those with the least padding"


@pytest.mark.parametrize("cost", COSTS)
def test_the_samples_of_an_episode_stay_in_one_micro_batch(cost: int) -> None:
    episodes = [[sample(9), sample(2)], [sample(3)] * 5, [sample(4)], [sample(8)]]
    # By longest sample 3, 4, 8, 9; at most three samples a group, five where they cannot be parted.
    assert micro_batches(episodes, size=3, pass_cost=cost) == [[1], [2], [3, 0]]
    assert micro_batches(episodes, size=4, pass_cost=cost) == [[1], [2, 3, 0]]


def test_the_groups_of_ranks_are_those_of_their_shares() -> None:
    episodes = [[sample(length)] for length in (5, 300, 4, 310, 6)]
    shares = [slice(rank, None, 2) for rank in range(2)]
    groups = [
        micro_batches(episodes, size=9, pass_cost=TOKENS_PER_PASS, share=share) for share in shares
    ]
    assert groups == [[[2, 4], [3]], [[0], [1]]]
    nothing = slice(5, None)
    assert micro_batches(episodes, size=9, pass_cost=TOKENS_PER_PASS, share=nothing) == []


def slices(*, num_items: int, batch_size: int, num_steps: int) -> list[int]:
    return [
        index
        for step in range(num_steps)
        for index in epoch_slice(
            num_items=num_items, batch_size=batch_size, step=step, seed=3, purpose="test"
        )
    ]


@given(num_items=st.integers(1, 20), batch_size=st.integers(1, 45))
def test_every_epoch_is_a_permutation_of_all_items(num_items: int, batch_size: int) -> None:
    num_steps = -(-3 * num_items // batch_size)
    drawn = slices(num_items=num_items, batch_size=batch_size, num_steps=num_steps)
    assert len(drawn) == num_steps * batch_size
    for epoch in range(len(drawn) // num_items):
        items = drawn[epoch * num_items : (epoch + 1) * num_items]
        assert sorted(items) == list(range(num_items))


def test_epochs_have_different_orders() -> None:
    drawn = slices(num_items=50, batch_size=50, num_steps=2)
    assert drawn[:50] != drawn[50:]


@pytest.mark.parametrize("changed", [{"step": 8}, {"seed": 4}, {"purpose": "other"}])
def test_a_slice_is_a_function_of_step_seed_and_purpose(changed: dict) -> None:
    arguments = {"num_items": 50, "batch_size": 20, "step": 7, "seed": 3, "purpose": "test"}
    assert epoch_slice(**arguments) == epoch_slice(**arguments)
    assert epoch_slice(**arguments) != epoch_slice(**{**arguments, **changed})


def test_padded_lengths_are_few_and_hardly_longer() -> None:
    lengths = range(1, 5000)
    padded = [padded_length(length) for length in lengths]
    assert all(
        length <= longer <= length * 17 / 16 for length, longer in zip(lengths, padded, strict=True)
    )
    assert len(set(padded)) < 16 * 10
    assert padded_length(3) == 3


@pytest.mark.slow
def test_the_longest_length_within_a_limit_does_not_exceed_it_when_padded() -> None:
    for limit in range(1, 2000):
        fitting = [length for length in range(1, limit + 1) if padded_length(length) <= limit]
        assert longest_within(limit) == max(fitting)
