"""A clipped ratio and no critic: GRPO, Dr. GRPO, RLOO, GiGPO, REINFORCE++, BRPO.

They differ in one function, from rollouts to an advantage for each sampled token, and in how token
losses become one number; the rest is shared and switched by the section `policy_gradient`:

    rewards  -= coefficient KL               kl_in: reward
    loss      = clipped(A, pi / pi_old) + coefficient KL - coefficient H

pi_old is what the sampler recorded, so the first update of a step is on-policy up to
`logprob_gap_max`. Formulas and sources: `objectives.group_relative`, `objectives.reinforce`,
`objectives.policy_gradient`.

Axes: B trajectories, T token positions, H turns, N turns of all trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragen_apo.config.algorithms import GigpoConfig, PolicyGradientConfig
from ragen_apo.objectives.group_relative import (
    AdvantageScale,
    dr_grpo_advantages,
    gigpo_advantages,
    grpo_advantages,
    rloo_advantages,
)
from ragen_apo.objectives.policy_gradient import (
    Aggregation,
    KlEstimator,
    aggregate,
    clipped_policy_loss,
    entropy_bonus,
    penalize_rewards,
    token_kl,
)
from ragen_apo.objectives.reinforce import brpo_advantages, reinforce_plus_plus_advantages
from ragen_apo.objectives.tensors import (
    discounted_sum,
    spread_over_tokens,
    spread_turns_over_tokens,
)
from ragen_apo.objectives.turn_level import segment_sums
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.rollouts import MicroBatch, Rollouts
from ragen_apo.training.step_metrics import LossPart, StepFigures

Advantages = Callable[[Rollouts], Tensor]
"""From the rollouts of a step to an advantage for each sampled token [B, T]."""


@dataclass(frozen=True)
class PolicyGradientSignals:
    """Constants of the passes of one step."""

    advantages_BT: Tensor


class PolicyGradient(Algorithm[PolicyGradientSignals]):
    """Any algorithm without a critic, given by its advantages."""

    def __init__(self, term: PolicyTerm, *, advantages: Advantages) -> None:
        self._term, self._advantages = term, advantages
        self.num_epochs = term.settings.num_epochs
        self.num_minibatches = term.settings.num_minibatches
        self.entropy_gradients = term.settings.entropy_coefficient > 0

    def prepare(self, rollouts: Rollouts) -> PolicyGradientSignals:
        return PolicyGradientSignals(self._advantages(self._term.with_kl_penalty(rollouts)))

    def loss(
        self, signals: PolicyGradientSignals, micro: MicroBatch, scores: TokenScores
    ) -> LossPart:
        return self._term.loss(micro, scores, advantages_BT=micro.cut(signals.advantages_BT))

    def metrics(
        self, rollouts: Rollouts, signals: PolicyGradientSignals, figures: StepFigures
    ) -> dict[str, float]:
        return advantage_metrics(signals.advantages_BT, rollouts, figures)


@dataclass(frozen=True)
class PolicyTerm:
    """What all algorithms with a ratio do with advantages."""

    settings: PolicyGradientConfig
    aggregation: Aggregation
    max_tokens: int
    """What `Aggregation.CONSTANT` divides by: the most that one context can hold."""

    def with_kl_penalty(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the KL of each token taken off its reward, if that is configured."""
        if self.settings.kl_in != "reward" or self.settings.kl_coefficient == 0:
            return rollouts
        kl_BT = token_kl(
            rollouts.tokens.sampled_logprobs_BT,
            reference_logprobs_BT=rollouts.reference_logprobs_BT,
            mask_BT=rollouts.mask_BT,
            estimator=KlEstimator(self.settings.kl_estimator or "k1"),
        )
        rewards_BT = penalize_rewards(
            rollouts.rewards_BT,
            kl_BT=kl_BT,
            mask_BT=rollouts.mask_BT,
            coefficient=self.settings.kl_coefficient,
        )
        penalty_B = self.settings.kl_coefficient * kl_BT.sum(dim=1)
        return replace(rollouts, rewards_BT=rewards_BT, returns_B=rollouts.returns_B - penalty_B)

    def loss(self, micro: MicroBatch, scores: TokenScores, *, advantages_BT: Tensor) -> LossPart:
        """Clipped surrogate, KL and entropy of a micro-batch."""
        settings, mask_BT = self.settings, micro.mask_BT
        policy = clipped_policy_loss(
            scores.logprobs_BT,
            old_logprobs_BT=micro.tokens.sampled_logprobs_BT,
            advantages_BT=advantages_BT,
            mask_BT=mask_BT,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        loss_BT = policy.loss_BT
        if settings.kl_in == "loss" and settings.kl_coefficient > 0:
            loss_BT = loss_BT + settings.kl_coefficient * token_kl(
                scores.logprobs_BT,
                reference_logprobs_BT=micro.reference_logprobs_BT,
                mask_BT=mask_BT,
                estimator=KlEstimator(settings.kl_estimator or "k2"),
            )
        if settings.entropy_coefficient > 0:
            loss_BT = loss_BT + entropy_bonus(
                scores.entropy_BT, mask_BT=mask_BT, coefficient=settings.entropy_coefficient
            )
        return LossPart(
            loss=aggregate(
                loss_BT,
                mask_BT=mask_BT,
                aggregation=self.aggregation,
                num_sequences=micro.num_sequences,
                num_tokens=micro.num_tokens,
                max_tokens=self.max_tokens,
            ),
            sums={"clipped_tokens": policy.clipped_BT.sum(), "tokens": mask_BT.sum()},
        )


def advantage_metrics(
    advantages_BT: Tensor, rollouts: Rollouts, figures: StepFigures
) -> dict[str, float]:
    """Monitors of all algorithms with a ratio."""
    advantages_N = advantages_BT[rollouts.mask_BT].double()
    return {
        "advantage_mean": advantages_N.mean().item(),
        "advantage_std": advantages_N.std(correction=0).item(),
        "clip_fraction": figures.sums["clipped_tokens"] / max(figures.sums["tokens"], 1),
    }


def grpo(rollouts: Rollouts) -> Tensor:
    """(R - mean) / std of the task's rollouts."""
    return _spread(grpo_advantages(rollouts.returns_B, group_B=rollouts.group_B), rollouts)


def dr_grpo(rollouts: Rollouts) -> Tensor:
    """R - mean of the task's rollouts."""
    return _spread(dr_grpo_advantages(rollouts.returns_B, group_B=rollouts.group_B), rollouts)


def rloo(rollouts: Rollouts) -> Tensor:
    """R - mean of the task's other rollouts."""
    return _spread(rloo_advantages(rollouts.returns_B, group_B=rollouts.group_B), rollouts)


def brpo(rollouts: Rollouts) -> Tensor:
    """(R - mean) / std of the step's rollouts."""
    return _spread(brpo_advantages(rollouts.returns_B), rollouts)


def reinforce_plus_plus(rollouts: Rollouts) -> Tensor:
    """Whitened returns-to-go of tokens."""
    return reinforce_plus_plus_advantages(rollouts.rewards_BT, mask_BT=rollouts.mask_BT)


def gigpo(settings: GigpoConfig) -> Advantages:
    """The episode among those of its task, and the turn among those in its state."""

    def advantages(rollouts: Rollouts) -> Tensor:
        turns = [
            (row, index, turn.state_key)
            for row, trajectory in enumerate(rollouts.trajectories)
            for index, turn in enumerate(trajectory.turns)
        ]
        ids: dict[str, int] = {}
        # A turn whose state is unknown shares it with no other.
        states = [
            -place - 1 if key is None else ids.setdefault(key, len(ids))
            for place, (_, _, key) in enumerate(turns)
        ]
        device = rollouts.group_B.device
        row_N = torch.tensor([row for row, _, _ in turns], device=device)
        turn_N = torch.tensor([index for _, index, _ in turns], device=device)
        to_go_BH = _returns_to_go(rollouts, gamma=settings.gamma)
        result = gigpo_advantages(
            rollouts.returns_B,
            group_B=rollouts.group_B,
            returns_to_go_N=to_go_BH[row_N, turn_N],
            trajectory_N=row_N,
            state_N=torch.tensor(states, device=device),
            omega=settings.omega,
            scale=AdvantageScale(settings.scale),
        )
        return spread_turns_over_tokens(
            result.advantages,
            sequence_N=row_N,
            turn_N=turn_N,
            turn_index_BT=rollouts.turn_index_BT,
        )

    return advantages


def _returns_to_go(rollouts: Rollouts, *, gamma: float) -> Tensor:
    """What each turn and those after it earned, discounted by turns [B, H]."""
    num_turns = [len(trajectory.turns) for trajectory in rollouts.trajectories]
    shape = (len(num_turns), max(num_turns))
    zeros_BH = torch.zeros(shape, device=rollouts.group_B.device)
    rewards_BH = segment_sums(
        rollouts.rewards_BT,
        mask_BT=rollouts.mask_BT,
        segment_BT=rollouts.turn_index_BT,
        like=zeros_BH,
    )
    everywhere_BH = torch.ones_like(zeros_BH, dtype=torch.bool)
    return discounted_sum(rewards_BH, mask_BT=everywhere_BH, decay=gamma)


def _spread(advantages_B: Tensor, rollouts: Rollouts) -> Tensor:
    return spread_over_tokens(advantages_B, mask_BT=rollouts.mask_BT)
