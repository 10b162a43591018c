"""Normalised returns against plain recomputations, by task, batch and environment."""

import math
import statistics
from typing import get_args

import pytest
import torch

from ragen_apo.choices import NormalizationGrouping, NormalizationMethod
from ragen_apo.objectives.group_relative import grpo_advantages
from ragen_apo.objectives.reward_normalization import (
    normalize_returns,
)

TASK_B = torch.tensor([4, 4, 9, 9, 9, 4, 1])
ENVIRONMENT_B = torch.tensor([0, 0, 1, 1, 1, 0, 1])


def normalize(returns_B, **options):
    return normalize_returns(
        returns_B, **{"task_B": TASK_B, "category_B": ENVIRONMENT_B, **options}
    )


def slow(values, ids, method):
    results = []
    for value, own_id in zip(values, ids, strict=True):
        own = [x for x, other in zip(values, ids, strict=True) if other == own_id]
        deviation = value - statistics.fmean(own)
        std = statistics.stdev(own) if len(own) > 1 else 0.0
        standardized = deviation / (std + 1e-6)
        results.append(
            {
                "identity": value,
                "mean": deviation,
                "mean_std": standardized,
                "asym_clip": min(max(standardized, -1.0), 3.0),
            }[method]
        )
    return results


@pytest.mark.parametrize("grouping", get_args(NormalizationGrouping))
@pytest.mark.parametrize("method", get_args(NormalizationMethod))
def test_every_grouping_and_method_equals_its_definition(grouping, method):
    ids = {"state": TASK_B, "category": ENVIRONMENT_B, "batch": torch.zeros(7)}
    returns_B = torch.randn(7)
    expected = slow(returns_B.tolist(), ids[grouping].tolist(), method)
    result_B = normalize(returns_B, grouping=grouping, method=method)
    assert result_B.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_asymmetric_clip_spares_failures_and_keeps_a_rare_success():
    # 15 failures, 1 success: mean 1/16, std 1/4; the success has (15/16) / (1/4) = 3.75 -> 3.
    # 1 failure, 15 successes: the failure has -3.75 -> -1.
    rare_B = torch.zeros(16)
    rare_B[3] = 1.0
    options = {"grouping": "batch", "method": "asym_clip"}
    success_B = normalize_returns(rare_B, **options)
    assert success_B[3].item() == 3.0
    assert success_B[0].item() == pytest.approx(-0.25, abs=1e-5)
    failure_B = normalize_returns(1 - rare_B, **options)
    assert failure_B[3].item() == -1.0
    assert failure_B[0].item() == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("method", ["mean", "mean_std", "asym_clip"])
def test_equal_returns_and_groups_of_one_become_zero(method):
    returns_B = torch.tensor([0.1, 0.1, 0.7, 0.7, 0.7, 0.1, 5.0], dtype=torch.float32)
    assert normalize(returns_B, grouping="state", method=method).tolist() == [0.0] * 7


def test_by_task_with_mean_and_deviation_it_is_grpo():
    returns_B = torch.rand(7)
    normalized_B = normalize(returns_B, grouping="state", method="mean_std")
    assert torch.equal(normalized_B, grpo_advantages(returns_B, group_B=TASK_B))


def test_refusals():
    returns_B = torch.rand(7)
    with pytest.raises(ValueError, match="grouping 'state' needs task_B, got None"):
        normalize_returns(returns_B, grouping="state", method="mean")
    with pytest.raises(ValueError, match="grouping 'category' needs category_B"):
        normalize_returns(returns_B, grouping="category", method="mean", task_B=TASK_B)
    with pytest.raises(ValueError, match="7 groups of one"):
        normalize(returns_B, grouping="state", method="mean", task_B=torch.arange(7))
    with pytest.raises(ValueError, match="grouping must be one of"):
        normalize(returns_B, grouping="inductive", method="mean")
    with pytest.raises(ValueError, match="method must be one of"):
        normalize(returns_B, grouping="batch", method="median")
    with pytest.raises(ValueError, match="must have 7 entries"):
        normalize(returns_B, grouping="state", method="mean", task_B=TASK_B[1:])
    with pytest.raises(ValueError, match="must be finite"):
        normalize(returns_B * math.nan, grouping="batch", method="identity")
