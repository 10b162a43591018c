"""A*-PO on a bandit with five arms: what converges where, and what a wrong V* does.

One decision, one token: the smallest place where the closed form can be reached. The reference is
uniform, the arms pay 0, 1/4, 1/2, 3/4 and 1, and beta = 0.3.
"""

from typing import get_args

import pytest
import torch

from ragen_apo.choices import LossForm
from ragen_apo.objectives.apo import ApoSettings, apo_loss, regression_loss, residual
from tests.sweeps import quick_first

BETA = 0.3


@pytest.fixture
def arms():
    """Log-probabilities of the reference, returns, V*, and log-probabilities of the optimum."""
    reference = torch.full((5,), 1 / 5).log()
    returns = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    v_star = BETA * torch.logsumexp(reference + returns / BETA, dim=0)
    return reference, returns, v_star, reference + (returns - v_star) / BETA


def kl(first, second):
    return (first.exp() * (first - second)).sum().item()


def train_on_samples(arms, *, wrong_by=0.0, form="regression", num_steps=600, rate=3.0):
    """Plain SGD at a constant rate on 16 sampled arms per step."""
    reference, returns, v_star, _ = arms
    logits = torch.zeros(5, requires_grad=True)
    draws = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        logprobs = logits.log_softmax(0)
        arm_B = torch.multinomial(logprobs.detach().exp(), 16, replacement=True, generator=draws)
        output = apo_loss(
            logprobs[arm_B, None],
            reference_logprobs_BT=reference[arm_B, None],
            mask_BT=torch.ones(16, 1, dtype=torch.bool),
            returns_B=returns[arm_B],
            v_star_B=(v_star + wrong_by).expand(16),
            settings=ApoSettings(beta2=BETA, loss=form),
            num_sequences=16,
        )
        (gradient,) = torch.autograd.grad(output.loss, logits)
        logits = (logits - rate * gradient).detach().requires_grad_()
    return logits.log_softmax(0).detach()


def best_of_two(chances):
    """How often each arm is the better of two; the arms are in the order of their returns."""
    up_to = chances.cumsum(0)
    return up_to**2 - (up_to - chances) ** 2


def train_exactly(
    arms, *, wrong_by, on_policy, choice=lambda chances: chances, num_steps=300, rate=0.1
):
    """Descends the expected loss over arms drawn from the policy or the reference."""
    reference, returns, v_star, _ = arms
    logits = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=rate)
    for _ in range(num_steps):
        logprobs = logits.log_softmax(0)
        left = residual(
            logprobs - reference,
            returns_B=returns,
            v_star_B=(v_star + wrong_by).expand(5),
            beta2=BETA,
        )
        drawn_from = choice((logprobs if on_policy else reference).detach().exp())
        expected_loss = (drawn_from * regression_loss(left, beta2=BETA)).sum()
        optimizer.zero_grad()
        expected_loss.backward()
        optimizer.step()
    return logits.log_softmax(0).detach()


@pytest.mark.parametrize("form", quick_first(get_args(LossForm)))
def test_sampled_sgd_at_a_constant_rate_reaches_the_optimum_with_the_exact_value(arms, form):
    # The residual is 0 for every arm at the optimum, so the noise of sampling dies out on the way.
    assert kl(train_on_samples(arms, form=form), arms[-1]) < 1e-10


def test_rounds_with_new_references_end_where_one_at_a_smaller_beta_does(arms):
    """Three rounds at beta, each from the policy of the one before; and one at beta / 3."""
    reference, returns, _, policy = arms
    for _ in range(2):
        policy = (policy + returns / BETA).log_softmax(0)
    v_star = BETA / 3 * torch.logsumexp(reference + 3 * returns / BETA, dim=0)
    left = residual(
        policy - reference, returns_B=returns, v_star_B=v_star.expand(5), beta2=BETA / 3
    )
    torch.testing.assert_close(left, torch.zeros(5), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_wrong_value_leaves_noise_at_the_optimum_that_a_constant_rate_cannot_remove(arms):
    assert kl(train_on_samples(arms, wrong_by=0.3), arms[-1]) > 1e-6


@pytest.mark.parametrize("wrong_by", [0.0, 0.3, -0.3])
def test_on_policy_a_wrong_value_does_not_move_the_optimum(arms, wrong_by):
    assert kl(train_exactly(arms, wrong_by=wrong_by, on_policy=True), arms[-1]) < 1e-10


def test_off_policy_the_exact_value_reaches_the_optimum(arms):
    assert kl(train_exactly(arms, wrong_by=0.0, on_policy=False), arms[-1]) < 1e-10


@pytest.mark.parametrize(("wrong_by", "moved"), [(0.3, 0.139), (-0.3, 0.073)])
def test_off_policy_a_wrong_value_moves_the_optimum(arms, wrong_by, moved):
    policy = train_exactly(arms, wrong_by=wrong_by, on_policy=False)
    assert kl(policy, arms[-1]) == pytest.approx(moved, abs=5e-4)


@pytest.mark.parametrize(("wrong_by", "low", "high"), [(0.0, 0, 1e-3), (0.3, 0.4, 0.5)])
def test_training_on_the_best_of_two_ends_at_the_optimum_with_the_exact_value_alone(
    arms, wrong_by, low, high
):
    policy = train_exactly(arms, wrong_by=wrong_by, on_policy=True, choice=best_of_two)
    assert low <= kl(policy, arms[-1]) < high


def test_a_policy_gradient_over_the_best_of_two_is_not_that_of_the_objective(arms):
    """E[(R - beta log ratio) grad log pi] over what was chosen, at the reference itself."""
    reference, returns, _, _ = arms
    logits = torch.zeros(5, requires_grad=True)
    logprobs = logits.log_softmax(0)
    found = {}
    for name, chances in (("all", reference.exp()), ("chosen", best_of_two(reference.exp()))):
        mean = (chances * returns).sum()
        surrogate = (chances * (returns - mean) * logprobs).sum()
        (found[name],) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    assert found["all"].tolist() == pytest.approx([(r - 0.5) / 5 for r in returns.tolist()])
    cosine = torch.cosine_similarity(found["all"], found["chosen"], dim=0)
    assert cosine.item() == pytest.approx(0.821, abs=5e-4)
