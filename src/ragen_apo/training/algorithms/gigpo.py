"""GiGPO: the episode among those of its task, and each turn among those in the same state.

    A = A_episode + A_turn
    A_episode   GRPO's
    A_turn      (G - mean) / deviation over the turns of the task in this state;
                G: what the turn and later ones earned, discounted by gamma a turn

Feng et al., arXiv 2505.10978, with omega = 1. Assumes that equal states have equal keys, or equal
observations (`states`); a turn whose state is met once has A_turn = 0.

Axes: N turns of all trajectories, one after another; K turns of a trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ragen_apo.choices import Aggregation, TurnState
from ragen_apo.config.algorithms import Monitor, Traits
from ragen_apo.training.algorithms.policy_gradient import GroupConfig, PolicyGradientConfig

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
    monitors: ClassVar[Mapping[str, Monitor]] = {
        **PolicyGradientConfig.monitors,
        "shared_state_share": Monitor(
            "share of turns whose state another turn shares", title="Turns compared", share=True
        ),
    }
    name: str = "gigpo"
    aggregation: Aggregation = "sequence_mean_token_mean"
    """How token losses become one number. By default all episodes weigh alike, as in GRPO."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount from turn to turn in what a turn is compared by."""
    states: TurnState = "key"
    """What two turns in the same state have in common: the environment's `key`, which may hold the
    number of turns, or the `observation`, which may be the same in different states."""

    def advantages(self, rollouts: Rollouts) -> Tensor:
        import torch

        from ragen_apo.objectives.tensors import discounted_sum, group_statistics, sampled_or_zero
        from ragen_apo.objectives.turn_level import segment_sums

        rows, turns, anchors = _states(rollouts, self.states)
        device = rollouts.group_B.device
        row_N, turn_N, anchor_N = torch.tensor([rows, turns, anchors], device=device)

        zeros_BK = torch.zeros((len(rollouts), max(turns) + 1), device=device)
        mask_BT, turn_BT = rollouts.mask_BT, rollouts.turn_index_BT
        rewards_BK = segment_sums(
            rollouts.rewards_BT, mask_BT=mask_BT, segment_BT=turn_BT, like=zeros_BK
        )
        to_go_BK = discounted_sum(rewards_BK, decay=self.gamma)

        of_episode = self.statistics_of_tasks(rollouts)
        of_turn = group_statistics(to_go_BK[row_N, turn_N], group_N=anchor_N)
        advantages_BK = torch.zeros_like(to_go_BK)
        advantages_BK[row_N, turn_N] = of_episode.standardized()[row_N] + of_turn.standardized()
        return sampled_or_zero(advantages_BK.gather(1, turn_BT.clamp(min=0)), mask_BT)

    def metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """How many turns have another to be compared with; the others have A_turn = 0."""
        _, _, anchors = _states(rollouts, self.states)
        sizes = Counter(anchors).values()
        return {"shared_state_share": sum(size for size in sizes if size > 1) / len(anchors)}


def _states(rollouts: Rollouts, states: TurnState) -> tuple[list[int], list[int], list[int]]:
    """The trajectory, the number within it and the state of each turn [N]."""
    rows, turns, anchors = [], [], []
    ids: dict[object, int] = {}
    tasks = rollouts.group_B.tolist()
    for row, trajectory in enumerate(rollouts.trajectories):
        for number, turn in enumerate(trajectory.turns):
            state = turn.observation if states == "observation" else turn.state_key
            if state is None:  # unknown, and shared with no other
                state = (row, number)
            rows.append(row)
            turns.append(number)
            anchors.append(ids.setdefault((tasks[row], state), len(ids)))
    return rows, turns, anchors
