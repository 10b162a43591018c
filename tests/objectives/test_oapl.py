"""OAPL on bandits: which policy its loss has as its minimum, on samples of a fixed lagged policy.

One decision, one token, five arms that pay 0, 1/4, 1/2, 3/4 and 1. What was sampled holds each arm
as often as the lagged policy says, as in the limit of many rollouts, and is used again and again.
"""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given

from ragen_apo.objectives.apo import ApoSettings, apo_loss
from ragen_apo.values.estimator import soft_value

SHARES = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1], dtype=torch.float64)
RETURNS = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
ARM_B = torch.arange(5).repeat_interleave((10 * SHARES).round().long())


def optimum(*, beta):
    """log pi*, with pi* proportional to pi_lag exp(R / beta)."""
    return (SHARES.log() + RETURNS / beta).log_softmax(0)


def kl(first, second):
    return (first.exp() * (first - second)).sum().item()


def train(loss_of, *, num_passes=1000):
    """Gradient descent from the lagged policy on the same samples."""
    logits = SHARES.log().requires_grad_()
    for _ in range(num_passes):
        (gradient,) = torch.autograd.grad(loss_of(logits.log_softmax(0)), logits)
        logits = (logits - gradient).detach().requires_grad_()
    return logits.log_softmax(0).detach()


def oapl(*, beta1, beta2):
    value = soft_value(RETURNS[ARM_B].tolist(), beta=beta1)

    def loss_of(logprobs):
        return apo_loss(
            logprobs[ARM_B, None],
            reference_logprobs_BT=SHARES.log()[ARM_B, None],
            mask_BT=torch.ones(len(ARM_B), 1, dtype=torch.bool),
            returns_B=RETURNS[ARM_B],
            v_star_B=torch.full((len(ARM_B),), value),
            settings=ApoSettings(beta2=beta2),
            num_sequences=len(ARM_B),
        ).loss

    return loss_of


def reinforce(logprobs):
    """What is right on samples of the policy itself alone: log pi times R minus the mean."""
    returns_B = RETURNS[ARM_B]
    return -((returns_B - returns_B.mean()) * logprobs[ARM_B]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_many_passes_over_the_same_samples_reach_the_optimum_with_one_beta(beta):
    policy = train(oapl(beta1=beta, beta2=beta))
    assert kl(policy, optimum(beta=beta)) < 1e-10
    assert kl(SHARES.log(), optimum(beta=beta)) > 0.05


@pytest.mark.slow
def test_an_estimator_for_new_samples_alone_runs_away_on_the_same_samples():
    # It has no minimum: what earns less than the mean is pushed down for ever.
    for beta in (0.3, 1.0):
        assert kl(train(reinforce), optimum(beta=beta)) > 0.4
    worst = [train(reinforce, num_passes=passes)[0].item() for passes in (100, 300, 1000)]
    assert worst == sorted(worst, reverse=True) and worst[-1] < -100


@pytest.mark.slow
def test_a_smaller_beta2_sharpens_the_optimum_and_keeps_the_order_of_returns():
    # The numbers of docs/algorithm.md.
    policy = train(oapl(beta1=0.3, beta2=0.1)).exp()
    gain = policy / SHARES
    assert gain.tolist() == sorted(gain.tolist())
    best = {beta: optimum(beta=beta)[-1].exp().item() for beta in (0.3, 0.1)}
    assert (best[0.3], policy[-1].item(), best[0.1]) == pytest.approx(
        (0.472, 0.616, 0.912), abs=5e-4
    )


@pytest.mark.parametrize(
    ("beta1", "size", "gradient"), [(0.5, 4, -0.0053), (0.5, 8, 0.0026), (3, 4, 0.0066)]
)
def test_a_small_group_may_prefer_the_lower_mean_of_graded_returns(beta1, size, gradient):
    """0.55 at once, or 0 and 1.2 alike: the mean return rises by p (1 - p) (0.6 - 0.55) = 0.0125.

    By the logit of going on, whose score is 1/2 or -1/2; all groups of new samples.
    """
    returns, chances = np.array([0.55, 0.0, 1.2]), np.array([0.5, 0.25, 0.25])
    scores = np.array([-0.5, 0.5, 0.5])
    assert chances @ (returns * scores) == pytest.approx(0.0125)
    found = 0.0
    for group in itertools.combinations_with_replacement(range(3), size):
        counts = np.bincount(group, minlength=3)
        ways = math.factorial(size) / math.prod(map(math.factorial, counts))
        earned = returns[list(group)]
        advantages = earned - soft_value(earned, beta=beta1)
        found += ways * (chances**counts).prod() * (advantages * scores[list(group)]).mean()
    assert found == pytest.approx(gradient, abs=5e-5)


groups = st.lists(st.floats(-2, 2), min_size=2, max_size=8)


@pytest.mark.slow
@given(groups, st.floats(0.2, 2), st.floats(1.1, 4))
def test_the_targets_of_a_group_are_those_of_a_distribution_with_one_beta_alone(
    returns, beta, factor
):
    assume(np.std(returns) > 0.05)

    def total(beta2):
        return np.exp((np.array(returns) - soft_value(returns, beta=beta)) / beta2).mean()

    assert total(beta) == pytest.approx(1, abs=1e-9)
    assert total(beta / factor) > 1 > total(beta * factor)
