"""GRPO: each rollout against the others of its task, in standard deviations.

    A_i = (R_i - mean of the task's rollouts) / (their standard deviation + eps)

Shao et al., arXiv 2402.03300. Assumes that the rollouts of a task start in the same state. Dividing
by the deviation weighs tasks by how rarely they vary, which is not the gradient of the return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ragen_apo.choices import Aggregation
from ragen_apo.config.algorithms import Traits
from ragen_apo.training.algorithms.policy_gradient import GroupConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.training.rollouts import Rollouts


class Grpo(GroupConfig):
    """GRPO: returns in standard deviations of their task's rollouts."""

    traits: ClassVar[Traits] = Traits(
        label="GRPO",
        sentence="GRPO compares several rollouts of a task with each other, without a critic",
        advantage="(R − mean) / deviation of the task’s rollouts",
        compares_groups=True,
    )
    name: str = "grpo"
    aggregation: Aggregation = "sequence_mean_token_mean"
    """How token losses become one number; the default is what the algorithm's paper does."""

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return rollouts.spread(self.statistics_of_tasks(rollouts).standardized())
