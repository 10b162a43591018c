"""REINFORCE and its batch-normalised relatives against plain recomputations."""

import math
import statistics

import pytest
import torch

from ragen_apo.objectives.reinforce import (
    brpo_advantages,
    reinforce_plus_plus_advantages,
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


def test_brpo_equals_its_definition_over_the_batch():
    returns_B = torch.rand(9)
    values = returns_B.tolist()
    mean, std = statistics.fmean(values), statistics.stdev(values)
    expected = [(x - mean) / (std + 1e-6) for x in values]
    assert brpo_advantages(returns_B).tolist() == pytest.approx(expected, abs=1e-12)
    assert brpo_advantages(torch.full((4,), 0.1)).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="at least 2 members"):
        brpo_advantages(torch.tensor([1.0]))


def test_reinforce_plus_plus_is_the_whitened_return_to_go(mask_BT):
    rewards_BT = torch.where(mask_BT, torch.rand(5, 7), math.nan)
    to_go = []
    for row in range(5):
        rewards = rewards_BT[row][mask_BT[row]].tolist()
        to_go += [sum(rewards[t:]) for t in range(len(rewards))]
    advantages_BT = reinforce_plus_plus_advantages(rewards_BT, mask_BT=mask_BT)
    torch.testing.assert_close(advantages_BT[mask_BT], whitened(to_go))
    assert advantages_BT[~mask_BT].count_nonzero() == 0


def test_one_token_cannot_be_normalised_and_has_advantage_zero():
    one_BT = torch.tensor([[1.0]])
    assert reinforce_plus_plus_advantages(one_BT, mask_BT=one_BT > 0).item() == 0


def test_refusals(mask_BT):
    zeros_BT = torch.zeros(5, 7)
    with pytest.raises(ValueError, match="rewards_BT must be finite"):
        reinforce_plus_plus_advantages(zeros_BT / 0, mask_BT=mask_BT)
