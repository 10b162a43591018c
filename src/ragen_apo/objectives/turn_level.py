"""Turn-level A*-PO: the optimal advantage of each segment of an episode instead of the whole.

Consumes log-probabilities, the rewards of segments (turns between two states of known value) and
the values of their first states; produces a scalar loss and the same monitors as `objectives.apo`.

With V of the state after the end 0, and Delta_h the log ratio of segment h:

    delta_h = r_h + V(s_{h+1}) - V(s_h) - beta Delta_h                 (`segment_residuals`)
    A_h     = sum_{l >= 0} lambda^l delta_{h+l}                        (`traced`)
    loss    = -sum_h detach(A_h) Delta_h

lambda = 0 is the regression of every segment on its own optimal advantage. It is right where V is
V*, and otherwise as wrong as V is.

lambda = 1 makes A_h the return to go, minus beta times the log ratio to go, minus V(s_h).
On-policy, its expected gradient is that of the trajectory form for any V, because V(s_h) does not
depend on what is written in s_h. Its variance is lower, because it leaves out what was earned
before s_h, and V(s_h) knows how good s_h was.

Values between the two trade bias for variance (Schulman et al., arXiv 1506.02438, for returns
without KL).

Axes: B sequences, T token positions, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.objectives.apo import ApoLoss
from ragen_apo.objectives.tensors import (
    check_tokens,
    discounted_sum,
    sampled_or_zero,
    token_log_ratio,
)


@dataclass(frozen=True)
class TurnLevelSettings:
    """The knobs of the turn-level loss. Raises ValueError for a trace outside [0, 1]."""

    beta2: float
    """Weight of KL(pi || pi_ref), in the unit of a return."""
    trace: float
    """lambda."""
    advantage_clamp: float | None = None
    """Largest |A_h| that a gradient sees; None for no limit."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.trace <= 1.0:
            raise ValueError(f"trace must lie between 0 and 1, got {self.trace}")


def turn_level_loss(
    logprobs_BT: Tensor,
    *,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    segment_BT: Tensor,
    rewards_BS: Tensor,
    values_BS: Tensor,
    settings: TurnLevelSettings,
    num_sequences: int,
    offset: float | Tensor = 0.0,
) -> ApoLoss:
    """The loss of some sequences out of a batch of `num_sequences`.

    `segment_BT` [B, T] int64 says which segment a sampled token belongs to; its other entries do
    not matter. `rewards_BS` and `values_BS` [B, S] are 0 for segments that a sequence does not
    have. `offset` is subtracted from the advantages, as in `apo_loss`. It is one number, one per
    segment [B, S] or one per sequence [B, 1]. `ApoLoss.residual` is the sum of the segments'
    residuals, which is the residual of the whole trajectory. Raises ValueError for shapes that do
    not agree.
    """
    check_tokens(
        mask_BT,
        logprobs_BT=logprobs_BT,
        reference_logprobs_BT=reference_logprobs_BT,
        segment_BT=segment_BT,
    )
    if rewards_BS.shape != values_BS.shape or len(rewards_BS) != len(logprobs_BT):
        raise ValueError(
            f"rewards_BS and values_BS must have one shape [{len(logprobs_BT)}, S], got "
            f"{tuple(rewards_BS.shape)} and {tuple(values_BS.shape)}"
        )
    log_ratio_BS = segment_log_ratios(
        logprobs_BT,
        reference_logprobs_BT=reference_logprobs_BT,
        mask_BT=mask_BT,
        segment_BT=segment_BT,
        like=values_BS,
    )
    residual_BS = segment_residuals(
        log_ratio_BS.detach(), rewards_BS=rewards_BS, values_BS=values_BS, beta2=settings.beta2
    )
    advantage_BS = traced(residual_BS, trace=settings.trace)
    advantage_BS = advantage_BS - offset
    if settings.advantage_clamp is not None:
        advantage_BS = advantage_BS.clamp(
            min=-settings.advantage_clamp, max=settings.advantage_clamp
        )
    loss_B = -(advantage_BS * log_ratio_BS).sum(dim=1)
    return ApoLoss(loss=loss_B.sum() / num_sequences, residual=residual_BS.sum(dim=1))


def segment_log_ratios(
    logprobs_BT: Tensor,
    *,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    segment_BT: Tensor,
    like: Tensor,
) -> Tensor:
    """Delta_h [B, S] in the shape of `like`: the log-ratio of each segment; gradients pass."""
    token_BT = token_log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT)
    return segment_sums(token_BT, mask_BT=mask_BT, segment_BT=segment_BT, like=like)


def segment_sums(token_BT: Tensor, *, mask_BT: Tensor, segment_BT: Tensor, like: Tensor) -> Tensor:
    """The sum of a per-token quantity over each segment's sampled tokens, in the shape of `like`.

    0 for a segment without sampled tokens. Gradients flow into the sampled tokens.
    """
    index_BT = sampled_or_zero(segment_BT, mask_BT)
    sums_BS = torch.zeros(like.shape, dtype=token_BT.dtype, device=token_BT.device)
    return sums_BS.scatter_add(1, index_BT, sampled_or_zero(token_BT, mask_BT))


def segment_residuals(
    log_ratio_BS: Tensor, *, rewards_BS: Tensor, values_BS: Tensor, beta2: float
) -> Tensor:
    """Residuals delta [B, S]: reward + next value - value - beta2 Delta; they telescope.

    A sequence with fewer than S segments has zeros at the end of all three, so the value after its
    last segment is 0, as it has to be.
    """
    next_values_BS = torch.cat([values_BS[:, 1:], torch.zeros_like(values_BS[:, :1])], dim=1)
    advantage_BS = (rewards_BS + next_values_BS - values_BS).to(log_ratio_BS.dtype)
    return advantage_BS - beta2 * log_ratio_BS


def traced(residual_BS: Tensor, *, trace: float) -> Tensor:
    """sum_{l >= 0} trace^l residual_{h+l} [B, S]: this segment's residual and those after it."""
    return discounted_sum(residual_BS, decay=trace)
