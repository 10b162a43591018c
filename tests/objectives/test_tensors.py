"""The shared parts: what comes after a token, groups, whitening, spreading, and their refusals."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.objectives.tensors import (
    check_comparable,
    check_finite_tokens,
    check_tokens,
    check_vectors,
    discounted_sum,
    group_statistics,
    next_sampled,
    whiten,
)

F, T = False, True


def test_the_next_sampled_token_skips_what_was_not_sampled():
    values_BT = torch.tensor([[1.0, 2.0, math.nan, 4.0, math.nan]])
    mask_BT = torch.tensor([[T, T, F, T, F]])
    following_BT = next_sampled(values_BT, mask_BT=mask_BT, end=9)
    assert following_BT.tolist() == [[2.0, 4.0, 4.0, 9.0, 9.0]]


def test_a_hand_computed_discounted_sum():
    # From the back: 4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3.
    values_BT = torch.tensor([[1.0, 2.0, math.nan, 4.0, math.inf]])
    mask_BT = torch.tensor([[T, T, F, T, F]])
    assert discounted_sum(values_BT, mask_BT=mask_BT, decay=0.5).tolist() == [[3, 4, 0, 4, 0]]
    # A decay of 0 at the second token cuts off the last one: 2; 1 + 0.5 * 2 = 2.
    decay_BT = torch.tensor([[0.5, 0.0, 0.5, 0.5, 0.5]])
    assert discounted_sum(values_BT, mask_BT=mask_BT, decay=decay_BT).tolist() == [[2, 2, 0, 4, 0]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.floats(-100, 100, allow_nan=False)),
        min_size=1,
        max_size=12,
    )
)
def test_group_statistics_equal_those_of_the_standard_library(entries):
    groups = [group for group, _ in entries]
    members = {group: [x for other, x in entries if other == group] for group in groups}
    values_N = torch.tensor([x for _, x in entries], dtype=torch.float64)
    result = group_statistics(values_N, group_N=torch.tensor(groups))
    for i, (group, x) in enumerate(entries):
        own = members[group]
        std = statistics.stdev(own) if len(own) > 1 else 0.0
        assert result.deviation[i].item() == pytest.approx(x - statistics.fmean(own), abs=1e-10)
        assert result.std[i].item() == pytest.approx(std, abs=1e-6)
        assert result.size[i].item() == len(own)


def test_equal_entries_deviate_by_exactly_nothing_in_float32():
    values_N = torch.tensor([0.1] * 7 + [0.7] * 3, dtype=torch.float32)
    result = group_statistics(values_N, group_N=torch.tensor([0] * 7 + [1] * 3))
    assert result.deviation.tolist() == [0.0] * 10
    assert result.std.tolist() == [0.0] * 10


def test_whitened_tokens_have_mean_zero_and_deviation_one():
    mask_BT = torch.rand(5, 8) < 0.6
    values_BT = torch.where(mask_BT, 3 + 2 * torch.randn(5, 8), math.nan)
    white_BT = whiten(values_BT, mask_BT=mask_BT)
    tokens = values_BT[mask_BT].tolist()
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    expected = torch.tensor([(x - mean) / (std + 1e-8) for x in tokens])
    torch.testing.assert_close(white_BT[mask_BT], expected)
    assert white_BT[~mask_BT].count_nonzero() == 0


@pytest.mark.parametrize("num_sampled", [0, 1])
def test_whitening_nothing_or_one_token_gives_zeros(num_sampled):
    mask_BT = torch.arange(6).reshape(2, 3) < num_sampled
    assert whiten(torch.rand(2, 3), mask_BT=mask_BT).count_nonzero() == 0


def test_two_members_can_be_compared_and_one_cannot():
    check_comparable(group_statistics(torch.zeros(3), group_N=torch.tensor([0, 1, 1])))
    with pytest.raises(ValueError, match="at least 2 members to be compared, got 2 groups of one"):
        check_comparable(group_statistics(torch.zeros(2), group_N=torch.tensor([0, 1])))


def test_refusals_name_the_tensor_and_what_was_expected():
    mask_BT = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"rewards_BT must have shape \(2, 3\), got \(2, 4\)"):
        check_tokens(mask_BT, rewards_BT=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="mask_BT must be boolean, got torch.float64"):
        check_tokens(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"both at least 1, got shape \(2, 0\)"):
        check_tokens(mask_BT[:, :0])
    with pytest.raises(ValueError, match="values_BT must be finite .*, not finite: 1"):
        check_finite_tokens(mask_BT, values_BT=torch.tensor([[0, 1, 2], [3, math.nan, 5]]))
    with pytest.raises(ValueError, match="values_BT must have shape"):
        whiten(torch.zeros(2, 4), mask_BT=mask_BT)
    with pytest.raises(ValueError, match="values_BT must be finite"):
        whiten(torch.full((2, 3), math.inf), mask_BT=mask_BT)
    with pytest.raises(ValueError, match="b_B must have 3 entries, got 2"):
        check_vectors(a_B=torch.zeros(3), b_B=torch.zeros(2))
    with pytest.raises(ValueError, match="returns_B must be finite"):
        check_vectors(returns_B=torch.tensor([math.inf]))
    with pytest.raises(ValueError, match="int64 ids, got torch.float64"):
        group_statistics(torch.zeros(2), group_N=torch.zeros(2))
    with pytest.raises(ValueError, match="at least one entry"):
        group_statistics(torch.zeros(0), group_N=torch.zeros(0, dtype=torch.int64))
