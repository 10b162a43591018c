"""REINFORCE and its batch-normalised relatives: no critic, no group, no importance ratio needed.

Consumes returns per trajectory or rewards per token, produces advantages; `reinforce_loss` turns
them into token losses, or `policy_gradient.clipped_policy_loss` does.

    REINFORCE             A = R - b                          Williams 1992
    BRPO                  A = (R - mean) / (std + eps)       over the batch; RAGEN, arXiv 2504.20073
    REINFORCE++           A_t = sum_{i >= t} (r_i - beta kl_i), whitened over the batch's tokens
    REINFORCE++-baseline  A = R - mean of the task, whitened over the batch's tokens
                                                             Hu et al., arXiv 2501.03262

Assumes samples of the current policy. A baseline that depends on the task only costs no bias;
dividing by the standard deviation of the batch changes the rate of a step and not its direction;
the mean of a batch contains the sample itself, which shrinks the gradient by 1 - 1/B. Batch
statistics compare easy with hard tasks: an easy task's failure can look better than it is.

The functions need the whole batch at once. Axes: B sequences, T token positions.
"""

from __future__ import annotations

from torch import Tensor

from ragen_apo.objectives.tensors import (
    at_least_float32,
    check_comparable,
    check_finite_tokens,
    check_range,
    check_tokens,
    check_vectors,
    discounted_sum,
    group_statistics,
    one_group,
    sampled_or_zero,
    spread_over_tokens,
    whiten,
)


def reinforce_loss(logprobs_BT: Tensor, *, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """-A log pi at each sampled token [B, T], 0 elsewhere; grad J on samples of the policy.

    The advantages are held constant. With `sequence_mean_token_sum` the gradient is
    the policy gradient of the return. Raises ValueError for shapes that differ and advantages that
    are not finite at sampled tokens.
    """
    check_tokens(mask_BT, logprobs_BT=logprobs_BT, advantages_BT=advantages_BT)
    check_finite_tokens(mask_BT, advantages_BT=advantages_BT)
    advantages_BT = sampled_or_zero(advantages_BT.detach(), mask_BT)
    logprobs_BT = sampled_or_zero(at_least_float32(logprobs_BT), mask_BT)
    return -advantages_BT * logprobs_BT


def reinforce_advantages(returns_B: Tensor, *, baseline_B: Tensor) -> Tensor:
    """R - b [B]; the baseline may be anything that does not depend on what was sampled.

    A constant, a running mean of earlier batches, the V* of the task. For the mean of the other
    rollouts use `group_relative.rloo_advantages`, with one group for the batch. Raises ValueError
    for shapes that differ and numbers that are not finite.
    """
    check_vectors(returns_B=returns_B, baseline_B=baseline_B)
    return at_least_float32(returns_B.detach()) - baseline_B.detach()


def brpo_advantages(returns_B: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(R - mean of the batch) / (standard deviation of the batch + eps) [B].

    All 0 if all returns are equal. Raises ValueError for a batch of one trajectory and returns that
    are not finite.
    """
    statistics = group_statistics(returns_B, group_N=one_group(returns_B))
    check_comparable(statistics)
    return statistics.standardized(eps=eps)


def reinforce_plus_plus_advantages(
    rewards_BT: Tensor, *, mask_BT: Tensor, gamma: float = 1.0, eps: float = 1e-8
) -> Tensor:
    """Whitened returns-to-go of tokens [B, T]; 0 elsewhere.

    `rewards_BT` holds the task's rewards minus beta times K1 of each token:
    `policy_gradient.penalize_rewards`. Raises ValueError for shapes that differ, rewards that are
    not finite at sampled tokens, and gamma outside [0, 1].
    """
    check_tokens(mask_BT, rewards_BT=rewards_BT)
    check_finite_tokens(mask_BT, rewards_BT=rewards_BT)
    check_range("gamma", gamma, low=0.0, high=1.0)
    to_go_BT = discounted_sum(rewards_BT, mask_BT=mask_BT, decay=gamma)
    return whiten(to_go_BT, mask_BT=mask_BT, eps=eps)


def reinforce_plus_plus_baseline_advantages(
    returns_B: Tensor, *, group_B: Tensor, mask_BT: Tensor, eps: float = 1e-8
) -> Tensor:
    """The return minus the mean of its task, whitened over all sampled tokens [B, T]; 0 elsewhere.

    For several rollouts per task; the paper adds a K2 loss instead of a penalty in the reward.
    Raises ValueError if all groups are of one, for shapes that differ, and for returns that are not
    finite.
    """
    statistics = group_statistics(returns_B, group_N=group_B)
    check_comparable(statistics)
    deviation_BT = spread_over_tokens(statistics.deviation, mask_BT=mask_BT)
    return whiten(deviation_BT, mask_BT=mask_BT, eps=eps)
