"""Dr. GRPO: GRPO without its two divisions.

    A_i = R_i - mean of the task's rollouts;  token losses / (sequences x max_context_tokens)

Liu et al., arXiv 2503.20783. Neither rare successes nor short responses weigh more than others. The
mean contains the rollout itself, which shrinks the gradient by 1 - 1/group_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ragen_apo.choices import Aggregation
from ragen_apo.config.algorithms import Traits
from ragen_apo.training.algorithms.policy_gradient import GroupConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.training.rollouts import Rollouts


class DrGrpo(GroupConfig):
    """Dr. GRPO: GRPO without dividing by the deviation or by a response's length."""

    traits: ClassVar[Traits] = Traits(
        label="Dr. GRPO",
        sentence="Dr. GRPO compares several rollouts of a task with their mean, without a critic",
        advantage="R − mean of the task’s rollouts",
        compares_groups=True,
    )
    name: str = "dr_grpo"
    aggregation: Aggregation = "constant"
    """How token losses become one number; the default is what the algorithm's paper does."""

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return rollouts.spread(self.statistics_of_tasks(rollouts).deviation)
