"""RLOO: each rollout against the mean of the task's other rollouts.

    A_i = R_i - mean of the others

Ahmadian et al., arXiv 2402.14740. The baseline leaves the rollout itself out, so the gradient is
unbiased. Assumes at least two rollouts of every task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ragen_apo.choices import Aggregation
from ragen_apo.config.algorithms import Traits
from ragen_apo.training.algorithms.policy_gradient import GroupConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.training.rollouts import Rollouts


class Rloo(GroupConfig):
    """RLOO: returns minus the mean return of the task's other rollouts."""

    traits: ClassVar[Traits] = Traits(
        label="RLOO",
        sentence="RLOO compares each rollout with the others of its task, without a critic",
        advantage="R − mean of the task’s other rollouts",
        compares_groups=True,
    )
    name: str = "rloo"
    aggregation: Aggregation = "sequence_mean_token_sum"
    """How token losses become one number; the default is what the algorithm's paper does."""

    def advantages(self, rollouts: Rollouts) -> Tensor:
        tasks = self.statistics_of_tasks(rollouts)
        if int(tasks.size.min()) < 2:
            alone = rollouts.group_B[tasks.size < 2].tolist()
            raise ValueError(
                "leaving one out needs at least 2 rollouts of every task, got one for group "
                f"{alone[0]} (and {len(alone) - 1} more): play each task several times or filter "
                "it"
            )
        # R - (n mean - R) / (n - 1) = (R - mean) n / (n - 1)
        return rollouts.spread(tasks.deviation * (tasks.size / (tasks.size - 1)))
