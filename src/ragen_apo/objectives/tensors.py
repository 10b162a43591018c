"""What several objectives share: checks, sums over later tokens, groups, spreading over tokens.

Everything here is a constant to the gradient except where a docstring says otherwise. What stands
at positions where a mask is False, NaN included, never matters: values are chosen with `where`, not
multiplied with a mask, because 0 * NaN is NaN.

Axes: B sequences, T token positions, N things that are compared in groups (sequences or turns).
`_B` one number per sequence, `_BT` one per token, `_N` one per compared thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.plural import counted


def check_tokens(mask_BT: Tensor, **tensors_BT: Tensor) -> None:
    """Raise ValueError unless the mask is boolean [B, T] and the named tensors have its shape."""
    shape = tuple(mask_BT.shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"mask_BT must have axes [B, T], both at least 1, got shape {shape}")
    if mask_BT.dtype is not torch.bool:
        raise ValueError(f"mask_BT must be boolean, got {mask_BT.dtype}")
    for name, tensor in tensors_BT.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_finite_tokens(mask_BT: Tensor, **tensors_BT: Tensor) -> None:
    """Raise ValueError if a named tensor is NaN or infinite at a sampled token.

    Not on a GPU, where looking would wait for all that is queued: there the norm of the gradients
    tells, before an update is made.
    """
    for name, tensor in tensors_BT.items():
        if tensor.is_cuda:
            continue
        num_bad = int((mask_BT & ~torch.isfinite(tensor)).sum())
        if num_bad:
            raise ValueError(f"{name} must be finite at sampled tokens, not finite: {num_bad}")


def check_vectors(length: int | None = None, **tensors_N: Tensor) -> None:
    """Raise ValueError unless the named tensors are finite vectors of one length, at least 1.

    It is `length` if given, otherwise that of the first one. On a GPU, any numbers will do; see
    `check_finite_tokens`.
    """
    for name, tensor in tensors_N.items():
        if tensor.ndim != 1 or len(tensor) == 0:
            raise ValueError(
                f"{name} must have one axis and at least one entry, got shape {tuple(tensor.shape)}"
            )
        if length is None:
            length = len(tensor)
        elif len(tensor) != length:
            raise ValueError(
                f"{name} must have {counted(length, 'entry', 'entries')}, got {len(tensor)}"
            )
        if not tensor.is_cuda and not torch.isfinite(tensor).all():
            raise ValueError(f"{name} must be finite, got {tensor.tolist()}")


def check_ids(**tensors_N: Tensor) -> None:
    """Raise ValueError unless the named tensors hold int64 ids."""
    for name, tensor in tensors_N.items():
        if tensor.dtype is not torch.int64:
            raise ValueError(f"{name} must hold int64 ids, got {tensor.dtype}")


def check_range(name: str, value: float, *, low: float, high: float) -> None:
    """Raise ValueError unless low <= value <= high; NaN never is."""
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in a floating-point type in which sums over tokens can be trusted."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sampled_or_zero(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values at sampled tokens and 0 elsewhere [B, T]; the gradient flows at sampled ones."""
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


def token_log_ratio(logprobs_BT: Tensor, other_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The log-ratio to other log-probabilities [B, T], in at least float32; 0 where not sampled.

    The gradient flows into `logprobs_BT` at sampled tokens only; the other side is a constant.
    """
    difference_BT = at_least_float32(logprobs_BT) - at_least_float32(other_logprobs_BT.detach())
    return sampled_or_zero(difference_BT, mask_BT)


def next_sampled(values_BT: Tensor, *, mask_BT: Tensor, end: int) -> Tensor:
    """The value at the next sampled token after each position [B, T]; `end` after the last one.

    Tokens that were not sampled are skipped, so the successor of a turn's last token is the first
    token of the next turn, whatever the environment wrote between them.
    """
    num_positions = mask_BT.shape[1]
    position_T = torch.arange(num_positions, device=mask_BT.device)
    sampled_BT = torch.where(mask_BT, position_T, num_positions)
    nothing_B1 = torch.full_like(sampled_BT[:, :1], num_positions)
    after_BT = torch.cat([sampled_BT[:, 1:], nothing_B1], dim=1)
    next_BT = after_BT.flip(1).cummin(dim=1).values.flip(1)
    end_B1 = torch.full_like(values_BT[:, :1], end)
    return torch.cat([values_BT, end_B1], dim=1).gather(1, next_BT)


def discounted_sum(
    values_BT: Tensor, *, decay: float | Tensor, mask_BT: Tensor | None = None
) -> Tensor:
    """y_t = x_t + decay_t y_{t'} with t' the next sampled token, backwards; 0 where not sampled.

    `decay` is a number or has shape [B, T]; a decay of 0 at a token cuts off what comes after it.
    With rewards and decay = gamma this is the discounted return-to-go, of tokens as of turns.
    Without a mask every entry counts.
    """
    if mask_BT is None:
        mask_BT = torch.ones_like(values_BT, dtype=torch.bool)
    values_BT = sampled_or_zero(at_least_float32(values_BT.detach()), mask_BT)
    decay_BT = torch.as_tensor(decay, dtype=values_BT.dtype, device=values_BT.device)
    decay_BT = decay_BT.expand_as(values_BT)
    sum_B = torch.zeros_like(values_BT[:, 0])
    sums = []
    for t in reversed(range(values_BT.shape[1])):
        sum_B = torch.where(mask_BT[:, t], values_BT[:, t] + decay_BT[:, t] * sum_B, sum_B)
        sums.append(sum_B)
    return sampled_or_zero(torch.stack(sums[::-1], dim=1), mask_BT)


@dataclass(frozen=True)
class GroupStatistics:
    """For each of N entries, the statistics of the group that it belongs to, all of shape [N]."""

    deviation: Tensor
    """The entry minus the mean of its group; exactly 0 in a group whose entries are equal."""
    std: Tensor
    """Square root of the sum of squared deviations over size - 1; 0 for a group of one."""
    size: Tensor

    def standardized(self, *, eps: float = 1e-6) -> Tensor:
        """Deviation / (std + eps); 0 in groups of one or of equal entries."""
        return self.deviation / (self.std + eps)


def group_statistics(values_N: Tensor, *, group_N: Tensor) -> GroupStatistics:
    """Deviation from the mean and sample standard deviation in groups of any size and order.

    `group_N` holds int64 ids, any integers. Carries no gradient. Raises ValueError for entries that
    are not finite, shapes that differ and no entries.
    """
    check_vectors(values_N=values_N, group_N=group_N)
    check_ids(group_N=group_N)
    values_N = at_least_float32(values_N.detach())
    _, member_N, size_G = torch.unique(group_N, return_inverse=True, return_counts=True)
    zeros_G = torch.zeros(len(size_G), dtype=values_N.dtype, device=values_N.device)
    # Measured from the group's smallest entry, equal entries have a deviation of exactly 0 and not
    # a rounding error that a division by a tiny standard deviation would blow up.
    lowest_G = zeros_G.scatter_reduce(0, member_N, values_N, "amin", include_self=False)
    above_N = values_N - lowest_G[member_N]
    above_mean_G = zeros_G.index_add(0, member_N, above_N) / size_G
    deviation_N = above_N - above_mean_G[member_N]
    squares_G = zeros_G.index_add(0, member_N, deviation_N.square())
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    return GroupStatistics(
        deviation=deviation_N,
        std=std_G[member_N],
        size=size_G[member_N],
    )


def one_group(values_N: Tensor) -> Tensor:
    """Group ids [N] that put everything into one group: the batch."""
    return torch.zeros(values_N.shape, dtype=torch.int64, device=values_N.device)


def check_comparable(statistics: GroupStatistics) -> None:
    """Raise ValueError if every group has one member, so that nothing would be learned."""
    if int(statistics.size.max()) < 2:
        raise ValueError(
            f"a group needs at least 2 members to be compared, got {len(statistics.size)} groups of"
            " one: play each task several times, or use a baseline that needs no group"
        )


def whiten(values_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-8) over all sampled tokens of the batch [B, T]; 0 elsewhere.

    Needs the whole batch: whitening micro-batches one by one is another function. All 0 for one
    sampled token, for equal values and for none. Carries no gradient. Raises ValueError for shapes
    that differ and values that are not finite at sampled tokens.
    """
    check_tokens(mask_BT, values_BT=values_BT)
    check_finite_tokens(mask_BT, values_BT=values_BT)
    white_BT = torch.zeros_like(at_least_float32(values_BT.detach()))
    if mask_BT.any():
        values_N = values_BT[mask_BT]
        statistics = group_statistics(values_N, group_N=one_group(values_N))
        white_BT[mask_BT] = statistics.standardized(eps=1e-8)
    return white_BT
