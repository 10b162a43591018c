"""PPO: advantages from a learned critic.

    V          the critic on the text before each sampled token, at the start of the step
    A, target  GAE over tokens, or over turns first (bi-level); A whitened over the step
    loss       clipped(A, pi / pi_old) + value loss; policy and critic share no weights

Schulman et al., arXiv 1707.06347 and 1506.02438; bi-level GAE as in RAGEN. Formulas are in
`objectives.ppo`. Episodes end with value 0, those at the turn limit as well: running out of turns
is a failure of the task, not an interruption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ragen_apo.config.algorithms import Monitor, Traits
from ragen_apo.config.section import CountOrZero, LearningRate, Positive
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig
from ragen_apo.training.named_tensors import check_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ragen_apo.config import RunConfig
    from ragen_apo.objectives.ppo import AdvantageEstimate
    from ragen_apo.policy.language_model import LanguageModel
    from ragen_apo.policy.scoring import TokenScores
    from ragen_apo.training.rollouts import MicroBatch, Rollouts
    from ragen_apo.training.step_metrics import LossPart, StepMetrics

_WEIGHTS, _MOMENTS = "critic/", "moments/"
"""Mark the critic's tensors in a checkpoint."""


class Ppo(PolicyGradientConfig):
    """PPO: advantages of tokens from a critic that is a second model."""

    traits: ClassVar[Traits] = Traits(
        label="PPO",
        sentence="PPO trains the agent with the advantages of a learned critic",
        advantage="GAE: what followed a token, minus what the critic expected",
        has_critic=True,
    )
    monitors: ClassVar[Mapping[str, Monitor]] = {
        **PolicyGradientConfig.monitors,
        "value_loss": Monitor("critic, loss"),
        "explained_variance": Monitor("critic, explained variance", title="Critic: R² of returns"),
        "critic_gradient_norm": Monitor("critic, gradient norm"),
    }
    name: str = "ppo"
    critic_learning_rate: LearningRate = 1e-3
    """Peak learning rate of the critic; follows optimizer.warmup_steps and optimizer.schedule."""
    critic_warmup_steps: CountOrZero = 0
    """First steps, in which only the critic is trained."""
    value_clip: Positive | None = 0.2
    """How far a value may move from its value at the start of the step; null for no limit."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount from token to token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda from token to token."""
    bi_level_gae: bool = False
    """GAE over turns first, then within each turn."""
    gamma_turn: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount from turn to turn, if bi-level."""
    lambda_turn: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda from turn to turn, if bi-level."""

    def make(self, config: RunConfig, policy: LanguageModel) -> PpoAlgorithm:
        """The algorithm; its critic starts as a copy of the policy."""
        return PpoAlgorithm(self, config, policy)


@dataclass(frozen=True)
class PpoTargets:
    """Constants of the passes of one step."""

    advantages_BT: Tensor
    old_values_BT: Tensor
    returns_BT: Tensor
    """What the critic is regressed on."""
    trains_policy: bool


class PpoAlgorithm(Algorithm[PpoTargets]):
    """Owns the critic and its optimizer."""

    has_ratio = True

    def __init__(self, settings: Ppo, config: RunConfig, policy: LanguageModel) -> None:
        from ragen_apo.policy.critic import Critic
        from ragen_apo.training.algorithms.clipped_ratio import ClippedRatio
        from ragen_apo.training.optimization import Optimizer
        from ragen_apo.training.rollouts import contexts_per_pass

        self._settings = settings
        self._ratio = ClippedRatio(settings, max_tokens=config.agent.max_context_tokens)
        self._critic = Critic(policy, freeze_embeddings=config.policy.freeze_embeddings)
        self._micro_batch_size = config.training.micro_batch_size
        self._max_contexts = contexts_per_pass(policy, micro_batch_size=self._micro_batch_size)
        self._optimizer = Optimizer(self._critic, weight_decay=config.optimizer.weight_decay)
        self._max_grad_norm = config.optimizer.max_grad_norm
        self.num_epochs = settings.num_epochs
        self.num_minibatches = settings.num_minibatches
        self.entropy_gradients = settings.entropy_coefficient > 0
        self.uses_reference = self._ratio.uses_reference

    @property
    def other_models(self) -> Sequence[nn.Module]:
        return (self._critic,)

    def prepare(self, rollouts: Rollouts) -> PpoTargets:
        from ragen_apo.objectives.tensors import whiten

        values_BT = rollouts.scored(
            self._critic_values, size=self._micro_batch_size, what="values of the critic"
        )
        estimate = self._estimate(self._ratio.with_kl_penalty(rollouts), values_BT)
        return PpoTargets(
            advantages_BT=whiten(estimate.advantages_BT, mask_BT=rollouts.mask_BT),
            old_values_BT=values_BT,
            returns_BT=estimate.returns_BT,
            trains_policy=rollouts.step >= self._settings.critic_warmup_steps,
        )

    def loss(self, targets: PpoTargets, micro: MicroBatch, scores: TokenScores) -> LossPart:
        from ragen_apo.objectives.policy_gradient import aggregate
        from ragen_apo.objectives.ppo import clipped_value_loss

        mask_BT = micro.mask_BT
        value_loss_BT = clipped_value_loss(
            self._critic_values(micro),
            old_values_BT=micro.cut(targets.old_values_BT),
            returns_BT=micro.cut(targets.returns_BT),
            mask_BT=mask_BT,
            clip=self._settings.value_clip,
        )
        value_loss = aggregate(
            value_loss_BT,
            mask_BT=mask_BT,
            aggregation="token_mean",
            num_sequences=micro.num_sequences,
            num_tokens=micro.num_tokens,
        )
        policy = self._ratio.loss(targets.advantages_BT, micro, scores)
        sums = {**policy.sums, "value_loss": value_loss_BT.detach().sum()}
        # Without the policy's term no gradient reaches the policy, and its update changes nothing.
        loss = policy.loss + value_loss if targets.trains_policy else value_loss
        return replace(policy, loss=loss, sums=sums)

    def update(self, *, rate_scale: float) -> dict[str, float]:
        norm = self._optimizer.update(
            learning_rate=rate_scale * self._settings.critic_learning_rate,
            max_grad_norm=self._max_grad_norm,
        )
        return {"critic_gradient_norm": norm}

    def metrics(
        self, rollouts: Rollouts, targets: PpoTargets, collected: StepMetrics
    ) -> dict[str, float]:
        from ragen_apo.objectives.ppo import explained_variance

        metrics = self._ratio.metrics(rollouts, targets.advantages_BT, collected)
        metrics["value_loss"] = collected.sums["value_loss"] / max(collected.sums["tokens"], 1)
        explained = explained_variance(
            targets.old_values_BT, returns_BT=targets.returns_BT, mask_BT=rollouts.mask_BT
        )
        if not math.isnan(explained):
            metrics["explained_variance"] = explained
        return metrics

    def state_tensors(self) -> Mapping[str, Tensor]:
        from ragen_apo.policy.lora import trained_tensors

        trained = trained_tensors(self._critic)
        weights = {f"{_WEIGHTS}{name}": tensor for name, tensor in trained.items()}
        moments = self._optimizer.state_tensors()
        return weights | {f"{_MOMENTS}{name}": value for name, value in moments.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        from ragen_apo.training.checkpoint import load_trained_tensors

        others = {n: t for n, t in tensors.items() if not n.startswith((_WEIGHTS, _MOMENTS))}
        check_tensors(others, {})
        load_trained_tensors(self._critic, _below(_WEIGHTS, tensors))
        self._optimizer.load_state_tensors(_below(_MOMENTS, tensors))

    def _critic_values(self, micro: MicroBatch) -> Tensor:
        from ragen_apo.policy.passes import to_device

        def values(token_ids_ML: Tensor, targets_ML: Tensor) -> tuple[Tensor]:
            return (self._critic(token_ids_ML, to_device(targets_ML, token_ids_ML.device)),)

        (values_ML,) = micro.by_pass(values, size=self._max_contexts)
        return micro.in_rows(values_ML)

    def _estimate(self, rollouts: Rollouts, values_BT: Tensor) -> AdvantageEstimate:
        from ragen_apo.objectives.ppo import bi_level_gae, gae

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
