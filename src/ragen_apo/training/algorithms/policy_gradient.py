"""What all algorithms with a clipped ratio have in common: their settings.

    rewards  -= coefficient KL               kl_in: reward
    loss      = clipped(A, pi / pi_old) + coefficient KL - coefficient H

pi_old is the policy before the first update of a step. In float32 that is what the local engine
recorded, up to `logprob_gap_max`. Ratios to a sampler that rounds otherwise (bfloat16, a server)
would be of its rounding, so there the trainer computes pi_old itself, as verl does. An algorithm
without a critic is one function, from the rollouts of a step to an advantage for each sampled
token; `clipped_ratio` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ragen_apo.choices import Aggregation, KlPlace, NormalizationGrouping, NormalizationMethod
from ragen_apo.config.algorithms import AlgorithmConfig, Monitor
from ragen_apo.config.section import LARGEST, Count, GroupSize, NonNegative, Section, Size

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.config import RunConfig
    from ragen_apo.objectives.tensors import GroupStatistics
    from ragen_apo.policy.language_model import LanguageModel
    from ragen_apo.training.algorithms.base import Algorithm
    from ragen_apo.training.rollouts import Rollouts

ADVANTAGE_MONITORS: Mapping[str, Monitor] = {
    "advantage_mean": Monitor("advantage of tokens, mean"),
    "advantage_std": Monitor(
        "advantage of tokens, standard deviation", title="Spread of advantages"
    ),
}


class RewardNormalizationConfig(Section):
    """What is done to returns before advantages are formed."""

    method: NormalizationMethod = "identity"
    """Subtract the mean; also divide by the standard deviation; also clamp to [-1, 3]. A changed
    return is paid at the end of the episode. GRPO's own division undoes the first two."""
    grouping: NormalizationGrouping = "batch"
    """Whose statistics: of rollouts of the same task (`state`), of the step (`batch`), or of the
    same category, which in a mixture is the environment."""


class PolicyGradientConfig(AlgorithmConfig):
    """Updates, clipping, KL and entropy of a step."""

    monitors: ClassVar[Mapping[str, Monitor]] = {
        **ADVANTAGE_MONITORS,
        "clip_fraction": Monitor("share of clipped tokens", share=True),
    }
    group_size: Size = 1
    """Rollouts per task."""
    num_epochs: Count = 1
    """Passes over the rollouts of a step."""
    num_minibatches: Size = 1
    """Updates of a pass."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far below 1 a token's ratio still has a gradient; 1 for no limit."""
    clip_high: NonNegative = 0.2
    """How far above 1 a token's ratio still has a gradient; 0.28 is clip-higher (DAPO)."""
    importance_cap: Annotated[float, Field(ge=1, le=LARGEST)] | None = None
    """Limit of the weight of a token's loss. The weight is pi_old divided by the probability that
    the sampler gave the token (truncated importance sampling). Null for no weights. For rollouts by
    servers or in bfloat16."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; the default is what the algorithm's paper does."""
    kl_in: KlPlace = "loss"
    """Where the KL penalty is: `loss` adds (log pi/pi_ref)^2 / 2 of each token to the loss,
    `reward` subtracts log pi/pi_ref from the token's reward."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL penalty to the reference."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""
    reward_normalization: RewardNormalizationConfig = RewardNormalizationConfig()

    @property
    def rollouts_per_task(self) -> int:
        return self.group_size

    def formula(self) -> str:
        limits = f"clip: {1 - self.clip_low:g} to {1 + self.clip_high:g}"
        return f"−min(ρ A, clip(ρ) A)\nρ = π/π_old\n{limits}"

    def check(self, config: RunConfig) -> None:
        """Refuses statistics of one rollout."""
        normalized = self.reward_normalization
        by_state = normalized.method != "identity" and normalized.grouping == "state"
        if by_state and self.group_size == 1:
            raise ValueError(
                "algorithm.reward_normalization by state compares rollouts of a task, and "
                f"{self.name} rolls each task out once with group_size = 1; use grouping batch or "
                "raise group_size"
            )
        by_batch = normalized.method != "identity" and normalized.grouping == "batch"
        if by_batch and config.training.tasks_per_step * self.group_size < 2:
            raise ValueError(
                "algorithm.reward_normalization by batch compares the episodes of a step, and "
                "there is one; raise training.tasks_per_step"
            )

    def normalized(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with normalised returns, as in RAGEN (arXiv 2504.20073).

        Equal returns, and those of a group of one, become 0.
        """
        method, grouping = self.reward_normalization.method, self.reward_normalization.grouping
        if method == "identity":
            return rollouts
        import torch

        from ragen_apo.objectives.tensors import group_statistics, one_group

        group_B = rollouts.group_B if grouping == "state" else one_group(rollouts.returns_B)
        if grouping == "category":
            names = [trajectory.task.category for trajectory in rollouts.trajectories]
            ids = [sorted(set(names)).index(name) for name in names]
            group_B = torch.tensor(ids, device=rollouts.group_B.device)
        groups = group_statistics(rollouts.returns_B, group_N=group_B)
        returns_B = groups.deviation if method == "mean" else groups.standardized()
        if method == "asym_clip":
            # Limits how hard a failure is punished, and leaves a rare success its size.
            returns_B = returns_B.clamp(min=-1.0, max=3.0)
        return rollouts.with_returns(returns_B)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """An advantage for each sampled token [B, T], 0 elsewhere; no gradient."""
        raise NotImplementedError

    def metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """What the algorithm reports of a step besides its advantages, by name."""
        return {}

    def make(self, config: RunConfig, policy: LanguageModel) -> Algorithm:
        """The trainer's side of it, with these advantages."""
        from ragen_apo.training.algorithms.clipped_ratio import ClippedRatio

        return ClippedRatio(self, max_tokens=config.agent.max_context_tokens)


class GroupConfig(PolicyGradientConfig):
    """Several rollouts of one task are compared."""

    group_size: GroupSize = 8
    """Rollouts per task."""

    def statistics_of_tasks(self, rollouts: Rollouts) -> GroupStatistics:
        """The returns within their tasks; raises ValueError where no task has two rollouts."""
        from ragen_apo.objectives.tensors import check_comparable, group_statistics

        tasks = group_statistics(rollouts.returns_B, group_N=rollouts.group_B)
        check_comparable(tasks)
        return tasks
