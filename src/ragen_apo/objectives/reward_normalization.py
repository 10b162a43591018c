"""Normalise returns before advantages are formed, as RAGEN does (arXiv 2504.20073).

Consumes the return of each trajectory (with penalties already in it) and what it belongs to,
produces one number per trajectory:

    identity    R
    mean        R - mean
    mean_std    (R - mean) / (std + 1e-6)
    asym_clip   mean_std, then clamped to [-1, 3]

Statistics are those of the rollouts of one start state (one task), of the whole batch, or of one
environment when a batch mixes several. The asymmetric clamp limits how hard a failure is punished
and leaves a rare success its size; after it the mean is no longer 0.

Assumes one number per trajectory: normalised rewards of single turns no longer add up to a return.
Axes: B trajectories.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from ragen_apo.objectives.tensors import (
    at_least_float32,
    check_comparable,
    check_vectors,
    enum_member,
    group_statistics,
    one_group,
)

ASYMMETRIC_CLIP = (-1.0, 3.0)
"""In standard deviations of the group."""

EPS = 1e-6


class NormalizationGrouping(str, Enum):
    """Whose statistics normalise a return."""

    STATE = "state"
    """Those of the rollouts of the same task, which start in the same state."""
    BATCH = "batch"
    """Those of all rollouts."""
    ENVIRONMENT = "environment"
    """Those of the rollouts in the same environment (RAGEN: `inductive`)."""


class NormalizationMethod(str, Enum):
    """What is done with them; see the module's head."""

    IDENTITY = "identity"
    MEAN = "mean"
    MEAN_STD = "mean_std"
    ASYM_CLIP = "asym_clip"


def normalize_returns(
    returns_B: Tensor,
    *,
    grouping: NormalizationGrouping,
    method: NormalizationMethod,
    task_B: Tensor | None = None,
    environment_B: Tensor | None = None,
) -> Tensor:
    """The normalised returns [B].

    `task_B` and `environment_B` hold int64 ids; the grouping says which of them is needed. Members
    of a group whose returns are all equal, and of a group of one, get 0 (except under `identity`).
    Raises ValueError for a missing id tensor, shapes that differ, returns that are not finite, and
    if every group has one member.
    """
    check_vectors(returns_B=returns_B)
    grouping = enum_member(NormalizationGrouping, grouping)
    method = enum_member(NormalizationMethod, method)
    group_B = one_group(returns_B)
    if grouping is NormalizationGrouping.STATE:
        group_B = _required("task_B", task_B, grouping)
    elif grouping is NormalizationGrouping.ENVIRONMENT:
        group_B = _required("environment_B", environment_B, grouping)
    statistics = group_statistics(returns_B, group_N=group_B)
    if method is NormalizationMethod.IDENTITY:
        return at_least_float32(returns_B.detach())
    check_comparable(statistics)
    if method is NormalizationMethod.MEAN:
        return statistics.deviation
    standardized_B = statistics.standardized(eps=EPS)
    if method is NormalizationMethod.MEAN_STD:
        return standardized_B
    low, high = ASYMMETRIC_CLIP
    return standardized_B.clamp(min=low, max=high)


def _required(name: str, ids_B: Tensor | None, grouping: NormalizationGrouping) -> Tensor:
    if ids_B is None:
        raise ValueError(f"grouping '{grouping.value}' needs {name}, got None")
    return ids_B
