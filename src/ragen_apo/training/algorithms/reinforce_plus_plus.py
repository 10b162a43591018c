"""REINFORCE++: what follows a token, whitened over all tokens of the step.

    A_t = sum of the rewards from token t on;  mean 0 and deviation 1 over the step's tokens

Hu et al., arXiv 2501.03262; its KL penalty is `kl_in: reward`. One rollout per task suffices.
Statistics of the step compare easy with hard tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ragen_apo.config.algorithms import Traits
from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.training.rollouts import Rollouts


class ReinforcePlusPlus(PolicyGradientConfig):
    """REINFORCE++: whitened returns-to-go of tokens."""

    traits: ClassVar[Traits] = Traits(
        label="REINFORCE++",
        sentence="REINFORCE++ normalises the advantages of all tokens of a step, without a critic",
        advantage="What a token’s episode earns from there on, whitened over the step",
    )
    name: str = "reinforce_plus_plus"

    def advantages(self, rollouts: Rollouts) -> Tensor:
        from ragen_apo.objectives.tensors import discounted_sum, whiten

        mask_BT = rollouts.mask_BT
        to_go_BT = discounted_sum(rollouts.rewards_BT, mask_BT=mask_BT, decay=1.0)
        return whiten(to_go_BT, mask_BT=mask_BT)
