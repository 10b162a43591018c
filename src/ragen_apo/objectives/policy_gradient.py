"""What all methods with an importance ratio share: clipping, aggregation, KL and entropy terms.

Consumes log-probabilities of the sampled tokens and one advantage per token, produces one loss per
token; `aggregate` turns token losses into the scalar that is differentiated.

    rho   = exp(log pi - log pi_old)                                     per sampled token
    loss  = -A min(rho, 1 + clip_high)      for A > 0
            -A max(rho, 1 - clip_low)       for A < 0

PPO (Schulman et al., arXiv 1707.06347), decoupled clip (DAPO, 2503.14476: 0.2 and 0.28). Assumes
that the samples come from pi_old at the temperature at which all log-probabilities were computed.
Clipping by token bounds each token's ratio, not the sequence's.

If the sampler is not exactly pi_old (another engine, another precision), `importance_weights`
corrects for it, up to a cap.

Advantages are computed once from the whole batch; losses are sums divided by counts of the whole
batch, so they add up over micro-batches and workers.

Axes: B sequences, T token positions. `_B` one number per sequence, `_BT` one per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.choices import Aggregation, check_choice
from ragen_apo.objectives.tensors import (
    check_finite_tokens,
    check_range,
    check_tokens,
    sampled_or_zero,
    token_log_ratio,
)

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before `exp`: an infinite ratio has a NaN gradient."""


@dataclass(frozen=True)
class PolicyLoss:
    """Losses of tokens and which of them the clip stopped."""

    loss_BT: Tensor
    """0 where no token was sampled; the gradient flows into the log-probabilities."""
    clipped_BT: Tensor
    """True at sampled tokens that get no gradient because a clip is active."""


def clipped_policy_loss(
    logprobs_BT: Tensor,
    *,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """PPO's pessimistic surrogate for each token.

    `logprobs_BT` carries the gradient; the other tensors are constants. `mask_BT` is True exactly
    at sampled tokens, and nothing else is read. `clip_low = 1` and `clip_high = inf` switch a side
    off. No gradient flows where log pi and log pi_old differ by more than 20. Raises ValueError for
    shapes that differ, advantages that are not finite, and clips out of range.
    """
    check_tokens(
        mask_BT,
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=old_logprobs_BT,
        advantages_BT=advantages_BT,
    )
    check_finite_tokens(mask_BT, advantages_BT=advantages_BT)
    check_range("clip_low", clip_low, low=0.0, high=1.0)
    check_range("clip_high", clip_high, low=0.0, high=math.inf)
    advantages_BT = sampled_or_zero(advantages_BT.detach(), mask_BT)
    log_ratio_BT = token_log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO).exp()
    pessimistic_BT = torch.where(
        advantages_BT > 0,
        ratio_BT.clamp(max=1 + clip_high),
        ratio_BT.clamp(min=1 - clip_low),
    )
    with torch.no_grad():
        clipped_BT = mask_BT & (advantages_BT != 0) & (pessimistic_BT != ratio_BT)
    return PolicyLoss(
        loss_BT=sampled_or_zero(-advantages_BT * pessimistic_BT, mask_BT), clipped_BT=clipped_BT
    )


def importance_weights(
    old_logprobs_BT: Tensor, *, sampled_logprobs_BT: Tensor, mask_BT: Tensor, cap: float
) -> Tensor:
    """min(pi_old / pi_sampler, cap) of each sampled token [B, T], a constant; 0 elsewhere.

    `sampled_logprobs_BT` is what the engine that sampled said of its tokens. Weighted so, the
    expected loss of a token under the sampler is that under pi_old; the cap bounds the variance and
    leaves a bias. That the tokens before came from the sampler, too, is not made up for.
    Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025). Raises ValueError for shapes that differ and a cap below 1.
    """
    check_range("cap", cap, low=1.0, high=math.inf)
    with torch.no_grad():
        log_weight_BT = token_log_ratio(old_logprobs_BT, sampled_logprobs_BT, mask_BT)
        weight_BT = log_weight_BT.clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO).exp()
        return sampled_or_zero(weight_BT.clamp(max=cap), mask_BT)


def aggregate(
    loss_BT: Tensor,
    *,
    mask_BT: Tensor,
    aggregation: Aggregation,
    num_sequences: int,
    num_tokens: int,
    max_tokens: int | None = None,
) -> Tensor:
    """The part of the batch's scalar loss that these sequences contribute.

    `num_sequences` and `num_tokens` (sampled ones) count the whole batch, so the results of its
    micro-batches add up to its loss. `max_tokens`, the limit of sampled tokens per sequence, is for
    `constant`. A sequence without sampled tokens adds 0 and still counts as a sequence.
    Raises ValueError for shapes that differ, counts below 1 or below those of the given sequences,
    a missing `max_tokens` and an unknown aggregation.
    """
    check_tokens(mask_BT, loss_BT=loss_BT)
    if num_sequences < max(len(mask_BT), 1):
        raise ValueError(
            f"num_sequences counts the whole batch, at least {len(mask_BT)}, got {num_sequences}"
        )
    num_tokens_B = mask_BT.sum(dim=1)
    # A count on a GPU is not looked at: the host would wait for all that is queued.
    at_least = max(0 if mask_BT.is_cuda else int(num_tokens_B.sum()), 1)
    if num_tokens < at_least:
        raise ValueError(
            f"num_tokens counts the sampled tokens of the whole batch, at least {at_least}, got "
            f"{num_tokens}"
        )
    loss_B = sampled_or_zero(loss_BT, mask_BT).sum(dim=1)
    check_choice("aggregation", aggregation, Aggregation)
    if aggregation == "token_mean":
        return loss_B.sum() / num_tokens
    if aggregation == "sequence_mean_token_mean":
        return (loss_B / num_tokens_B.clamp(min=1)).sum() / num_sequences
    if aggregation == "sequence_mean_token_sum":
        return loss_B.sum() / num_sequences
    if max_tokens is None or max_tokens < 1:
        raise ValueError(f"aggregation 'constant' needs max_tokens, at least 1, got {max_tokens}")
    return loss_B.sum() / (num_sequences * max_tokens)


def kl_loss(logprobs_BT: Tensor, *, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """d^2 / 2 for each token [B, T], d = log pi - log pi_ref; 0 where no token was sampled.

    Differentiated on samples of pi, its expected gradient is that of KL(pi || pi_ref) of a token.
    Estimates that read better as a value fail as a loss: the gradient of d itself is 0, and
    exp(-d) - 1 + d ("k3") has that of KL(pi_ref || pi). Forgets what a token does to the KL of
    later ones; a reward does not. Schulman, "Approximating KL Divergence" (2020); Tang and Munos
    (arXiv 2506.09477). The gradient flows into `logprobs_BT` only. Raises ValueError for shapes
    that differ.
    """
    check_tokens(mask_BT, logprobs_BT=logprobs_BT, reference_logprobs_BT=reference_logprobs_BT)
    return token_log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT).square() / 2


def penalize_rewards(
    rewards_BT: Tensor, *, kl_BT: Tensor, mask_BT: Tensor, coefficient: float
) -> Tensor:
    """Rewards minus coefficient times KL, token by token [B, T], held constant; 0 elsewhere.

    `kl_BT` is d = log pi - log pi_ref at the weights that sampled. Only this estimate of a token's
    KL gives a policy gradient the gradient of KL(pi || pi_ref). "k3" would give it minus the
    gradient of KL(pi_ref || pi). Raises ValueError for shapes that differ, a negative coefficient,
    and numbers that are not finite at sampled tokens.
    """
    check_tokens(mask_BT, rewards_BT=rewards_BT, kl_BT=kl_BT)
    check_finite_tokens(mask_BT, rewards_BT=rewards_BT, kl_BT=kl_BT)
    check_range("coefficient", coefficient, low=0.0, high=math.inf)
    return sampled_or_zero(rewards_BT.detach() - coefficient * kl_BT.detach(), mask_BT)


def entropy_bonus(entropy_BT: Tensor, *, mask_BT: Tensor, coefficient: float) -> Tensor:
    """-coefficient H at each sampled token [B, T], to be added to token losses; 0 elsewhere.

    `entropy_BT` is the entropy of the whole next-token distribution in nats and carries the
    gradient. Raises ValueError for shapes that differ and a coefficient that is not finite.
    """
    check_tokens(mask_BT, entropy_BT=entropy_BT)
    if not math.isfinite(coefficient):
        raise ValueError(f"coefficient must be finite, got {coefficient}")
    return -coefficient * sampled_or_zero(entropy_BT, mask_BT)
