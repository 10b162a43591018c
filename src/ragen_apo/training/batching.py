"""From training samples to padded tensors.

Axes: R rows, of episodes or of samples; T positions. Rows are padded on the right, where causal
attention never looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragen_apo.policy.passes import padded_length, to_device
from ragen_apo.seeding import generator
from ragen_apo.types import TrainingSample

TOKENS_PER_PASS = 200
"""What a pass costs on a CPU beside its tokens, in tokens: about so much with small models and
short contexts (docs/log.md, "How fast are rollouts and training?")."""
FEWEST_PASSES = 10**9
"""The same where passes are to be as few as they can be."""


@dataclass(frozen=True)
class TokenBatch:
    """Samples side by side."""

    token_ids_RT: Tensor
    loss_mask_RT: Tensor
    """True exactly at the sampled tokens."""
    sampled_logprobs_RT: Tensor
    """log pi at sampling time, zero where the mask is False."""

    def rows(self, rows: Tensor, *, num_positions: int | None = None) -> TokenBatch:
        """The rows with these indices, or where a mask is True, and their first positions."""
        return TokenBatch(
            token_ids_RT=self.token_ids_RT[rows, :num_positions],
            loss_mask_RT=self.loss_mask_RT[rows, :num_positions],
            sampled_logprobs_RT=self.sampled_logprobs_RT[rows, :num_positions],
        )


def collate(samples: Sequence[TrainingSample], *, pad_id: int, device: torch.device) -> TokenBatch:
    """Pads the samples to the longest of them, or a little more (see `padded_length`)."""
    shape = (len(samples), padded_length(_longest(samples)))
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = sample.token_ids
        logprobs[row, :length] = sample.logprobs
    return TokenBatch(
        token_ids_RT=to_device(torch.from_numpy(token_ids), device),
        loss_mask_RT=to_device(loss_mask_of(samples, num_positions=shape[1]), device),
        sampled_logprobs_RT=to_device(torch.from_numpy(logprobs), device),
    )


def loss_mask_of(samples: Sequence[TrainingSample], *, num_positions: int) -> Tensor:
    """True exactly at the sampled tokens [R, T]; on the CPU."""
    mask = np.zeros((len(samples), num_positions), dtype=bool)
    for row, sample in enumerate(samples):
        mask[row, : len(sample.loss_mask)] = sample.loss_mask
    return torch.from_numpy(mask)


def pass_cost(device: torch.device, *, sharded: bool = False) -> int:
    """What a pass costs beside its tokens, in tokens; `sharded` if it gathers shares of weights."""
    return TOKENS_PER_PASS if device.type == "cpu" and not sharded else FEWEST_PASSES


def micro_batches(
    episodes: Sequence[Sequence[TrainingSample]],
    *,
    size: int,
    pass_cost: int,
    share: slice = slice(None),
) -> list[list[int]]:
    """Indices of the episodes in groups of at most `size` samples of similar length.

    Of all such groups these cost the least: padding costs time, and so does each pass. The samples
    of an episode stay together; one that has more is a group of its own. `share` of the episodes,
    from the shortest to the longest, are in the groups of this rank.
    """
    order = _by_length(episodes)[share]
    costs, begins = [0], [0]
    """Of the first episodes in that order: the least cost, and where the last group begins."""
    for end in range(1, len(order) + 1):
        length = padded_length(_longest(episodes[order[end - 1]]))
        num_samples = 0
        choices = []
        for begin in reversed(range(end)):
            num_samples += len(episodes[order[begin]])
            if choices and num_samples > size:
                break
            choices.append((costs[begin] + pass_cost + num_samples * length, begin))
        cost, begin = min(choices)
        costs.append(cost)
        begins.append(begin)
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups[::-1]


def shortest(episodes: Sequence[Sequence[TrainingSample]]) -> int:
    """The index of the episode whose longest sample is the shortest."""
    return _by_length(episodes)[0]


def _by_length(episodes: Sequence[Sequence[TrainingSample]]) -> list[int]:
    return sorted(range(len(episodes)), key=lambda index: _longest(episodes[index]))


def _longest(samples: Sequence[TrainingSample]) -> int:
    return max(len(sample.token_ids) for sample in samples)


def minibatches(
    num_items: int, *, num_parts: int, seed: int, step: int, epoch: int
) -> list[list[int]]:
    """The items in `num_parts` parts of about one size in a random order; a single part in order.

    Fewer parts where there are fewer items.
    """
    if num_parts == 1:
        return [list(range(num_items))]
    order = generator(seed, "minibatches", step, epoch).permutation(num_items)
    return [part.tolist() for part in np.array_split(order, min(num_parts, num_items))]
