"""A*-PO by turn: one residual per segment between two states of known value.

    delta_s = r_s + V*(next state) - V*(own state) - beta2 Delta_s
    A_s     = sum over l >= 0 of trace^l delta_{s+l}
    loss    = - sum over segments of detach(A_s) Delta_s

Equations are in `objectives.turn_level`; the trace is GAE's lambda (Schulman et al., arXiv
1506.02438). Values of states are the store's, for states with a key that Stage 1 visited
(`values.state_values`; equal states must have equal keys), or those of a regression
(`values.regression`), which gives every turn one. With trace 1 the expected gradient is that of
`apo` for any values; with 0 it relies on them. These values count chance as skill. So in a
stochastic environment only trace 1 is right, and any other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ragen_apo.config.algorithms import Monitor, Traits
from ragen_apo.config.section import Count
from ragen_apo.training.algorithms.apo import WEIGHTED, ValueConfig, differing, residuals_and_values
from ragen_apo.training.algorithms.base import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from ragen_apo.config import RunConfig
    from ragen_apo.policy.language_model import LanguageModel
    from ragen_apo.policy.scoring import TokenScores
    from ragen_apo.training.rollouts import MicroBatch, Rollouts
    from ragen_apo.training.step_metrics import LossPart, StepMetrics


class ApoTurn(ValueConfig):
    """A*-PO on the turns between states of known value."""

    traits: ClassVar[Traits] = Traits(
        label="A*-PO by turn",
        sentence="A*-PO by turn credits each turn by the change in V*, without a critic",
        advantage="Per segment: reward + V* of the next state − V* of its own",
        has_values=True,
    )
    monitors: ClassVar[Mapping[str, Monitor]] = {
        **ValueConfig.monitors,
        "num_segments_mean": Monitor("segments between states of known value, per episode"),
        "known_turn_share": Monitor(
            "share of turns in states of known value", title="Turns in known states", share=True
        ),
    }
    name: str = "apo_turn"
    trace: Annotated[float, Field(ge=0, le=1)] = 0.9
    """lambda: 0 relies on the values of states, 1 only on what was earned after them. Must be 1 in
    an environment that is not deterministic."""
    min_visits: Count = 2
    """Number of reference episodes that must visit a state before its value is used. Values by
    regression (values.estimator) have no such number: it counts only for distillation.credit turn
    then."""

    @property
    def min_state_visits(self) -> int:
        return self.min_visits

    def formula(self) -> str:
        return f"{WEIGHTED}\n{self.formula_details()}, λ = {self.trace:g}"

    def check_environment(self, *, deterministic: bool) -> None:
        """Refuses to trust values that count luck as skill."""
        if self.trace < 1 and not deterministic:
            raise ValueError(
                "it is stochastic, and the values of states count luck as skill, which "
                f"algorithm.trace {self.trace:g} trusts (docs/algorithm.md); set it to 1, which is "
                "right with any values"
            )

    def make(self, config: RunConfig, policy: LanguageModel) -> ApoTurnAlgorithm:
        """The algorithm; it trains nothing but the policy."""
        return ApoTurnAlgorithm(self)


@dataclass(frozen=True)
class TurnTargets:
    """Segments of each trajectory; those that it does not have are 0."""

    segment_BT: Tensor
    """int64: the segment of each sampled token."""
    rewards_BS: Tensor
    values_BS: Tensor
    num_segments: int
    """Of all trajectories."""
    offset_BS: Tensor
    """What is subtracted from the advantage of each segment."""


class ApoTurnAlgorithm(Algorithm[TurnTargets]):
    """One pass over the step's trajectories, with one update."""

    def __init__(self, settings: ApoTurn) -> None:
        from ragen_apo.objectives.turn_level import TurnLevelSettings

        self._objective = TurnLevelSettings(
            beta2=settings.beta2, trace=settings.trace, advantage_clamp=settings.advantage_clamp
        )
        self._settings = settings

    def keeps(self, rollouts: Rollouts) -> Tensor:
        """Where states have values, turns differ although the returns are equal."""
        by_turn = bool(rollouts.values.states) or rollouts.values.regression is not None
        is_centred = self._settings.has_offset and not by_turn
        return differing(rollouts) if is_centred else super().keeps(rollouts)

    def prepare(self, rollouts: Rollouts) -> TurnTargets:
        import torch

        from ragen_apo.objectives.turn_level import segment_sums

        by_turn = rollouts.state_values_BT is not None
        values_BS, segment_BT, num_segments_B = (_every_turn if by_turn else _between_known)(
            rollouts
        )
        rewards_BS = segment_sums(
            rollouts.rewards_BT, mask_BT=rollouts.mask_BT, segment_BT=segment_BT, like=values_BS
        )
        offset_BS = torch.zeros_like(values_BS)
        if self._settings.has_offset:
            advantage_BS = self._advantages_at_sampling(rollouts, segment_BT, rewards_BS, values_BS)
            index_S = torch.arange(values_BS.shape[1], device=values_BS.device)
            present_BS = index_S < torch.tensor(num_segments_B, device=values_BS.device)[:, None]
            offset_BS = self._settings.offset(
                advantage_BS, values_BS=values_BS, present_BS=present_BS
            )
        return TurnTargets(
            segment_BT=segment_BT,
            rewards_BS=rewards_BS,
            values_BS=values_BS,
            num_segments=sum(num_segments_B),
            offset_BS=offset_BS,
        )

    def _advantages_at_sampling(
        self, rollouts: Rollouts, segment_BT: Tensor, rewards_BS: Tensor, values_BS: Tensor
    ) -> Tensor:
        from ragen_apo.objectives.turn_level import segment_log_ratios, segment_residuals, traced

        log_ratio_BS = segment_log_ratios(
            rollouts.tokens.sampled_logprobs_RT,
            reference_logprobs_BT=rollouts.reference_logprobs_BT,
            mask_BT=rollouts.mask_BT,
            segment_BT=segment_BT,
            like=values_BS,
        )
        residual_BS = segment_residuals(
            log_ratio_BS, rewards_BS=rewards_BS, values_BS=values_BS, beta2=self._objective.beta2
        )
        return traced(residual_BS, trace=self._objective.trace)

    def loss(self, targets: TurnTargets, micro: MicroBatch, scores: TokenScores) -> LossPart:
        from ragen_apo.objectives.turn_level import turn_level_loss
        from ragen_apo.training.step_metrics import LossPart

        result = turn_level_loss(
            scores.logprobs_BT,
            reference_logprobs_BT=micro.reference_logprobs_BT,
            mask_BT=micro.mask_BT,
            segment_BT=micro.cut(targets.segment_BT),
            rewards_BS=targets.rewards_BS[micro.rows],
            values_BS=targets.values_BS[micro.rows],
            settings=self._objective,
            num_sequences=micro.num_sequences,
            offset=targets.offset_BS[micro.rows],
        )
        return LossPart(loss=result.loss, per_sequence={"residual": result.residual})

    def metrics(
        self, rollouts: Rollouts, targets: TurnTargets, collected: StepMetrics
    ) -> dict[str, float]:
        metrics = {
            **residuals_and_values(rollouts, collected),
            "num_segments_mean": targets.num_segments / len(rollouts),
        }
        # An episode's first turn opens a segment whatever is known.
        num_later_turns = sum(len(episode.turns) - 1 for episode in rollouts.trajectories)
        if num_later_turns:
            num_known = targets.num_segments - len(rollouts)
            metrics["known_turn_share"] = num_known / num_later_turns
        return metrics


def _every_turn(rollouts: Rollouts) -> tuple[Tensor, Tensor, list[int]]:
    """Each turn is a segment, with the value that the regression gives its state.

    Values [B, S], the segment of each sampled token [B, T], and the segments of each trajectory.
    """
    import torch

    assert rollouts.state_values_BT is not None
    num_turns_B = [len(trajectory.turns) for trajectory in rollouts.trajectories]
    most = max(num_turns_B)
    # What was not sampled goes to a column behind the last turn.
    turn_BT = torch.where(rollouts.mask_BT, rollouts.turn_index_BT, most)
    zeros_BS = rollouts.state_values_BT.new_zeros(len(turn_BT), most + 1)
    values_BS = zeros_BS.scatter(1, turn_BT, rollouts.state_values_BT)[:, :most]
    return values_BS, turn_BT.clamp(max=most - 1), num_turns_B


def _between_known(rollouts: Rollouts) -> tuple[Tensor, Tensor, list[int]]:
    """The segments between states whose value the store has; as `_every_turn`."""
    import torch

    from ragen_apo.values.state_values import segments

    cuts = [
        segments(
            trajectory,
            task_value=rollouts.values.tasks[trajectory.task.task_id],
            values=rollouts.values.states,
        )
        for trajectory in rollouts.trajectories
    ]
    num_segments_B = [len(parts) for parts in cuts]
    num_turns = max(len(trajectory.turns) for trajectory in rollouts.trajectories)
    values_BS = torch.zeros(len(cuts), max(num_segments_B))
    segment_of_turn_BK = torch.zeros(len(cuts), num_turns, dtype=torch.int64)
    for row, parts in enumerate(cuts):
        for column, part in enumerate(parts):
            values_BS[row, column] = part.value
            last_turn = part.first_turn + part.num_turns
            segment_of_turn_BK[row, part.first_turn : last_turn] = column
    device = rollouts.group_B.device
    segment_BT = segment_of_turn_BK.to(device).gather(1, rollouts.turn_index_BT.clamp(min=0))
    return values_BS.to(device), segment_BT, num_segments_B
