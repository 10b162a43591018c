from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.policy.passes import longest_within, padded_length
from ragen_apo.task_order import epoch_slice
from ragen_apo.training.batching import TOKENS_PER_PASS, collate, micro_batches
from ragen_apo.types import TrainingSample

CPU, GPU = torch.device("cpu"), torch.device("cuda")


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


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    size=st.integers(1, 8),
    device=st.sampled_from([CPU, GPU]),
)
def test_micro_batches_hold_every_sample_once_and_neighbours_in_length(
    lengths: list[int], size: int, device: torch.device
) -> None:
    groups = micro_batches([[sample(length)] for length in lengths], size=size, device=device)
    in_order = [index for group in groups for index in group]
    assert sorted(in_order) == list(range(len(lengths)))
    assert all(1 <= len(group) <= size for group in groups)
    assert [lengths[index] for index in in_order] == sorted(lengths)


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=9), size=st.integers(1, 5))
def test_no_other_micro_batches_of_neighbours_are_computed_sooner_on_a_cpu(
    lengths: list[int], size: int
) -> None:
    lengths.sort()

    def cost(groups: Sequence[Sequence[int]]) -> int:
        return sum(
            TOKENS_PER_PASS["cpu"] + len(group) * padded_length(max(lengths[i] for i in group))
            for group in groups
        )

    def divisions(begin: int) -> Iterator[list[list[int]]]:
        """All of the samples from `begin` on, in order."""
        if begin == len(lengths):
            yield []
        for end in range(begin + 1, min(begin + size, len(lengths)) + 1):
            for others in divisions(end):
                yield [list(range(begin, end)), *others]

    found = micro_batches([[sample(length)] for length in lengths], size=size, device=CPU)
    assert cost(found) == min(cost(groups) for groups in divisions(0))


def test_what_is_much_longer_is_a_micro_batch_of_its_own_on_a_cpu_but_not_on_a_gpu() -> None:
    episodes = [[sample(length)] for length in (400, 50, 48, 390)]
    assert micro_batches(episodes, size=4, device=CPU) == [[2, 1], [3, 0]]
    assert micro_batches(episodes, size=4, device=GPU) == [[2, 1, 3, 0]]
    assert micro_batches(episodes, size=3, device=GPU) == [[2, 1], [3, 0]], (
        "two, and little padding"
    )


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_samples_of_an_episode_stay_in_one_micro_batch(device: torch.device) -> None:
    episodes = [[sample(9), sample(2)], [sample(3)] * 5, [sample(4)], [sample(8)]]
    # By longest sample 3, 4, 8, 9; at most three samples a group, five where they cannot be parted.
    assert micro_batches(episodes, size=3, device=device) == [[1], [2], [3, 0]]
    assert micro_batches(episodes, size=4, device=device) == [[1], [2, 3, 0]]


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


def test_the_longest_length_within_a_limit_does_not_exceed_it_when_padded() -> None:
    for limit in range(1, 2000):
        fitting = [length for length in range(1, limit + 1) if padded_length(length) <= limit]
        assert longest_within(limit) == max(fitting)
