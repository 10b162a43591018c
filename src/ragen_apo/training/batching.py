"""From training samples to padded tensors.

Axes: B rows, T positions. Rows are padded on the right, where causal attention never looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragen_apo.seeding import generator
from ragen_apo.types import TrainingSample


@dataclass(frozen=True)
class TokenBatch:
    """Samples side by side."""

    token_ids_BT: Tensor
    loss_mask_BT: Tensor
    """True exactly at the sampled tokens."""
    sampled_logprobs_BT: Tensor
    """log pi at sampling time, zero where the mask is False."""


def collate(samples: Sequence[TrainingSample], *, pad_id: int, device: torch.device) -> TokenBatch:
    """Pads the samples to the longest of them."""
    shape = (len(samples), max(len(sample.token_ids) for sample in samples))
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=bool)
    logprobs = np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = sample.token_ids
        loss_mask[row, :length] = sample.loss_mask
        logprobs[row, :length] = sample.logprobs
    return TokenBatch(
        token_ids_BT=torch.from_numpy(token_ids).to(device),
        loss_mask_BT=torch.from_numpy(loss_mask).to(device),
        sampled_logprobs_BT=torch.from_numpy(logprobs).to(device),
    )


def micro_batches(samples: Sequence[TrainingSample], *, size: int) -> list[list[int]]:
    """Indices of the samples in groups of at most `size`, of similar length to save padding."""
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].token_ids))
    return [order[start : start + size] for start in range(0, len(order), size)]


def epoch_slice(
    *, num_items: int, batch_size: int, step: int, seed: int, purpose: str
) -> list[int]:
    """Which items step `step` uses: consecutive pieces of a fresh random order each epoch.

    A function of its arguments alone, so the step is all that a checkpoint has to remember.
    """
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(step * batch_size + len(indices), num_items)
        order = generator(seed, purpose, epoch).permutation(num_items)
        indices += order[offset : offset + batch_size - len(indices)].tolist()
    return indices
