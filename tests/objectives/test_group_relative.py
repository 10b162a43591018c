"""Group-relative advantages against plain recomputations, and which of them are unbiased."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.objectives.group_relative import (
    dr_grpo_advantages,
    gigpo_advantages,
    grpo_advantages,
    rloo_advantages,
)

returns = st.floats(-10, 10, allow_nan=False)
# At least two of group 0, so that there is something to compare; the rest of any size and order.
groups = st.lists(st.tuples(st.integers(0, 3), returns), max_size=12).flatmap(
    lambda rest: st.permutations([(0, 1.0), (0, -2.0), *rest])
)


def tensors(entries):
    group_B = torch.tensor([group for group, _ in entries])
    return torch.tensor([x for _, x in entries], dtype=torch.float64), group_B


def slow_advantages(entries, *, eps=None):
    """R - mean of the group, over std + eps if there is an eps."""
    advantages = []
    for group, x in entries:
        own = [other for member, other in entries if member == group]
        deviation = x - statistics.fmean(own)
        if eps is not None:
            deviation /= (statistics.stdev(own) if len(own) > 1 else 0.0) + eps
        advantages.append(deviation)
    return advantages


@settings(max_examples=40, deadline=None)
@given(groups)
def test_grpo_and_dr_grpo_equal_their_definitions(entries):
    returns_B, group_B = tensors(entries)
    eps = 1e-3
    advantages_B = grpo_advantages(returns_B, group_B=group_B, eps=eps)
    assert advantages_B.tolist() == pytest.approx(slow_advantages(entries, eps=eps), abs=1e-6)
    unscaled_B = dr_grpo_advantages(returns_B, group_B=group_B)
    assert unscaled_B.tolist() == pytest.approx(slow_advantages(entries), abs=1e-10)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_rloo_equals_its_definition(entries):
    entries = [*entries, *entries]  # no group of one
    returns_B, group_B = tensors(entries)
    expected = []
    for i, (group, x) in enumerate(entries):
        others = [y for j, (member, y) in enumerate(entries) if member == group and j != i]
        expected.append(x - statistics.fmean(others))
    assert rloo_advantages(returns_B, group_B=group_B).tolist() == pytest.approx(expected, abs=1e-9)


def test_a_group_of_one_learns_nothing_and_is_an_error_where_it_must_be_left_out():
    returns_B, group_B = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 3])
    # std of (1, 0) is sqrt(1/2), so 0.5 / sqrt(0.5) = sqrt(0.5).
    expected = [math.sqrt(0.5), -math.sqrt(0.5), 0.0]
    assert grpo_advantages(returns_B, group_B=group_B, eps=0.0).tolist()[:2] == pytest.approx(
        expected[:2]
    )
    assert grpo_advantages(returns_B, group_B=group_B).tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"got one for group 3 \(and 0 more\)"):
        rloo_advantages(returns_B, group_B=group_B)
    with pytest.raises(ValueError, match="got 3 groups of one"):
        grpo_advantages(returns_B, group_B=torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_returns_have_advantages_of_exactly_zero(dtype):
    returns_B = torch.tensor([0.1] * 5 + [0.3] * 3, dtype=dtype)
    group_B = torch.tensor([0] * 5 + [1] * 3)
    for advantages in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        assert advantages(returns_B, group_B=group_B).tolist() == [0.0] * 8


def test_shifting_and_scaling_the_returns_of_a_task():
    returns_B, group_B = torch.rand(8), torch.tensor([0, 1] * 4)
    moved_B = torch.where(group_B == 0, 3 * returns_B + 5, returns_B)
    torch.testing.assert_close(
        grpo_advantages(returns_B, group_B=group_B, eps=0.0),
        grpo_advantages(moved_B, group_B=group_B, eps=0.0),
    )
    torch.testing.assert_close(
        dr_grpo_advantages(moved_B, group_B=group_B),
        dr_grpo_advantages(returns_B, group_B=group_B) * torch.where(group_B == 0, 3.0, 1.0),
    )


@pytest.mark.parametrize(("name", "share"), [("rloo", 1.0), ("dr_grpo", 2 / 3)])
def test_leaving_one_out_is_unbiased_and_the_mean_of_all_shrinks_by_one_over_n(name, share):
    # Exact: all 27 ways to draw a group of three from three arms.
    advantages = {"rloo": rloo_advantages, "dr_grpo": dr_grpo_advantages}[name]
    pays = torch.tensor([0.0, 0.3, 1.0])
    logits = torch.tensor([0.2, -0.4, 0.5], requires_grad=True)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logprobs.exp() * pays).sum(), logits, retain_graph=True)
    expected = torch.zeros(3)
    for arms in itertools.product(range(3), repeat=3):
        arm_B = torch.tensor(arms)
        advantages_B = advantages(pays[arm_B], group_B=torch.zeros(3, dtype=torch.int64))
        loss_B = -advantages_B * logprobs[arm_B]
        chance = logprobs[arm_B].sum().exp().detach()
        expected -= torch.autograd.grad(chance * loss_B.mean(), logits, retain_graph=True)[0]
    torch.testing.assert_close(expected, share * true, rtol=0, atol=1e-12)


def gigpo_batch(seed):
    """Three tasks with unequal numbers of rollouts, one to four turns each, in mixed order."""
    draws = torch.Generator().manual_seed(seed)
    group_B = torch.tensor([2, 0, 2, 1, 0, 0])
    num_turns_B = torch.randint(1, 5, (6,), generator=draws)
    trajectory_N = torch.arange(6).repeat_interleave(num_turns_B)
    trajectory_N = trajectory_N[torch.randperm(len(trajectory_N), generator=draws)]
    return {
        "returns_B": torch.rand(6, generator=draws),
        "group_B": group_B,
        "trajectory_N": trajectory_N,
        "state_N": torch.randint(0, 2, (len(trajectory_N),), generator=draws),
        "returns_to_go_N": torch.rand(len(trajectory_N), generator=draws),
    }


@pytest.mark.parametrize("seed", range(5))
def test_gigpo_equals_its_definition(seed):
    batch, eps = gigpo_batch(seed), 1e-6
    advantages_N = gigpo_advantages(**batch)
    tasks, owner = batch["group_B"].tolist(), batch["trajectory_N"].tolist()
    episode = slow_advantages(list(zip(tasks, batch["returns_B"].tolist(), strict=True)), eps=eps)
    anchors = [(tasks[i], state) for i, state in zip(owner, batch["state_N"].tolist(), strict=True)]
    turn = slow_advantages(
        list(zip(anchors, batch["returns_to_go_N"].tolist(), strict=True)), eps=eps
    )
    expected = [episode[i] + extra for i, extra in zip(owner, turn, strict=True)]
    assert advantages_N.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_state_that_was_seen_once_adds_nothing_and_the_same_id_elsewhere_is_another_state():
    # Two tasks of two rollouts, one turn each; state 5 occurs once in each task, state 6 twice.
    advantages_N = gigpo_advantages(
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        group_B=torch.tensor([0, 0, 1, 1]),
        returns_to_go_N=torch.tensor([1.0, 0.0, 0.2, 0.7, 0.9, 0.1]),
        trajectory_N=torch.tensor([0, 1, 2, 3, 2, 3]),
        state_N=torch.tensor([5, 4, 5, 4, 6, 6]),
    )
    # Of two numbers each is sqrt(1/2) standard deviations from their mean: once for the episode,
    # and in state 6 once more for the turn.
    once = math.sqrt(0.5)
    expected = [once, -once, once, -once, 2 * once, -2 * once]
    assert advantages_N.tolist() == pytest.approx(expected, abs=1e-5)


def test_refusals():
    batch = gigpo_batch(1)
    for wrong, message in (
        ({"trajectory_N": batch["trajectory_N"] + 1}, "must index the 6 returns"),
        ({"state_N": batch["state_N"].double()}, "state_N must hold int64 ids"),
        ({"state_N": batch["state_N"][1:]}, "state_N must have"),
        ({"returns_B": torch.full((6,), math.nan)}, "must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            gigpo_advantages(**{**batch, **wrong})
    with pytest.raises(ValueError, match="group_N must have 2 entries, got 3"):
        grpo_advantages(torch.zeros(2), group_B=torch.zeros(3, dtype=torch.int64))
