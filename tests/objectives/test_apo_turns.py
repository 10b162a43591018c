"""A*-PO over two turns: where the value of a trajectory splits into turns, and where it does not.

Turn residuals, with V(s) = 0 after the end:

    A_h = (r_h + V(s_{h+1}) - V(s_h)) - beta Delta_h

In a deterministic tree they add up to the residual of the trajectory. In a stochastic environment
the log-mean-exp over trajectories tilts the environment's luck as well, so the residual of a
trajectory is right on-policy only, while that of a turn, with soft values that take the expectation
over next states inside, is right on any data.
"""

import functools
import itertools
import math

import pytest
import torch

from ragen_apo.objectives.apo import regression_loss, residual
from ragen_apo.values.estimator import soft_value

BETA = 0.2
LOG_HALF = math.log(0.5)


def turn_residuals(log_ratio_BH, *, rewards_BH, values_BH, beta2):
    """A [B, H] of each turn; `values_BH` holds V of the state in which the turn was written."""
    end_B1 = torch.zeros(len(values_BH), 1)
    next_values_BH = torch.cat([values_BH[:, 1:], end_B1], dim=1)
    return residual(
        log_ratio_BH.flatten(),
        returns_B=(rewards_BH + next_values_BH).flatten(),
        v_star_B=values_BH.flatten(),
        beta2=beta2,
    ).reshape(log_ratio_BH.shape)


class Tree:
    """Deterministic: three actions, then three more; every step has a random reward."""

    def __init__(self):
        self.first_rewards, self.second_rewards = torch.rand(3), torch.rand(3, 3)
        self.paths = list(itertools.product(range(3), range(3)))
        self.rewards_BH = torch.stack(
            [torch.stack([self.first_rewards[a], self.second_rewards[a, b]]) for a, b in self.paths]
        )

    def soft_values(self):
        """V [B, H] by backward induction under a uniform reference."""
        second = [soft_value(rewards.numpy(), beta=BETA) for rewards in self.second_rewards]
        first = soft_value((self.first_rewards + torch.tensor(second)).numpy(), beta=BETA)
        return torch.tensor([[first, second[a]] for a, _ in self.paths])


def test_in_a_tree_the_value_of_the_root_is_the_soft_value_over_trajectories():
    tree = Tree()
    over_trajectories = soft_value(tree.rewards_BH.sum(1).numpy(), beta=BETA)
    assert tree.soft_values()[0, 0].item() == pytest.approx(over_trajectories, abs=1e-12)


@pytest.mark.parametrize("values", ["soft", "arbitrary"])
def test_turn_residuals_add_up_to_the_residual_of_the_trajectory(values):
    tree = Tree()
    values_BH = tree.soft_values()
    if values == "arbitrary":
        values_BH = values_BH + torch.rand_like(values_BH)
    log_ratio_BH = torch.randn(9, 2)
    turns_BH = turn_residuals(
        log_ratio_BH, rewards_BH=tree.rewards_BH, values_BH=values_BH, beta2=BETA
    )
    whole_B = residual(
        log_ratio_BH.sum(1), returns_B=tree.rewards_BH.sum(1), v_star_B=values_BH[:, 0], beta2=BETA
    )
    torch.testing.assert_close(turns_BH.sum(1), whole_B, rtol=0, atol=1e-12)


def test_at_the_optimum_of_a_tree_every_turn_residual_is_zero():
    tree = Tree()
    values_BH = tree.soft_values()
    next_values_BH = torch.cat([values_BH[:, 1:], torch.zeros(9, 1)], dim=1)
    optimal_log_ratio_BH = (tree.rewards_BH + next_values_BH - values_BH) / BETA
    # It is a policy: its probabilities, 1/3 exp(log-ratio), sum to one.
    assert (optimal_log_ratio_BH.sum(1).exp() / 9).sum().item() == pytest.approx(1, abs=1e-12)
    turns_BH = turn_residuals(
        optimal_log_ratio_BH, rewards_BH=tree.rewards_BH, values_BH=values_BH, beta2=BETA
    )
    torch.testing.assert_close(turns_BH, torch.zeros(9, 2), rtol=0, atol=1e-12)


class LuckyMachine:
    """Stochastic: play safe (0.4 now) or gamble; luck decides the state; one more choice there.

    A path is (first action, state, second action); the reference is uniform over actions.
    """

    def __init__(self):
        self.chance = torch.tensor([[0.9, 0.1], [0.3, 0.7]])  # P(state | first action)
        self.first_rewards = torch.tensor([0.4, 0.0])
        self.second_rewards = torch.tensor([[0.0, 0.1], [0.2, 1.0]])  # [state, second action]
        paths = list(itertools.product(range(2), range(2), range(2)))
        self.first, self.state, self.second = torch.tensor(paths).T
        self.luck = self.chance[self.first, self.state]
        self.rewards_BH = torch.stack(
            [self.first_rewards[self.first], self.second_rewards[self.state, self.second]], dim=1
        )
        self.second_values = torch.tensor(
            [soft_value(rewards.numpy(), beta=BETA) for rewards in self.second_rewards]
        )
        self.first_q = self.first_rewards + self.chance @ self.second_values
        self.first_value = torch.tensor(soft_value(self.first_q.numpy(), beta=BETA))
        self.values_BH = torch.stack(
            [self.first_value.expand(8), self.second_values[self.state]], dim=1
        )
        returns_B = self.rewards_BH.sum(1)
        self.trajectory_value = BETA * torch.logsumexp(
            self.luck.log() + 2 * LOG_HALF + returns_B / BETA, dim=0
        )

    def logprobs(self, first_logits, second_logits):
        return torch.stack(
            [
                first_logits.log_softmax(0)[self.first],
                second_logits.log_softmax(1)[self.state, self.second],
            ],
            dim=1,
        )

    def optimal_logprobs(self):
        """pi*(a | s) = pi_ref exp((Q - V) / beta) at each state."""
        return self.logprobs(self.first_q / BETA, self.second_rewards / BETA)

    def train(self, loss, *, on_policy):
        """Descends the exact expected loss; KL(pi* || pi) over paths at the end."""
        parameters = [torch.zeros(2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
        optimizer = torch.optim.Adam(parameters, lr=0.2)
        for _ in range(400):
            logprobs_BH = self.logprobs(*parameters)
            played_B = logprobs_BH.sum(1).detach().exp() if on_policy else 1 / 4
            weights_B = self.luck * played_B
            optimizer.zero_grad()
            (weights_B * loss(logprobs_BH)).sum().backward()
            optimizer.step()
        learned_B = self.logprobs(*parameters).sum(1).detach()
        optimal_B = self.optimal_logprobs().sum(1)
        return (self.luck * optimal_B.exp() * (optimal_B - learned_B)).sum().item()

    def trajectory_loss(self, logprobs_BH, *, value):
        left_B = residual(
            (logprobs_BH - LOG_HALF).sum(1),
            returns_B=self.rewards_BH.sum(1),
            v_star_B=value.expand(8),
            beta2=BETA,
        )
        return regression_loss(left_B, beta2=BETA)

    def turn_loss(self, logprobs_BH):
        left_BH = turn_residuals(
            logprobs_BH - LOG_HALF, rewards_BH=self.rewards_BH, values_BH=self.values_BH, beta2=BETA
        )
        return regression_loss(left_BH, beta2=BETA).sum(1)


def test_the_value_over_trajectories_counts_luck_as_skill():
    machine = LuckyMachine()
    assert machine.first_value.item() == pytest.approx(0.584, abs=1e-3)
    assert machine.trajectory_value.item() == pytest.approx(0.815, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "off_policy_kl"),
    [("over trajectories", 0.61), ("by backward induction", 0.16)],
)
def test_with_luck_the_trajectory_loss_is_right_on_policy_and_wrong_on_other_data(
    kind, off_policy_kl
):
    machine = LuckyMachine()
    value = machine.trajectory_value if kind == "over trajectories" else machine.first_value
    loss = functools.partial(machine.trajectory_loss, value=value)
    assert machine.train(loss, on_policy=True) < 1e-10
    assert machine.train(loss, on_policy=False) == pytest.approx(off_policy_kl, abs=5e-3)


@pytest.mark.slow
def test_with_luck_the_turn_loss_with_soft_values_is_right_on_any_data():
    machine = LuckyMachine()
    assert machine.train(machine.turn_loss, on_policy=True) < 1e-10
    assert machine.train(machine.turn_loss, on_policy=False) < 1e-10
