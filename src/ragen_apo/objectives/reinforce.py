"""Advantages over a whole step, without a critic or a group: BRPO and REINFORCE++.

    BRPO          A = (R - mean) / (std + eps)       over the batch; RAGEN, arXiv 2504.20073
    REINFORCE++   A_t = sum_{i >= t} (r_i - beta kl_i), whitened over the batch's tokens
                                                     Hu et al., arXiv 2501.03262

Consumes returns per trajectory or rewards per token. Assumes samples of the current policy.
Dividing by the standard deviation of the batch changes the size of a step, not its direction. The
mean of a batch contains the sample itself, which shrinks the gradient by 1 - 1/B. Batch statistics
compare easy tasks with hard ones: a failure on an easy task can look better than it is.

The functions need the whole batch at once. Axes: B sequences, T token positions.
"""

from __future__ import annotations

from torch import Tensor

from ragen_apo.objectives.tensors import (
    check_comparable,
    check_finite_tokens,
    check_tokens,
    discounted_sum,
    group_statistics,
    one_group,
    whiten,
)


def brpo_advantages(returns_B: Tensor) -> Tensor:
    """(R - mean of the batch) / (standard deviation of the batch + eps) [B].

    All 0 if all returns are equal. Raises ValueError for a batch of one trajectory and returns that
    are not finite.
    """
    statistics = group_statistics(returns_B, group_N=one_group(returns_B))
    check_comparable(statistics)
    return statistics.standardized()


def reinforce_plus_plus_advantages(rewards_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """Whitened returns-to-go of tokens [B, T]; 0 elsewhere.

    `rewards_BT` holds the task's rewards minus beta times K1 of each token:
    `policy_gradient.penalize_rewards`. Raises ValueError for shapes that differ, and rewards that
    are not finite at sampled tokens.
    """
    check_tokens(mask_BT, rewards_BT=rewards_BT)
    check_finite_tokens(mask_BT, rewards_BT=rewards_BT)
    to_go_BT = discounted_sum(rewards_BT, mask_BT=mask_BT, decay=1.0)
    return whiten(to_go_BT, mask_BT=mask_BT)
