"""Choose the tasks of a batch that are worth an update, by how much their returns vary.

Consumes one return per trajectory and the task that it belongs to, produces a mask of the
trajectories to train on. StarPO-S of RAGEN (arXiv 2504.20073) keeps the tasks whose returns vary
most: where all rollouts earn the same, group-relative advantages are 0 and only the noise of the
other terms is left. Assumes several rollouts per task; a task's score is the sample standard
deviation of their returns.

    top_p          largest scores first, until they hold the fraction p of the sum of all
    top_fraction   the fraction p of the groups, rounded down, at least one

Equal scores are taken in the order in which their groups first appear in the batch. At least one
group is kept, unless all were dropped for having no variance, and then the result says so.

Axes: B trajectories in any order, G groups in order of first appearance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.config.training import RolloutFilterConfig
from ragen_apo.objectives.tensors import (
    at_least_float32,
    check_ids,
    check_vectors,
    group_statistics,
)


@dataclass(frozen=True)
class FilterResult:
    """Which trajectories and groups are kept."""

    keep_B: Tensor
    """Boolean, one per trajectory."""
    keep_G: Tensor
    """Boolean, one per group."""
    constant_G: Tensor
    """Boolean: the group's returns are all equal, in the precision in which they were given."""


def filter_trajectories(
    returns_B: Tensor, *, group_B: Tensor, settings: RolloutFilterConfig
) -> FilterResult:
    """Keep whole groups of trajectories by the standard deviation of their returns.

    `group_B` int64. Raises ValueError for shapes that differ and numbers that are not finite.
    """
    check_vectors(returns_B=returns_B, group_B=group_B)
    check_ids(group_B=group_B)
    first_G, member_B = _first_appearance(group_B)
    score_G = group_statistics(returns_B, group_N=group_B).std[first_G]
    constant_G = score_G == 0
    eligible_G = torch.ones_like(constant_G)
    if settings.zero_variance == "drop":
        eligible_G = ~constant_G
    keep_G = torch.zeros_like(eligible_G)
    if eligible_G.any():
        keep_G[eligible_G] = select_groups(score_G[eligible_G], settings=settings)
    return FilterResult(keep_B=keep_G[member_B], keep_G=keep_G, constant_G=constant_G)


def select_groups(score_G: Tensor, *, settings: RolloutFilterConfig) -> Tensor:
    """The groups that the strategy keeps, a boolean mask [G] with at least one True.

    Does not look at `settings.zero_variance`. top_p with p = 1 keeps all; where all scores are 0
    every group weighs the same. Raises ValueError for scores that are not finite and for none.
    """
    check_vectors(score_G=score_G)
    score_G = at_least_float32(score_G.detach()).double()
    num_groups = len(score_G)
    if settings.strategy == "none":
        return torch.ones(num_groups, dtype=torch.bool, device=score_G.device)
    rank_G = torch.argsort(score_G, descending=True, stable=True)
    if settings.strategy == "top_fraction":
        num_kept = max(math.floor(settings.value * num_groups + 1e-9), 1)
    else:
        weight_G = score_G if score_G.max() > 0 else torch.ones_like(score_G)
        num_kept = _num_reaching(weight_G[rank_G], settings.value)
    keep_G = torch.zeros(num_groups, dtype=torch.bool, device=score_G.device)
    keep_G[rank_G[:num_kept]] = True
    return keep_G


def _num_reaching(ranked_weight_G: Tensor, p: float) -> int:
    """How many of the first weights it takes to hold the fraction p of their sum."""
    if p == 1:
        return len(ranked_weight_G)
    held_G = ranked_weight_G.cpu().cumsum(dim=0)  # a GPU has no deterministic one
    # Scores come in float32: without a tolerance, rounding decides at p = 0.5 between two and three
    # of four equal groups.
    return int((held_G < p * held_G[-1] * (1 - 1e-6)).sum()) + 1


def _first_appearance(group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each group's first trajectory [G], ascending, and each trajectory's group [B]."""
    ids, member_B = torch.unique(group_B, return_inverse=True)
    position_B = torch.arange(len(group_B), device=group_B.device)
    first_G = torch.full_like(ids, len(group_B))
    first_G = first_G.scatter_reduce(0, member_B, position_B, "amin")
    order_G = torch.argsort(first_G)
    new_index_G = torch.empty_like(order_G)
    new_index_G[order_G] = torch.arange(len(ids), device=group_B.device)
    return first_G[order_G], new_index_G[member_B]
