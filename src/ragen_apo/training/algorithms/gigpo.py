"""GiGPO: the episode among those of its task, and each turn among those in the same state.

    A = A_episode + A_turn
    A_episode   GRPO's
    A_turn      (G - mean) / deviation over the turns of the task in this state;
                G: what the turn and later ones earned, discounted by gamma a turn

Feng et al., arXiv 2505.10978, with omega = 1. Assumes that equal states have equal keys; a
turn whose state is met once has A_turn = 0.

Axes: N turns of all trajectories, one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ragen_apo.choices import Aggregation
from ragen_apo.config.algorithms import Traits
from ragen_apo.training.algorithms.policy_gradient import GroupConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.training.rollouts import Rollouts


class Gigpo(GroupConfig):
    """GiGPO: advantages of episodes within their task and of turns within their state."""

    traits: ClassVar[Traits] = Traits(
        label="GiGPO",
        sentence="GiGPO compares rollouts of a task, and turns in the same state, without a critic",
        advantage="Episode: compared within its task; turn: within its state",
        compares_groups=True,
    )
    name: str = "gigpo"
    aggregation: Aggregation = "sequence_mean_token_mean"
    """How token losses become one number; the default is what the algorithm's paper does."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount from turn to turn in what a turn is compared by."""

    def advantages(self, rollouts: Rollouts) -> Tensor:
        import torch

        from ragen_apo.objectives.group_relative import gigpo_advantages
        from ragen_apo.objectives.tensors import spread_turns_over_tokens

        turns = [
            (row, index, turn.state_key)
            for row, trajectory in enumerate(rollouts.trajectories)
            for index, turn in enumerate(trajectory.turns)
        ]
        ids: dict[str, int] = {}
        # A turn whose state is unknown shares it with no other.
        states = [
            -number - 1 if key is None else ids.setdefault(key, len(ids))
            for number, (_, _, key) in enumerate(turns)
        ]
        device = rollouts.group_B.device
        row_N = torch.tensor([row for row, _, _ in turns], device=device)
        turn_N = torch.tensor([index for _, index, _ in turns], device=device)
        to_go_BK = _returns_to_go(rollouts, gamma=self.gamma)
        advantages_N = gigpo_advantages(
            rollouts.returns_B,
            group_B=rollouts.group_B,
            returns_to_go_N=to_go_BK[row_N, turn_N],
            trajectory_N=row_N,
            state_N=torch.tensor(states, device=device),
        )
        return spread_turns_over_tokens(
            advantages_N,
            sequence_N=row_N,
            turn_N=turn_N,
            turn_index_BT=rollouts.turn_index_BT,
        )


def _returns_to_go(rollouts: Rollouts, *, gamma: float) -> Tensor:
    """What each turn and those after it earned, discounted by turns [B, K]."""
    import torch

    from ragen_apo.objectives.tensors import discounted_sum
    from ragen_apo.objectives.turn_level import segment_sums

    num_turns = [len(trajectory.turns) for trajectory in rollouts.trajectories]
    zeros_BK = torch.zeros((len(num_turns), max(num_turns)), device=rollouts.group_B.device)
    rewards_BK = segment_sums(
        rollouts.rewards_BT,
        mask_BT=rollouts.mask_BT,
        segment_BT=rollouts.turn_index_BT,
        like=zeros_BK,
    )
    everywhere_BK = torch.ones_like(zeros_BK, dtype=torch.bool)
    return discounted_sum(rewards_BK, mask_BT=everywhere_BK, decay=gamma)
