"""REINFORCE and its batch-normalised relatives against plain recomputations."""

import math
import statistics

import pytest
import torch

from ragen_apo.objectives.policy_gradient import Aggregation, aggregate
from ragen_apo.objectives.reinforce import (
    brpo_advantages,
    reinforce_advantages,
    reinforce_loss,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)


@pytest.fixture(name="mask_BT")
def five_sequences():
    """Five sequences with holes; the last one has no token."""
    mask_BT = torch.rand(5, 7) < 0.6
    mask_BT[4] = False
    return mask_BT


def whitened(values):
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return torch.tensor([(x - mean) / (std + 1e-8) for x in values])


def test_a_hand_computed_loss():
    logprobs_BT = torch.tensor([[-0.5, math.nan, -2.0]], requires_grad=True)
    loss_BT = reinforce_loss(
        logprobs_BT,
        advantages_BT=torch.tensor([[2.0, math.nan, -1.0]]),
        mask_BT=torch.tensor([[True, False, True]]),
    )
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs_BT)
    assert loss_BT.tolist() == [[1.0, 0.0, -2.0]]  # -2 * -0.5 and 1 * -2
    assert gradient_BT.tolist() == [[-2.0, 0.0, 1.0]]


def test_micro_batches_add_up(mask_BT):
    logprobs_BT, advantages_BT = -torch.rand(5, 7), torch.randn(5, 7)

    def part(rows):
        loss_BT = reinforce_loss(
            logprobs_BT[rows], advantages_BT=advantages_BT[rows], mask_BT=mask_BT[rows]
        )
        return aggregate(
            loss_BT,
            mask_BT=mask_BT[rows],
            aggregation="token_mean",
            num_sequences=5,
            num_tokens=int(mask_BT.sum()),
        )

    torch.testing.assert_close(part(slice(0, 2)) + part(slice(2, 5)), part(slice(0, 5)))


@pytest.mark.parametrize("baseline", [0.0, 0.7, -5.0])
def test_no_constant_baseline_biases_the_gradient(baseline):
    # Exact over three arms: sum_a pi(a) grad (-A log pi(a)) = -grad E[R].
    pays = torch.tensor([0.0, 0.3, 1.0])
    logits = torch.tensor([0.2, -0.4, 0.5], requires_grad=True)
    logprobs = logits.log_softmax(0)
    advantages_B = reinforce_advantages(pays, baseline_B=torch.full((3,), baseline))
    loss_BT = reinforce_loss(
        logprobs[:, None],
        advantages_BT=advantages_B[:, None],
        mask_BT=torch.ones(3, 1, dtype=torch.bool),
    )
    expected_loss = (logprobs.exp().detach() * loss_BT[:, 0]).sum()
    (gradient,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    (true,) = torch.autograd.grad((logprobs.exp() * pays).sum(), logits)
    torch.testing.assert_close(gradient, -true, rtol=0, atol=1e-12)


def test_brpo_equals_its_definition_over_the_batch():
    returns_B = torch.rand(9)
    values = returns_B.tolist()
    mean, std = statistics.fmean(values), statistics.stdev(values)
    expected = [(x - mean) / (std + 1e-6) for x in values]
    assert brpo_advantages(returns_B).tolist() == pytest.approx(expected, abs=1e-12)
    assert brpo_advantages(torch.full((4,), 0.1)).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="at least 2 members"):
        brpo_advantages(torch.tensor([1.0]))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_reinforce_plus_plus_is_the_whitened_return_to_go(mask_BT, gamma):
    rewards_BT = torch.where(mask_BT, torch.rand(5, 7), math.nan)
    to_go = []
    for row in range(5):
        rewards = rewards_BT[row][mask_BT[row]].tolist()
        to_go += [
            sum(gamma**j * reward for j, reward in enumerate(rewards[t:]))
            for t in range(len(rewards))
        ]
    advantages_BT = reinforce_plus_plus_advantages(rewards_BT, mask_BT=mask_BT, gamma=gamma)
    torch.testing.assert_close(advantages_BT[mask_BT], whitened(to_go))
    assert advantages_BT[~mask_BT].count_nonzero() == 0


def test_reinforce_plus_plus_baseline_whitens_over_tokens_so_long_sequences_count_more(mask_BT):
    returns_B, group_B = torch.rand(5), torch.tensor([0, 1, 0, 1, 1])
    means = {group: statistics.fmean(returns_B[group_B == group].tolist()) for group in (0, 1)}
    deviations = [
        returns_B[row].item() - means[int(group_B[row])]
        for row in range(5)
        for _ in range(int(mask_BT[row].sum()))
    ]
    advantages_BT = reinforce_plus_plus_baseline_advantages(
        returns_B, group_B=group_B, mask_BT=mask_BT
    )
    torch.testing.assert_close(advantages_BT[mask_BT], whitened(deviations))
    assert advantages_BT[~mask_BT].count_nonzero() == 0


def test_one_token_cannot_be_normalised_and_has_advantage_zero():
    one_BT = torch.tensor([[1.0]])
    assert reinforce_plus_plus_advantages(one_BT, mask_BT=one_BT > 0).item() == 0


def test_refusals(mask_BT):
    zeros_BT = torch.zeros(5, 7)
    with pytest.raises(ValueError, match="gamma must lie in"):
        reinforce_plus_plus_advantages(zeros_BT, mask_BT=mask_BT, gamma=2.0)
    with pytest.raises(ValueError, match="rewards_BT must be finite"):
        reinforce_plus_plus_advantages(zeros_BT / 0, mask_BT=mask_BT)
    with pytest.raises(ValueError, match=r"advantages_BT must have shape \(5, 7\)"):
        reinforce_loss(zeros_BT, advantages_BT=zeros_BT[:1], mask_BT=mask_BT)
    with pytest.raises(ValueError, match="baseline_B must have 3 entries, got 1"):
        reinforce_advantages(torch.zeros(3), baseline_B=torch.zeros(1))
    with pytest.raises(ValueError, match="5 groups of one"):
        reinforce_plus_plus_baseline_advantages(
            torch.zeros(5), group_B=torch.arange(5), mask_BT=mask_BT
        )
