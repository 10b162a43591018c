"""The trainer's side of every algorithm with a clipped ratio.

Formulas and sources: `objectives.policy_gradient`; settings: `policy_gradient`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ragen_apo.config.algorithms import ALGORITHMS
from ragen_apo.errors import TrainingError
from ragen_apo.objectives.policy_gradient import (
    aggregate,
    clipped_policy_loss,
    entropy_bonus,
    importance_weights,
    kl_loss,
    penalize_rewards,
)
from ragen_apo.objectives.tensors import token_log_ratio
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig
from ragen_apo.training.rollouts import MicroBatch, Rollouts
from ragen_apo.training.step_metrics import LossPart, StepMetrics


class ClippedRatio(Algorithm[Tensor]):
    """An algorithm without a critic; its targets are advantages [B, T]. PPO adds a critic to it."""

    has_ratio = True

    def __init__(self, settings: PolicyGradientConfig, *, max_tokens: int) -> None:
        """`max_tokens`, the most that one context can hold, is what `constant` divides by."""
        self._settings, self._max_tokens = settings, max_tokens
        self.num_epochs = settings.num_epochs
        self.num_minibatches = settings.num_minibatches
        self.entropy_gradients = settings.entropy_coefficient > 0
        # The advantages of somebody else's may use it, too.
        self.uses_reference = settings.kl_coefficient > 0 or settings.name not in ALGORITHMS

    def prepare(self, rollouts: Rollouts) -> Tensor:
        advantages_BT = self._settings.advantages(self.with_kl_penalty(rollouts))
        is_own = self._settings.name not in ALGORITHMS
        if is_own and (problem := _problem_with(advantages_BT, rollouts)):
            raise TrainingError(
                f"{self._settings.traits.label}: advantages(rollouts) returned {problem}; expected "
                f"a tensor [B, T] of the shape {tuple(rollouts.mask_BT.shape)}, finite at the "
                "sampled tokens and without a gradient (docs/adding_an_algorithm.md). "
                "rollouts.spread makes it from one number for each episode"
            )
        return advantages_BT

    def with_kl_penalty(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the KL of each token taken off its reward, if that is configured."""
        if self._settings.kl_in != "reward" or self._settings.kl_coefficient == 0:
            return rollouts
        kl_BT = token_log_ratio(
            rollouts.old_logprobs_BT, rollouts.reference_logprobs_BT, rollouts.mask_BT
        )
        rewards_BT = penalize_rewards(
            rollouts.rewards_BT,
            kl_BT=kl_BT,
            mask_BT=rollouts.mask_BT,
            coefficient=self._settings.kl_coefficient,
        )
        penalty_B = self._settings.kl_coefficient * kl_BT.sum(dim=1)
        return replace(rollouts, rewards_BT=rewards_BT, returns_B=rollouts.returns_B - penalty_B)

    def loss(self, targets: Tensor, micro: MicroBatch, scores: TokenScores) -> LossPart:
        """Clipped surrogate, KL and entropy of a micro-batch."""
        settings, mask_BT = self._settings, micro.mask_BT
        policy = clipped_policy_loss(
            scores.logprobs_BT,
            old_logprobs_BT=micro.old_logprobs_BT,
            advantages_BT=micro.cut(targets),
            mask_BT=mask_BT,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        loss_BT = policy.loss_BT
        if settings.importance_cap is not None:
            weight_BT = importance_weights(
                micro.old_logprobs_BT,
                sampled_logprobs_BT=micro.tokens.sampled_logprobs_RT,
                mask_BT=mask_BT,
                cap=settings.importance_cap,
            )
            loss_BT = weight_BT * loss_BT
        if settings.kl_in == "loss" and settings.kl_coefficient > 0:
            loss_BT = loss_BT + settings.kl_coefficient * kl_loss(
                scores.logprobs_BT,
                reference_logprobs_BT=micro.reference_logprobs_BT,
                mask_BT=mask_BT,
            )
        if settings.entropy_coefficient > 0:
            assert scores.entropy_BT is not None
            loss_BT = loss_BT + entropy_bonus(
                scores.entropy_BT, mask_BT=mask_BT, coefficient=settings.entropy_coefficient
            )
        return LossPart(
            loss=aggregate(
                loss_BT,
                mask_BT=mask_BT,
                aggregation=settings.aggregation,
                num_sequences=micro.num_sequences,
                num_tokens=micro.num_tokens,
                max_tokens=self._max_tokens,
            ),
            sums={"clipped_tokens": policy.clipped_BT.sum(), "tokens": mask_BT.sum()},
        )

    def metrics(
        self, rollouts: Rollouts, targets: Tensor, collected: StepMetrics
    ) -> dict[str, float]:
        clipped = collected.sums["clipped_tokens"] / max(collected.sums["tokens"], 1)
        return {
            **advantage_spread(targets, rollouts),
            "clip_fraction": clipped,
            **self._settings.metrics(rollouts),
        }


def _problem_with(advantages_BT: object, rollouts: Rollouts) -> str | None:
    """What is wrong with the advantages of an algorithm that somebody else may have written."""
    if not isinstance(advantages_BT, Tensor):
        return f"an object of the type {type(advantages_BT).__name__}"
    if advantages_BT.shape != rollouts.mask_BT.shape:
        return f"a tensor of the shape {tuple(advantages_BT.shape)}"
    if advantages_BT.requires_grad:
        return "a tensor with a gradient"
    if not torch.isfinite(advantages_BT[rollouts.mask_BT]).all():
        return "numbers that are not finite"
    return None


def advantage_spread(advantages_BT: Tensor, rollouts: Rollouts) -> dict[str, float]:
    """Mean and deviation of the advantages of the sampled tokens."""
    advantages_N = advantages_BT[rollouts.mask_BT].double()
    return {
        "advantage_mean": advantages_N.mean().item(),
        "advantage_std": advantages_N.std(correction=0).item(),
    }
