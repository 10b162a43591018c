"""Choose the tasks of a batch that are worth an update, by how much their returns vary.

Consumes one return per trajectory and the task that it belongs to, produces a mask of the tasks to
train on. StarPO-S of RAGEN (arXiv 2504.20073) keeps the tasks whose returns vary most: where all
rollouts earn the same, group-relative advantages are 0 and only the noise of the other terms is
left. Assumes several rollouts per task; a task's score is the sample standard deviation of their
returns.

    top_p          largest scores first, until they hold the fraction p of the sum of all
    top_fraction   the fraction p of the groups, rounded down, at least one

Groups that do not vary are left out before that, unless `zero_variance` keeps them.

Of equal scores the first groups are taken. At least one group is kept, unless all were dropped for
having no variance, and then the result says so.

Axes: B trajectories in any order, G groups: the trajectories of one task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.config.training import RolloutFilterConfig
from ragen_apo.objectives.tensors import at_least_float32, check_vectors, group_statistics


@dataclass(frozen=True)
class FilteredGroups:
    """Which groups are kept, as booleans."""

    keep_G: Tensor
    constant_G: Tensor
    """The group's returns are all equal, in the precision in which they were given."""


def filter_groups(
    returns_B: Tensor, *, group_B: Tensor, settings: RolloutFilterConfig
) -> FilteredGroups:
    """Chooses among groups of trajectories by the standard deviation of their returns.

    `group_B` int64 holds the numbers 0 to G - 1, each at least once. Raises ValueError for shapes
    that differ and numbers that are not finite. The strategy `none` keeps all and looks at nothing.
    """
    num_groups = int(group_B.max()) + 1
    if settings.strategy == "none":
        keep_G = torch.ones(num_groups, dtype=torch.bool, device=group_B.device)
        return FilteredGroups(keep_G, constant_G=~keep_G)
    std_B = group_statistics(returns_B, group_N=group_B).std
    score_G = std_B.new_zeros(num_groups).scatter(0, group_B, std_B)
    constant_G = score_G == 0
    eligible_G = ~constant_G if settings.zero_variance == "drop" else torch.ones_like(constant_G)
    keep_G = torch.zeros_like(eligible_G)
    if eligible_G.any():
        keep_G[eligible_G] = select_groups(score_G[eligible_G], settings=settings)
    return FilteredGroups(keep_G, constant_G)


def select_groups(score_G: Tensor, *, settings: RolloutFilterConfig) -> Tensor:
    """The groups that `top_p` or `top_fraction` keeps, a boolean mask [G] with at least one True.

    Does not look at `settings.zero_variance`. top_p with p = 1 keeps all; where all scores are 0
    every group weighs the same. Raises ValueError for scores that are not finite and for none.
    """
    check_vectors(score_G=score_G)
    score_G = at_least_float32(score_G.detach()).double()
    num_groups = len(score_G)
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
