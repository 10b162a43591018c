"""A*-PO: regression on the optimal advantage of a trajectory.

    A(tau) = (R - V*(x)) - beta2 Delta(tau),   Delta = sum over tokens of log pi - log pi_ref
    loss   = A^2 / (2 beta2)

Brantley et al., arXiv 2505.20686; derivations are in `objectives.apo`. One rollout per task, one
pass, no critic, no ratio. V* comes from Stage 1. Assumes that the policy that is updated sampled
the trajectories: then any V* leaves the expected gradient right, and a better one lowers its
variance.

`center_residuals` and `fit_values` look at the `training.tasks_per_step` trajectories of the step:
a filter chooses A*-PO's tasks before any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ragen_apo.choices import LengthNormalization, LossForm
from ragen_apo.config.algorithms import AlgorithmConfig, Monitor, Traits
from ragen_apo.config.section import NonNegative, Positive
from ragen_apo.training.algorithms.base import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.config import RunConfig
    from ragen_apo.policy.language_model import LanguageModel
    from ragen_apo.policy.scoring import TokenScores
    from ragen_apo.training.rollouts import MicroBatch, Rollouts
    from ragen_apo.training.step_metrics import LossPart, StepMetrics


RESIDUAL_MONITORS: Mapping[str, Monitor] = {
    "residual_mean": Monitor("residual, mean"),
    "residual_variance": Monitor("residual, variance", title="Residual variance"),
}
WEIGHTED = "−(advantage − β₂ Δ) Δ\nΔ = log π/π_ref"


class ValueConfig(AlgorithmConfig):
    """What A*-PO by trajectory and by turn have in common; `values` has the options of Stage 1."""

    monitors: ClassVar[Mapping[str, Monitor]] = {
        **RESIDUAL_MONITORS,
        "v_star_success_correlation": Monitor("correlation of V* with success"),
    }
    beta2: Positive = 0.05
    """Weight of the log ratio to the reference."""
    advantage_clamp: Positive | None = None
    """Limit of the residual on both sides; a Huber tail in the regression form."""
    center_residuals: bool = False
    """Subtract from each residual the mean of the step's other trajectories, before the clamp. The
    expected gradient stays the same, except with length_normalization `tokens`. Where all returns
    of a step are equal, no update is made (by turn only where no state has a value). Needs two
    tasks a step."""
    fit_values: bool = False
    """Subtract a + c V*, fitted to the other trajectories, instead of their mean. Where V* is
    noise, c cancels it. As with center_residuals, equal returns make no update. Needs three tasks
    a step, better 32."""

    def check(self, config: RunConfig) -> None:
        """Refuses to centre one trajectory, and to fit a line to one other."""
        for option, at_least in (("center_residuals", 2), ("fit_values", 3)):
            if getattr(self, option) and config.training.tasks_per_step < at_least:
                raise ValueError(
                    f"algorithm.{option} looks at a step's other trajectories; "
                    f"training.tasks_per_step must be at least {at_least}, "
                    f"got {config.training.tasks_per_step}"
                )

    @property
    def has_offset(self) -> bool:
        """Whether anything is subtracted from the residuals."""
        return self.center_residuals or self.fit_values

    def offset(self, residual_BS: Tensor, *, values_BS: Tensor, present_BS: Tensor) -> Tensor:
        """What is subtracted from the residuals [B, S] at states of these values."""
        from ragen_apo.objectives.apo import line_of_others, mean_of_others

        if self.fit_values:
            return line_of_others(residual_BS, values_BS=values_BS, present_BS=present_BS)
        return mean_of_others(residual_BS, present_BS=present_BS)[:, None].expand_as(residual_BS)

    def formula_details(self) -> str:
        """What else a reader of the formula has to know."""
        parts = [f"β₂ = {self.beta2:g}"]
        parts += ["V* fitted"] if self.fit_values else []
        parts += ["centred"] if self.center_residuals and not self.fit_values else []
        parts += [f"|A| ≤ {self.advantage_clamp:g}"] if self.advantage_clamp else []
        return ", ".join(parts)


class Apo(ValueConfig):
    """A*-PO: one residual per trajectory. The older key `apo.beta` sets values.beta1 and beta2."""

    traits: ClassVar[Traits] = Traits(
        label="A*-PO",
        sentence="A*-PO trains the agent with one rollout per task and step, without a critic",
        advantage="R − V*: the return minus the optimal value of the task",
        has_values=True,
    )
    name: str = "apo"
    loss: LossForm = "regression"
    """The squared residual, or the log-likelihood weighted with the detached residual."""
    length_normalization: LengthNormalization = "none"
    """`tokens` divides the log ratio by the sampled tokens: another algorithm."""
    kl_coefficient: NonNegative = 0.0
    """Weight of an added KL penalty. Without a clamp it acts as if beta2 were larger by it. A clamp
    does not limit it."""

    def formula(self) -> str:
        loss = WEIGHTED if self.loss == "weighted" else "(advantage − β₂ log π/π_ref)² / 2β₂"
        return f"{loss}\n{self.formula_details()}"

    def make(self, config: RunConfig, policy: LanguageModel) -> ApoAlgorithm:
        """The algorithm; it trains nothing but the policy."""
        return ApoAlgorithm(self)


@dataclass(frozen=True)
class ApoTargets:
    """Constants of the regression."""

    returns_B: Tensor
    v_star_B: Tensor
    offset_B: Tensor
    """What is subtracted from the residual."""


class ApoAlgorithm(Algorithm[ApoTargets]):
    """One pass over the step's trajectories, with one update."""

    def __init__(self, settings: Apo) -> None:
        from ragen_apo.objectives.apo import ApoSettings

        self._settings = settings
        self._objective = ApoSettings(
            beta2=settings.beta2,
            loss=settings.loss,
            length_normalization=settings.length_normalization,
            advantage_clamp=settings.advantage_clamp,
            kl_coefficient=settings.kl_coefficient,
        )

    def keeps(self, rollouts: Rollouts) -> Tensor:
        return differing(rollouts) if self._settings.has_offset else super().keeps(rollouts)

    def prepare(self, rollouts: Rollouts) -> ApoTargets:
        import torch

        from ragen_apo.objectives import apo

        returns_B, v_star_B = rollouts.returns_B, rollouts.v_star_B
        offset_B = torch.zeros_like(returns_B)
        if self._settings.has_offset:
            log_ratio_B = apo.sequence_log_ratio(
                rollouts.tokens.sampled_logprobs_RT,
                reference_logprobs_BT=rollouts.reference_logprobs_BT,
                mask_BT=rollouts.mask_BT,
            )
            objective, num_tokens_B = self._objective, rollouts.mask_BT.sum(dim=1)
            weight = objective.beta2
            if objective.length_normalization == "none" and objective.advantage_clamp is None:
                weight += objective.kl_coefficient  # it pushes as the residual's own KL does
            residual_B1 = apo.residual(
                apo.regressed_log_ratio(log_ratio_B, num_tokens_B, objective.length_normalization),
                returns_B=returns_B,
                v_star_B=v_star_B,
                beta2=weight,
            )[:, None]
            present_B1 = torch.ones_like(residual_B1, dtype=torch.bool)
            offset_B = self._settings.offset(
                residual_B1, values_BS=v_star_B[:, None], present_BS=present_B1
            )[:, 0]
        return ApoTargets(returns_B=returns_B, v_star_B=v_star_B, offset_B=offset_B)

    def loss(self, targets: ApoTargets, micro: MicroBatch, scores: TokenScores) -> LossPart:
        from ragen_apo.objectives.apo import apo_loss
        from ragen_apo.training.step_metrics import LossPart

        result = apo_loss(
            scores.logprobs_BT,
            reference_logprobs_BT=micro.reference_logprobs_BT,
            mask_BT=micro.mask_BT,
            returns_B=targets.returns_B[micro.rows],
            v_star_B=targets.v_star_B[micro.rows],
            settings=self._objective,
            num_sequences=micro.num_sequences,
            offset=targets.offset_B[micro.rows],
        )
        return LossPart(loss=result.loss, per_sequence={"residual": result.residual})

    def metrics(
        self, rollouts: Rollouts, targets: ApoTargets, collected: StepMetrics
    ) -> dict[str, float]:
        return residuals_and_values(rollouts, collected)


def differing(rollouts: Rollouts) -> Tensor:
    """Which episodes [B] say something beside the others of the step: none where all earn the same.

    What is left of their residuals then are errors of V* and differences in KL. However small they
    are, an optimiser that scales gradients makes a whole update of them.
    """
    import torch

    returns_B = rollouts.returns_B
    return torch.full_like(
        rollouts.group_B, bool(returns_B.min() < returns_B.max()), dtype=torch.bool
    )


def residuals_and_values(rollouts: Rollouts, collected: StepMetrics) -> dict[str, float]:
    """Monitors of A*-PO by trajectory and by turn."""
    import torch

    from ragen_apo.objectives.apo import residual_metrics, value_metrics

    success_B = torch.tensor([trajectory.success for trajectory in rollouts.trajectories])
    values = value_metrics(v_star_B=rollouts.v_star_B.cpu(), success_B=success_B)
    return residual_metrics(collected.vector("residual")) | values
