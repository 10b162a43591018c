"""OAPL: A*-PO whose reference is the lagged policy that sampled, with V* from the task's rollouts.

    V_hat(x) = beta1 log mean_i exp(R_i / beta1)       over the task's group of this step
    A(tau)   = (R - V_hat(x)) - beta2 Delta(tau),      Delta = sum of log pi - log pi_lag
    loss     = A^2 / (2 beta2)

Ritter et al., arXiv 2602.19362; the loss is that of `objectives.apo`. pi_lag is renewed after `lag`
updates. Its log-probabilities are those that the sampler recorded. So a sampler that computes them
differently from the trainer does no harm. No ratio, no clipping, no Stage 1; the run's reference is
only for monitors. Assumes that the rollouts of a group start in the same state.

With beta1 = beta2 the targets (R - V_hat) / beta2 of a group are the log ratios of a distribution,
with mean exp(target) = 1. It is pi*(tau) = pi_lag(tau) exp((R - V*) / beta2) on the samples. It is
the minimum whichever policy the samples come from. So they may be used for several updates in a
deterministic environment.

With beta2 < beta1, as in the paper, the targets ask for more probability than a group has, and the
minimum is sharper than pi* at beta1. With beta2 > beta1 they give probability to what nobody
sampled. This is refused if samples are used again.

A task whose returns are all equal is dropped. The mean is over the remaining trajectories. A
trajectory is part of its own V_hat. This shrinks the advantages of a small group, above all those
of the best returns (docs/algorithm.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ragen_apo.config.algorithms import AlgorithmConfig, Monitor, Traits
from ragen_apo.config.section import Count, GroupSize, Positive, Size
from ragen_apo.training.algorithms.apo import RESIDUAL_MONITORS
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.algorithms.policy_gradient import ADVANTAGE_MONITORS
from ragen_apo.training.named_tensors import check_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.config import RunConfig
    from ragen_apo.policy.language_model import LanguageModel
    from ragen_apo.policy.scoring import TokenScores
    from ragen_apo.training.rollouts import MicroBatch, Rollouts
    from ragen_apo.training.step_metrics import LossPart, StepMetrics

_LAGGED, _NUM_UPDATES = "lagged/", "num_updates"
"""Names of tensors in a checkpoint."""


class Oapl(AlgorithmConfig):
    """OAPL: regression on the optimal advantage over the lagged policy that sampled."""

    traits: ClassVar[Traits] = Traits(
        label="OAPL",
        sentence="OAPL regresses on the optimal advantage within a group, without a critic",
        advantage="R − β₁ log mean exp(R/β₁) over the task’s rollouts",
        compares_groups=True,
    )
    monitors: ClassVar[Mapping[str, Monitor]] = {
        **RESIDUAL_MONITORS,
        **ADVANTAGE_MONITORS,
        "sampler_lag": Monitor("updates since the policy that sampled"),
        "sampler_log_ratio_mean_abs": Monitor("log ratio to the policy that sampled, mean size"),
    }
    name: str = "oapl"
    group_size: GroupSize = 8
    """Rollouts per task."""
    beta1: Positive = 0.5
    """Temperature of V* over a task's rollouts."""
    beta2: Positive | None = None
    """Weight of the log ratio to the lagged policy; null for beta1. A value above beta1 is refused
    if samples are used for more than one update."""
    lag: Count = 1
    """Updates after which the sampling policy is renewed, at the start of a step. With 1 it is
    always the trained policy."""
    num_epochs: Count = 1
    """Passes over the rollouts of a step."""
    num_minibatches: Size = 1
    """Updates of a pass."""

    @property
    def rollouts_per_task(self) -> int:
        return self.group_size

    @property
    def weight(self) -> float:
        """beta2, also where it is left to beta1."""
        return self.beta1 if self.beta2 is None else self.beta2

    @property
    def keeps_a_copy(self) -> bool:
        return self.lag > 1

    @property
    def reuses_samples(self) -> bool:
        """Whether some update is made on samples of an earlier policy than the one it changes."""
        return self.lag > 1 or self.num_epochs > 1 or self.num_minibatches > 1

    def formula(self) -> str:
        return (
            "(advantage − β₂ Δ)² / 2β₂\nΔ = log π/π_lag\n"
            f"β₁ = {self.beta1:g}, β₂ = {self.weight:g}, lag {self.lag}"
        )

    def check(self, config: RunConfig) -> None:
        """Refuses old samples with targets that take probability from all that was sampled.

        And a lagged policy that distillation leaves behind.
        """
        if self.reuses_samples and self.weight > self.beta1:
            raise ValueError(
                f"algorithm.beta2 must be at most beta1 ({self.beta1:g}) where samples are used "
                f"for more than one update, got {self.weight:g}; set beta2 to null for beta1, or "
                "lag, num_epochs and num_minibatches to 1"
            )
        if self.lag > 1 and config.distillation.enabled and config.reference.is_refreshed:
            raise ValueError(
                f"algorithm.lag is {self.lag}, and distillation at a new reference moves the "
                "policy far from the lagged one that goes on sampling; set algorithm.lag to 1, or "
                "distillation.enabled to false, or make no new references"
            )

    def check_environment(self, *, deterministic: bool) -> None:
        """Refuses to use samples again in a stochastic environment."""
        if self.reuses_samples and not deterministic:
            raise ValueError(
                "it is stochastic, and OAPL may reuse samples only in deterministic environments "
                "(docs/algorithm.md); set algorithm.lag, num_epochs and num_minibatches to 1"
            )

    def make(self, config: RunConfig, policy: LanguageModel) -> OaplAlgorithm:
        """The algorithm; with a lag it starts with a copy of the policy."""
        return OaplAlgorithm(self, policy)


@dataclass(frozen=True)
class OaplTargets:
    """Constants of the passes of one step."""

    returns_B: Tensor
    v_hat_B: Tensor
    """Of each trajectory's task."""
    sampler_lag: int
    """Updates that the policy was ahead of the one that sampled, before the first of the step."""


class OaplAlgorithm(Algorithm[OaplTargets]):
    """Keeps the lagged policy."""

    uses_reference = False

    def __init__(self, settings: Oapl, policy: LanguageModel) -> None:
        from ragen_apo.objectives.apo import ApoSettings

        self._objective = ApoSettings(beta2=settings.weight)
        self._beta1, self._lag = settings.beta1, settings.lag
        self._policy = policy
        self._num_updates = 0
        """Of the policy, since the lagged one was renewed."""
        self._lagged: dict[str, Tensor] = {}
        """What differs between the two; empty where the policy itself always samples."""
        if settings.keeps_a_copy:
            self._lagged = {name: tensor.clone() for name, tensor in self._trained().items()}
        self.num_epochs = settings.num_epochs
        self.num_minibatches = settings.num_minibatches

    @contextmanager
    def sampling(self) -> Iterator[None]:
        self._renew_if_due()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def sampler(self) -> LanguageModel | None:
        if self._lag <= self._num_updates_of_step:
            return None
        return self._policy.copy_with(self._lagged)

    def num_steps_of_sampler(self) -> int:
        """A step that drops all its episodes makes no update, so there may be more."""
        self._renew_if_due()
        return math.ceil((self._lag - self._num_updates) / self._num_updates_of_step)

    def keeps(self, rollouts: Rollouts) -> Tensor:
        from ragen_apo.objectives.tensors import group_statistics

        return group_statistics(rollouts.returns_B, group_N=rollouts.group_B).std > 0

    def prepare(self, rollouts: Rollouts) -> OaplTargets:
        import torch

        from ragen_apo.values.estimator import soft_value

        v_hat_B = torch.zeros_like(rollouts.returns_B)
        for group in rollouts.group_B.unique():
            is_member_B = rollouts.group_B == group
            returns = rollouts.returns_B[is_member_B].tolist()
            v_hat_B[is_member_B] = soft_value(returns, beta=self._beta1)
        return OaplTargets(
            returns_B=rollouts.returns_B, v_hat_B=v_hat_B, sampler_lag=self._num_updates
        )

    def loss(self, targets: OaplTargets, micro: MicroBatch, scores: TokenScores) -> LossPart:
        from ragen_apo.objectives.apo import apo_loss, sequence_log_ratio
        from ragen_apo.training.step_metrics import LossPart

        against = {
            "reference_logprobs_BT": micro.tokens.sampled_logprobs_RT,
            "mask_BT": micro.mask_BT,
        }
        result = apo_loss(
            scores.logprobs_BT,
            **against,
            returns_B=targets.returns_B[micro.rows],
            v_star_B=targets.v_hat_B[micro.rows],
            settings=self._objective,
            num_sequences=micro.num_sequences,
        )
        log_ratio_B = sequence_log_ratio(scores.logprobs_BT.detach(), **against)
        return LossPart(
            loss=result.loss,
            per_sequence={"residual": result.residual, "sampler_log_ratio": log_ratio_B},
        )

    def update(self, *, rate_scale: float) -> dict[str, float]:
        self._num_updates += 1
        return {}

    def metrics(
        self, rollouts: Rollouts, targets: OaplTargets, collected: StepMetrics
    ) -> dict[str, float]:
        from ragen_apo.objectives.apo import residual_metrics
        from ragen_apo.training.algorithms.clipped_ratio import advantage_spread

        log_ratio_B = collected.vector("sampler_log_ratio").double()
        advantages_BT = rollouts.spread(targets.returns_B - targets.v_hat_B)
        return {
            **residual_metrics(collected.vector("residual")),
            **advantage_spread(advantages_BT, rollouts),
            "sampler_lag": targets.sampler_lag,
            "sampler_log_ratio_mean_abs": log_ratio_B.abs().mean().item(),
        }

    def state_tensors(self) -> Mapping[str, Tensor]:
        import torch

        if not self._lagged:
            return {}
        lagged = {f"{_LAGGED}{name}": tensor for name, tensor in self._lagged.items()}
        return {**lagged, _NUM_UPDATES: torch.tensor(self._num_updates)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        from ragen_apo.distributed.sharding import assign

        check_tensors(tensors, self.state_tensors())
        for name, lagged in self._lagged.items():
            assign(lagged, tensors[f"{_LAGGED}{name}"])
        if self._lagged:
            self._num_updates = int(tensors[_NUM_UPDATES])

    @property
    def _num_updates_of_step(self) -> int:
        """At most."""
        return self.num_epochs * self.num_minibatches

    def _renew_if_due(self) -> None:
        if self._num_updates >= self._lag:
            self._num_updates = 0
            trained = self._trained()
            for name, lagged in self._lagged.items():
                lagged.copy_(trained[name])

    def _trained(self) -> dict[str, Tensor]:
        from ragen_apo.policy.lora import trained_tensors

        return trained_tensors(self._policy.model)

    def _exchange(self) -> None:
        """Swaps the lagged tensors with those of the policy, in place: twice changes nothing."""
        trained = self._trained()
        for name, lagged in self._lagged.items():
            own = trained[name].clone()
            trained[name].copy_(lagged)
            lagged.copy_(own)
