"""Advantages from several rollouts of the same task: GRPO, Dr. GRPO, RLOO, GiGPO.

Consumes one return per trajectory and the task that it belongs to, produces one advantage per
trajectory (GiGPO: per turn). `tensors.spread_over_tokens` and `spread_turns_over_tokens` bring them
to tokens, `policy_gradient.clipped_policy_loss` and `aggregate` make the loss.

    GRPO       (R - mean) / (std + eps)         Shao et al., arXiv 2402.03300
    Dr. GRPO   R - mean                         Liu et al., 2503.20783; `constant`
    RLOO       R - mean of the others           Ahmadian et al., 2402.14740
    GiGPO      episode + turn                   Feng et al., 2505.10978

Statistics are those of the group (rollouts of one task); std is the sample standard deviation.
Assumes that the rollouts of a group start in the same state. Dividing by std gives tasks with rare
variation more weight, which is not the gradient of the return. A mean that contains the sample
itself shrinks the gradient by 1 - 1/n. RLOO is unbiased. A group whose returns are all equal has
advantages of exactly 0.

Axes: B trajectories in any order, N turns of them in any order; groups of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_apo.objectives.tensors import (
    check_comparable,
    check_ids,
    check_vectors,
    group_statistics,
)


def grpo_advantages(returns_B: Tensor, *, group_B: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantages [B].

    `group_B` int64. A group of one has advantage 0 (elsewhere it keeps its raw return, which
    teaches that every positive return is good). Raises ValueError if all groups are of one, for
    shapes that differ, and for returns that are not finite.
    """
    statistics = group_statistics(returns_B, group_N=group_B)
    check_comparable(statistics)
    return statistics.standardized(eps=eps)


def dr_grpo_advantages(returns_B: Tensor, *, group_B: Tensor) -> Tensor:
    """Dr. GRPO's advantages [B]: GRPO's without the division, for `constant`; raises the same."""
    statistics = group_statistics(returns_B, group_N=group_B)
    check_comparable(statistics)
    return statistics.deviation


def rloo_advantages(returns_B: Tensor, *, group_B: Tensor) -> Tensor:
    """RLOO's advantages [B]: the return minus the mean return of the *other* rollouts of the task.

    R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1). Raises ValueError for a group of one, which
    has no others, for shapes that differ, and for returns that are not finite.
    """
    statistics = group_statistics(returns_B, group_N=group_B)
    if int(statistics.size.min()) < 2:
        alone = group_B[statistics.size < 2].tolist()
        raise ValueError(
            "leaving one out needs at least 2 rollouts of every task, got one for group"
            f" {alone[0]} (and {len(alone) - 1} more): play each task several times or filter it"
        )
    return statistics.deviation * (statistics.size / (statistics.size - 1))


def gigpo_advantages(
    returns_B: Tensor,
    *,
    group_B: Tensor,
    returns_to_go_N: Tensor,
    trajectory_N: Tensor,
    state_N: Tensor,
    eps: float = 1e-6,
) -> Tensor:
    """Advantages of turns [N]: of the episode in its task + of the turn in its state.

    Turn n belongs to trajectory `trajectory_N[n]` (an index into B), was written in the state with
    id `state_N[n]`, and collected `returns_to_go_N[n]` from there on, discounted by turns
    (`tensors.discounted_sum` of rewards by turn). Turns of one task with one state id form an
    anchor group, visits within one trajectory included; ids of different tasks never meet. Where
    the group has one turn, the turn's part is 0. Episode statistics count each trajectory once.
    Raises ValueError where `grpo_advantages` does and for a trajectory that does not exist.
    """
    check_vectors(returns_to_go_N=returns_to_go_N, trajectory_N=trajectory_N, state_N=state_N)
    check_ids(trajectory_N=trajectory_N, state_N=state_N)
    if int(trajectory_N.min()) < 0 or int(trajectory_N.max()) >= len(returns_B):
        raise ValueError(
            f"trajectory_N must index the {len(returns_B)} returns, got {trajectory_N.tolist()}"
        )
    episode_B = grpo_advantages(returns_B, group_B=group_B, eps=eps)
    task_and_state = torch.stack([group_B[trajectory_N], state_N], dim=1)
    _, anchor_N = torch.unique(task_and_state, dim=0, return_inverse=True)
    anchors = group_statistics(returns_to_go_N, group_N=anchor_N)
    return episode_B[trajectory_N] + anchors.standardized(eps=eps)
