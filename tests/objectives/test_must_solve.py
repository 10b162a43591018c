"""Every advantage estimator with its loss must train a tabular policy to near the optimum.

Two tasks with exactly known optima and a softmax over a table of logits:

    bandit     one turn, three arms that pay 1 with probability 0.1, 0.5 and 0.8: optimum 0.8
    corridor   two turns, two states; in the first turn action 1 moves to the second state and
               action 0 stays for 0.3 at once; in the second turn action 1 pays 0.2 in the first
               state and 1 in the second, action 0 nothing: optimum 1, greedy 0.5

Each response is the action and an end token of probability 1, and between turns stand positions
that nobody sampled, filled with NaN. The control trains on returns that were shuffled over the
batch: it drifts, sometimes by luck to the right arm, so it is the mean over three seeds that must
stay clear of the optimum.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from ragen_apo.objectives.apo import ApoSettings, apo_loss
from ragen_apo.objectives.policy_gradient import aggregate, clipped_policy_loss, penalize_rewards
from ragen_apo.objectives.ppo import bi_level_gae, clipped_value_loss, gae
from ragen_apo.objectives.tensors import sampled_or_zero, token_log_ratio, whiten
from ragen_apo.training.algorithms.brpo import Brpo
from ragen_apo.training.algorithms.dr_grpo import DrGrpo
from ragen_apo.training.algorithms.gigpo import Gigpo
from ragen_apo.training.algorithms.grpo import Grpo
from ragen_apo.training.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from ragen_apo.training.algorithms.rloo import Rloo
from ragen_apo.values.estimator import soft_value

NUM_SEQUENCES, GROUP_SIZE, NUM_STEPS, NUM_EPOCHS, RATE = 64, 8, 25, 2, 0.15
BETA = 0.5
GROUP_B = torch.arange(NUM_SEQUENCES) // GROUP_SIZE


class Bandit:
    """States: 0. Positions: action, end."""

    num_states, num_actions, optimum = 1, 3, 0.8
    turn_index_T = torch.tensor([0, 0])
    pays = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)

    def play(self, policy, draws):
        state_BH = torch.zeros(NUM_SEQUENCES, 1, dtype=torch.int64)
        action_BH = torch.multinomial(policy[0], NUM_SEQUENCES, replacement=True, generator=draws)
        luck_B = torch.rand(NUM_SEQUENCES, generator=draws)
        rewards_BH = (luck_B < self.pays[action_BH]).double()[:, None]
        return state_BH, action_BH[:, None], rewards_BH

    def expected_return(self, policy):
        return (policy[0] @ self.pays).item()


class Corridor:
    """States: 0, then 1 or 2. Positions: action, end, gap, action, end."""

    num_states, num_actions, optimum = 3, 2, 1.0
    turn_index_T = torch.tensor([0, 0, -1, 1, 1])
    second_pays = torch.tensor([[0.0, 0.2], [0.0, 1.0]], dtype=torch.float64)

    def play(self, policy, draws):
        first_B = torch.multinomial(policy[0], NUM_SEQUENCES, replacement=True, generator=draws)
        second_B = torch.multinomial(policy[1 + first_B], 1, generator=draws)[:, 0]
        state_BH = torch.stack([torch.zeros_like(first_B), 1 + first_B], dim=1)
        rewards_BH = torch.stack(
            [0.3 * (first_B == 0).double(), self.second_pays[first_B, second_B]], dim=1
        )
        return state_BH, torch.stack([first_B, second_B], dim=1), rewards_BH

    def expected_return(self, policy):
        second = (policy[1:] * self.second_pays).sum(1)
        return (policy[0] @ (second + torch.tensor([0.3, 0.0]))).item()


@dataclass
class Rollouts:
    """What an estimator may look at; the mask is True at actions and end tokens."""

    rewards_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    values_BT: torch.Tensor
    turn_index_BT: torch.Tensor
    returns_B: torch.Tensor
    state_BH: torch.Tensor
    group_B = GROUP_B

    def __len__(self):
        return NUM_SEQUENCES

    @property
    def mask_BT(self):
        return self.turn_index_BT >= 0

    @property
    def trajectories(self):
        states = [[SimpleNamespace(state_key=key) for key in row] for row in self.state_BH.tolist()]
        return [SimpleNamespace(turns=turns) for turns in states]

    def spread(self, advantages_B):
        return sampled_or_zero(advantages_B[:, None], self.mask_BT)

    def with_returns(self, returns_B):
        return replace(self, returns_B=returns_B)


def from_gae(rollouts):
    estimate = gae(
        rollouts.rewards_BT, values_BT=rollouts.values_BT, mask_BT=rollouts.mask_BT, gae_lambda=0.95
    )
    return whiten(estimate.advantages_BT, mask_BT=rollouts.mask_BT), estimate.returns_BT


def from_bi_level_gae(rollouts):
    estimate = bi_level_gae(
        rollouts.rewards_BT,
        values_BT=rollouts.values_BT,
        mask_BT=rollouts.mask_BT,
        turn_index_BT=rollouts.turn_index_BT,
        gamma_turn=0.95,
        lambda_turn=0.9,
    )
    return whiten(estimate.advantages_BT, mask_BT=rollouts.mask_BT), estimate.returns_BT


def from_reinforce(rollouts):
    baseline_B = torch.full((NUM_SEQUENCES,), 0.5)
    return rollouts.spread(rollouts.returns_B - baseline_B)


def from_reinforce_plus_plus(rollouts):
    uniform_BT = torch.full_like(rollouts.old_logprobs_BT, 1 / 3).log()
    reference_BT = torch.where(rollouts.old_logprobs_BT == 0, 0.0, uniform_BT)
    kl_BT = token_log_ratio(rollouts.old_logprobs_BT, reference_BT, rollouts.mask_BT)
    rewards_BT = penalize_rewards(
        rollouts.rewards_BT, kl_BT=kl_BT, mask_BT=rollouts.mask_BT, coefficient=0.01
    )
    return ReinforcePlusPlus().advantages(replace(rollouts, rewards_BT=rewards_BT))


def from_normalized(rollouts):
    settings = {"grouping": "batch", "method": "asym_clip"}
    algorithm = Grpo.model_validate({"reward_normalization": settings})
    return rollouts.spread(algorithm.normalized(rollouts).returns_B)


def from_oapl(rollouts):
    values = [soft_value(each, beta=BETA) for each in rollouts.returns_B.view(-1, GROUP_SIZE)]
    return rollouts.spread(rollouts.returns_B - torch.tensor(values).repeat_interleave(GROUP_SIZE))


def policy_loss(name, rollouts, logprobs_BT, *, advantages_BT, aggregation):
    """Clipped, but for those that have a loss of their own."""
    mask_BT = rollouts.mask_BT
    if name == "OAPL":
        return apo_loss(
            logprobs_BT,
            reference_logprobs_BT=rollouts.old_logprobs_BT,
            mask_BT=mask_BT,
            returns_B=advantages_BT[:, 0],
            v_star_B=torch.zeros(NUM_SEQUENCES),
            settings=ApoSettings(beta2=BETA),
            num_sequences=NUM_SEQUENCES,
        ).loss
    if name == "REINFORCE":
        loss_BT = torch.where(mask_BT, -advantages_BT * logprobs_BT, 0.0)
    else:
        loss_BT = clipped_policy_loss(
            logprobs_BT,
            old_logprobs_BT=rollouts.old_logprobs_BT,
            advantages_BT=advantages_BT,
            mask_BT=mask_BT,
        ).loss_BT
    return aggregate(loss_BT, mask_BT=mask_BT, aggregation=aggregation, **counts_of(mask_BT))


def counts_of(mask_BT):
    num_sequences, max_tokens = mask_BT.shape
    return {
        "num_sequences": num_sequences,
        "num_tokens": int(mask_BT.sum()),
        "max_tokens": max_tokens,
    }


ONE_PASS = ("REINFORCE", "OAPL")
"""Right on new samples alone: the one always, the other where chance decides, as in the bandit."""
ESTIMATORS = {
    "PPO": (from_gae, "token_mean"),
    "PPO, bi-level": (from_bi_level_gae, "token_mean"),
    "GRPO": (Grpo().advantages, "sequence_mean_token_mean"),
    "Dr. GRPO": (DrGrpo().advantages, "constant"),
    "RLOO": (Rloo().advantages, "sequence_mean_token_sum"),
    "GiGPO": (Gigpo().advantages, "token_mean"),
    "REINFORCE": (from_reinforce, "sequence_mean_token_sum"),
    "REINFORCE++": (from_reinforce_plus_plus, "token_mean"),
    "BRPO": (Brpo().advantages, "token_mean"),
    "OAPL": (from_oapl, None),
    "asymmetric clip": (from_normalized, "token_mean"),
}


def train(task, name, *, seed=0, shuffled=False):
    """Share of the optimal return that the policy reaches, computed exactly."""
    estimator, aggregation = ESTIMATORS[name]
    draws = torch.Generator().manual_seed(seed)
    turn_index_BT = task.turn_index_T.expand(NUM_SEQUENCES, -1)
    mask_BT = turn_index_BT >= 0
    # The first of a turn's two tokens is the action, the second the end.
    end_T = mask_BT[0] & (task.turn_index_T.roll(1) == task.turn_index_T)
    end_T[0] = False
    action_T = mask_BT[0] & ~end_T
    gap_BT = torch.full(mask_BT.shape, torch.nan)
    logits = torch.zeros(task.num_states, task.num_actions, requires_grad=True)
    critic = torch.zeros(
        task.num_states, 2, requires_grad=True
    )  # before the action, before the end
    optimizer = torch.optim.Adam([logits, critic], lr=RATE)

    def logprobs(state_BH, action_BH):
        row_BT = gap_BT.clone()
        row_BT[:, end_T] = 0.0
        row_BT[:, action_T] = logits.log_softmax(1)[state_BH, action_BH]
        return row_BT

    def values(state_BH):
        row_BT = gap_BT.clone()
        row_BT[:, action_T], row_BT[:, end_T] = critic[state_BH, 0], critic[state_BH, 1]
        return row_BT

    for _ in range(NUM_STEPS):
        state_BH, action_BH, rewards_BH = task.play(logits.detach().softmax(1), draws)
        if shuffled:
            rewards_BH = rewards_BH[torch.randperm(NUM_SEQUENCES, generator=draws)]
        rewards_BT = gap_BT.clone()
        rewards_BT[:, action_T], rewards_BT[:, end_T] = 0.0, rewards_BH
        rollouts = Rollouts(
            rewards_BT=rewards_BT,
            old_logprobs_BT=logprobs(state_BH, action_BH).detach(),
            values_BT=values(state_BH).detach(),
            turn_index_BT=turn_index_BT,
            returns_B=rewards_BH.sum(1),
            state_BH=state_BH,
        )
        estimate = estimator(rollouts)
        advantages_BT, targets_BT = estimate if isinstance(estimate, tuple) else (estimate, None)
        for _ in range(1 if name in ONE_PASS else NUM_EPOCHS):
            loss = policy_loss(
                name,
                rollouts,
                logprobs(state_BH, action_BH),
                advantages_BT=advantages_BT,
                aggregation=aggregation,
            )
            if targets_BT is not None:
                value_loss_BT = clipped_value_loss(
                    values(state_BH),
                    old_values_BT=rollouts.values_BT,
                    returns_BT=targets_BT,
                    mask_BT=mask_BT,
                )
                loss = loss + aggregate(
                    value_loss_BT, mask_BT=mask_BT, aggregation="token_mean", **counts_of(mask_BT)
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return task.expected_return(logits.detach().softmax(1)) / task.optimum


@pytest.mark.parametrize("task", [Bandit(), Corridor()], ids=["bandit", "corridor"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_must_solve(task, name):
    assert train(task, name) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("task", [Bandit(), Corridor()], ids=["bandit", "corridor"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_shuffled_returns_teach_nothing(task, name):
    shares = [train(task, name, seed=seed, shuffled=True) for seed in range(3)]
    assert sum(shares) / 3 < 0.85
