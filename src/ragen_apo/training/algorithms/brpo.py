"""BRPO: each episode against all of its step.

    A_i = (R_i - mean of the step) / (standard deviation of the step + eps)

RAGEN, arXiv 2504.20073. Needs no group of rollouts of one task. It compares easy with hard tasks:
an easy task's failure can look better than it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ragen_apo.config.algorithms import Traits
from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.training.rollouts import Rollouts


class Brpo(PolicyGradientConfig):
    """BRPO: returns in standard deviations of the step's episodes."""

    traits: ClassVar[Traits] = Traits(
        label="BRPO",
        sentence="BRPO compares all episodes of a step with each other, without a critic",
        advantage="(R − mean) / deviation of the step’s episodes",
    )
    name: str = "brpo"

    @property
    def min_episodes_per_step(self) -> int:
        return 2

    def advantages(self, rollouts: Rollouts) -> Tensor:
        from ragen_apo.objectives.tensors import check_comparable, group_statistics, one_group

        step = group_statistics(rollouts.returns_B, group_N=one_group(rollouts.returns_B))
        check_comparable(step)
        return rollouts.spread(step.standardized())
