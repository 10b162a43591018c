"""PPO: the clipped ratio of `policy_gradient` with advantages from a critic.

    V         the critic on the text before each sampled token, at the start of the step
    A, target GAE over tokens, or over turns first (bi-level); A whitened over the step
    loss      clipped(A, pi / pi_old) + value loss; the two share no weights

Episodes end with value 0, those at the turn limit as well: running out of turns is a failure of the
task, not an interruption. Formulas and sources: `objectives.ppo`.

Axes: B trajectories, T token positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragen_apo.config.algorithms import PpoConfig
from ragen_apo.objectives.policy_gradient import Aggregation, aggregate
from ragen_apo.objectives.ppo import (
    AdvantageEstimate,
    bi_level_gae,
    clipped_value_loss,
    explained_variance,
    gae,
)
from ragen_apo.objectives.tensors import whiten
from ragen_apo.policy.critic import Critic
from ragen_apo.policy.lora import trained_tensors
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.algorithms.policy_gradient import PolicyTerm, advantage_metrics
from ragen_apo.training.checkpoint import load_trained_tensors
from ragen_apo.training.named_tensors import check_tensors
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.rollouts import MicroBatch, Rollouts
from ragen_apo.training.step_metrics import LossPart, StepFigures

_WEIGHTS, _MOMENTS = "critic/", "moments/"
"""Mark the critic's tensors in a checkpoint."""


@dataclass(frozen=True)
class PpoSignals:
    """Constants of the passes of one step."""

    advantages_BT: Tensor
    old_values_BT: Tensor
    returns_BT: Tensor
    """What the critic is regressed on."""
    trains_policy: bool


class Ppo(Algorithm[PpoSignals]):
    """Owns the critic and its optimizer."""

    def __init__(
        self,
        term: PolicyTerm,
        settings: PpoConfig,
        *,
        critic: Critic,
        micro_batch_size: int,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._term, self._settings = term, settings
        self._critic, self._micro_batch_size = critic, micro_batch_size
        self._optimizer = Optimizer(critic, weight_decay=weight_decay)
        self._max_grad_norm = max_grad_norm
        self.num_epochs = term.settings.num_epochs
        self.num_minibatches = term.settings.num_minibatches
        self.entropy_gradients = term.settings.entropy_coefficient > 0

    def prepare(self, rollouts: Rollouts) -> PpoSignals:
        values_BT = self._values(rollouts)
        estimate = self._estimate(self._term.with_kl_penalty(rollouts), values_BT)
        advantages_BT = estimate.advantages_BT
        if self._settings.whiten_advantages:
            advantages_BT = whiten(advantages_BT, mask_BT=rollouts.mask_BT)
        return PpoSignals(
            advantages_BT=advantages_BT,
            old_values_BT=values_BT,
            returns_BT=estimate.returns_BT,
            trains_policy=rollouts.step >= self._settings.critic_warmup_steps,
        )

    def loss(self, signals: PpoSignals, micro: MicroBatch, scores: TokenScores) -> LossPart:
        mask_BT = micro.mask_BT
        value = clipped_value_loss(
            self._critic_values(micro),
            old_values_BT=micro.cut(signals.old_values_BT),
            returns_BT=micro.cut(signals.returns_BT),
            mask_BT=mask_BT,
            clip=self._settings.value_clip,
        )
        value_loss = aggregate(
            value.loss_BT,
            mask_BT=mask_BT,
            aggregation=Aggregation.TOKEN_MEAN,
            num_sequences=micro.num_sequences,
            num_tokens=micro.num_tokens,
        )
        policy = self._term.loss(micro, scores, advantages_BT=micro.cut(signals.advantages_BT))
        sums = {**policy.sums, "value_loss": value.loss_BT.detach().sum()}
        # Without the policy's term no gradient reaches the policy, and its update changes nothing.
        loss = policy.loss + value_loss if signals.trains_policy else value_loss
        return replace(policy, loss=loss, sums=sums)

    def update(self, *, rate_scale: float) -> dict[str, float]:
        norm = self._optimizer.update(
            learning_rate=rate_scale * self._settings.critic_learning_rate,
            max_grad_norm=self._max_grad_norm,
        )
        return {"critic_gradient_norm": norm}

    def metrics(
        self, rollouts: Rollouts, signals: PpoSignals, figures: StepFigures
    ) -> dict[str, float]:
        metrics = advantage_metrics(signals.advantages_BT, rollouts, figures)
        metrics["value_loss"] = figures.sums["value_loss"] / max(figures.sums["tokens"], 1)
        explained = explained_variance(
            signals.old_values_BT, returns_BT=signals.returns_BT, mask_BT=rollouts.mask_BT
        )
        if not math.isnan(explained):
            metrics["explained_variance"] = explained
        return metrics

    def state_tensors(self) -> Mapping[str, Tensor]:
        trained = trained_tensors(self._critic)
        weights = {f"{_WEIGHTS}{name}": tensor for name, tensor in trained.items()}
        moments = self._optimizer.state_tensors()
        return weights | {f"{_MOMENTS}{name}": value for name, value in moments.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        critic, moments = _below(_WEIGHTS, tensors), _below(_MOMENTS, tensors)
        check_tensors(
            {
                name: tensor
                for name, tensor in tensors.items()
                if not name.startswith((_WEIGHTS, _MOMENTS))
            },
            {},
        )
        load_trained_tensors(self._critic, critic)
        self._optimizer.load_state_tensors(moments)

    @torch.no_grad()
    def _values(self, rollouts: Rollouts) -> Tensor:
        values_BT = torch.zeros_like(rollouts.rewards_BT)
        for micro in rollouts.micro_batches(range(len(rollouts)), size=self._micro_batch_size):
            part_BT = self._critic_values(micro)
            values_BT[micro.places, : part_BT.shape[1]] = part_BT
        return values_BT

    def _critic_values(self, micro: MicroBatch) -> Tensor:
        samples = micro.samples
        return micro.in_rows(self._critic(samples.token_ids_BT, samples.loss_mask_BT))

    def _estimate(self, rollouts: Rollouts, values_BT: Tensor) -> AdvantageEstimate:
        settings = self._settings
        if settings.bi_level_gae:
            return bi_level_gae(
                rollouts.rewards_BT,
                values_BT=values_BT,
                mask_BT=rollouts.mask_BT,
                turn_index_BT=rollouts.turn_index_BT,
                gamma=settings.gamma,
                gae_lambda=settings.gae_lambda,
                gamma_turn=settings.gamma_turn,
                lambda_turn=settings.lambda_turn,
            )
        return gae(
            rollouts.rewards_BT,
            values_BT=values_BT,
            mask_BT=rollouts.mask_BT,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
        )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
