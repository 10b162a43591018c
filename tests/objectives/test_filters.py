"""Which groups each strategy keeps, on scores whose answer can be read off, and by properties."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.choices import FilterStrategy
from ragen_apo.config.training import RolloutFilterConfig
from ragen_apo.objectives.filters import filter_groups, select_groups

SCORES = torch.tensor([0.1, 0.4, 0.2, 0.3])  # sum 1; best first: groups 1, 3, 2, 0


def kept(scores, strategy, value):
    settings = RolloutFilterConfig(strategy=strategy, value=float(value))
    keep_G = select_groups(scores, settings=settings)
    return keep_G.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, [1]),
        (0.4, [1]),  # the best one holds 0.4
        (0.41, [1, 3]),
        (0.7, [1, 3]),
        (0.9, [1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_best_groups_that_hold_the_fraction_of_the_sum(value, expected):
    assert kept(SCORES, "top_p", value) == expected


def test_top_fraction_keeps_that_share_of_the_groups_rounded_down_and_at_least_one():
    assert kept(SCORES, "top_fraction", 0.5) == [1, 3]
    assert kept(SCORES, "top_fraction", 0.74) == [1, 3]
    assert kept(SCORES, "top_fraction", 0.1) == [1]
    assert kept(SCORES, "top_fraction", 1.0) == [0, 1, 2, 3]


def test_ties_are_taken_in_order():
    same = torch.full((5,), 0.3)
    assert kept(same, "top_fraction", 0.4) == [0, 1]
    assert kept(same, "top_p", 0.6) == [0, 1, 2]
    assert kept(torch.zeros(5), "top_p", 0.6) == [0, 1, 2]
    many = torch.full((500,), 0.3)  # sorts of a few entries are stable by chance
    assert kept(many, "top_fraction", 0.006) == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=10),
    st.sampled_from([s for s in get_args(FilterStrategy) if s != "none"]),
    st.floats(0, 1),
)
def test_never_empty_never_a_worse_group_before_a_better_and_more_with_larger_p(
    scores, strategy, p
):
    scores_G = torch.tensor(scores, dtype=torch.float64)
    chosen = kept(scores_G, strategy, p)
    assert chosen
    worst_kept = min(scores[g] for g in chosen)
    assert all(scores[g] <= worst_kept for g in range(len(scores)) if g not in chosen)
    assert set(kept(scores_G, strategy, (1 + p) / 2)) >= set(chosen)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=10), st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_holds_the_fraction(scores, p):
    ranked = sorted(scores, reverse=True)
    if sum(scores) == 0:
        ranked = [1.0] * len(scores)
    chosen = kept(torch.tensor(scores, dtype=torch.float64), "top_p", p)
    needed = p * sum(ranked)
    assert sum(ranked[: len(chosen)]) >= needed * (1 - 1e-5)
    assert sum(ranked[: len(chosen) - 1]) < needed or len(chosen) == 1


# Whole trajectories.

GROUP_B = torch.tensor([0, 1, 0, 2, 1, 2])
RETURNS_B = torch.tensor(
    [0.0, 0.1, 1.0, 0.1, 0.9, 0.1], dtype=torch.float64
)  # group 2 has no variance


def run(returns_B=RETURNS_B, **options):
    settings = RolloutFilterConfig(**{"strategy": "top_p", **options})
    return filter_groups(returns_B, group_B=GROUP_B, settings=settings)


def test_top_p_weighs_by_standard_deviations():
    # Groups 0, 1, 2: std 0.707, 0.566, 0. As variances, 0.5 of 0.82, one group would hold 58%.
    for share, kept_G in (
        (0.5, [True, False, False]),
        (0.58, [True, True, False]),  # 0.707 / 1.273 = 0.56
        (1.0, [True, True, True]),
    ):
        assert run(value=share, zero_variance="keep").keep_G.tolist() == kept_G


def test_half_of_three_groups_is_one_of_the_two_that_vary():
    result = run(strategy="top_fraction", value=0.5)
    assert result.keep_G.tolist() == [True, False, False]
    assert result.constant_G.tolist() == [False, False, True]


def test_groups_without_variance_are_dropped_or_kept_as_asked():
    assert run(value=1.0, zero_variance="drop").keep_G.tolist() == [True, True, False]
    assert run(value=1.0, zero_variance="keep").keep_G.all()
    assert run(strategy="none").keep_G.all()


def test_without_a_strategy_all_are_kept_and_none_is_called_constant():
    kept = filter_groups(
        torch.zeros(3), group_B=torch.tensor([0, 1, 1]), settings=RolloutFilterConfig()
    )
    assert kept.keep_G.tolist() == [True, True] and kept.constant_G.tolist() == [False, False]


def test_everything_is_dropped_where_nothing_varies():
    result = run(returns_B=torch.full((6,), 0.1, dtype=torch.float32))
    assert not result.keep_G.any()
    kept_anyway = run(returns_B=torch.full((6,), 0.1), zero_variance="keep", value=0.5)
    assert kept_anyway.keep_G.tolist() == [True, True, False]


def test_a_group_of_one_has_no_variance():
    result = filter_groups(
        torch.tensor([3.0]),
        group_B=torch.tensor([0]),
        settings=RolloutFilterConfig(strategy="top_p"),
    )
    assert result.constant_G.tolist() == [True]
    assert not result.keep_G.any()


def test_refusals():
    with pytest.raises(ValueError, match="less than or equal to 1"):
        RolloutFilterConfig(strategy="top_p", value=1.5)
    with pytest.raises(ValueError, match="must be finite"):
        kept(torch.tensor([math.nan]), "top_fraction", 0.5)
    with pytest.raises(ValueError, match="at least one entry"):
        kept(torch.zeros(0), "top_fraction", 0.5)
