"""A*-PO in the trainer: regression on the optimal advantage of trajectories, or of turns.

One rollout per task, one pass, no critic, no ratio. V* comes from Stage 1. The equations are in
`objectives.apo` and `objectives.turn_level`, values of states in `values.state_values`.

`center_residuals` takes its means over the `training.tasks_per_step` trajectories of the step: a
filter chooses A*-PO's tasks before any step, and replay is refused beside it.

Axes: B trajectories, T token positions, S segments between states of known value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.config.algorithms import ApoConfig, TurnLevelConfig
from ragen_apo.objectives.apo import (
    ApoLoss,
    ApoSettings,
    apo_loss,
    apo_metrics,
    mean_of_others,
)
from ragen_apo.objectives.turn_level import (
    TurnLevelSettings,
    segment_log_ratios,
    segment_residuals,
    segment_sums,
    traced,
    turn_level_loss,
)
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.rollouts import MicroBatch, Rollouts
from ragen_apo.training.step_metrics import LossPart, StepFigures
from ragen_apo.values.state_values import segments


@dataclass(frozen=True)
class TrajectorySignals:
    """Constants of the regression."""

    returns_B: Tensor
    v_star_B: Tensor
    offset_B: Tensor
    """What is subtracted from the residual."""


class TrajectoryApo(Algorithm[TrajectorySignals]):
    """A*-PO as published: one residual per trajectory."""

    def __init__(self, apo: ApoConfig) -> None:
        self._settings = objective_settings(apo)
        self._centers = apo.center_residuals
        self._replays = apo.replay.num_trajectories_per_step > 0

    def prepare(self, rollouts: Rollouts) -> TrajectorySignals:
        returns_B, v_star_B = rollouts.returns_B, rollouts.v_star_B
        offset_B = torch.zeros_like(returns_B)
        if self._centers:
            at_sampling = apo_loss(
                rollouts.tokens.sampled_logprobs_BT,
                reference_logprobs_BT=rollouts.reference_logprobs_BT,
                mask_BT=rollouts.mask_BT,
                returns_B=returns_B,
                v_star_B=v_star_B,
                settings=self._settings,
                num_sequences=len(rollouts),
            )
            residual_B1 = at_sampling.residual[:, None]
            present_B1 = torch.ones_like(residual_B1, dtype=torch.bool)
            offset_B = mean_of_others(residual_B1, present_BS=present_B1)
        return TrajectorySignals(returns_B=returns_B, v_star_B=v_star_B, offset_B=offset_B)

    def loss(self, signals: TrajectorySignals, micro: MicroBatch, scores: TokenScores) -> LossPart:
        return _part(
            apo_loss(
                scores.logprobs_BT,
                reference_logprobs_BT=micro.reference_logprobs_BT,
                mask_BT=micro.mask_BT,
                returns_B=signals.returns_B[micro.places],
                v_star_B=signals.v_star_B[micro.places],
                settings=self._settings,
                num_sequences=micro.num_sequences,
                offset=signals.offset_B[micro.places],
            )
        )

    def metrics(
        self, rollouts: Rollouts, signals: TrajectorySignals, figures: StepFigures
    ) -> dict[str, float]:
        metrics = _residual_metrics(rollouts, figures)
        return metrics | _replay_metrics(figures) if self._replays else metrics


@dataclass(frozen=True)
class TurnSignals:
    """Segments of each trajectory; those that it does not have are 0."""

    segment_BT: Tensor
    """int64: the segment of each sampled token."""
    rewards_BS: Tensor
    values_BS: Tensor
    num_segments: int
    """Of all trajectories."""
    offset_B: Tensor
    """What is subtracted from the advantage of each of the trajectory's segments."""


class TurnLevelApo(Algorithm[TurnSignals]):
    """One residual per segment, and each segment's advantage a lambda-trace of those to come."""

    def __init__(self, apo: ApoConfig, turn_level: TurnLevelConfig) -> None:
        self._settings = TurnLevelSettings(
            beta2=apo.beta2, trace=turn_level.trace, advantage_clamp=apo.advantage_clamp
        )
        self._centers = apo.center_residuals

    def prepare(self, rollouts: Rollouts) -> TurnSignals:
        cuts = [
            segments(
                trajectory,
                task_value=rollouts.values.tasks[trajectory.task.task_id],
                values=rollouts.values.states,
            )
            for trajectory in rollouts.trajectories
        ]
        num_columns = max(len(parts) for parts in cuts)
        num_turns = max(len(trajectory.turns) for trajectory in rollouts.trajectories)
        values_BS = torch.zeros(len(cuts), num_columns)
        segment_of_turn_BH = torch.zeros(len(cuts), num_turns, dtype=torch.int64)
        for row, parts in enumerate(cuts):
            for column, part in enumerate(parts):
                values_BS[row, column] = part.value
                last_turn = part.first_turn + part.num_turns
                segment_of_turn_BH[row, part.first_turn : last_turn] = column
        device = rollouts.group_B.device
        values_BS = values_BS.to(device)
        segment_BT = segment_of_turn_BH.to(device).gather(1, rollouts.turn_index_BT.clamp(min=0))
        rewards_BS = segment_sums(
            rollouts.rewards_BT, mask_BT=rollouts.mask_BT, segment_BT=segment_BT, like=values_BS
        )
        offset_B = torch.zeros_like(values_BS[:, 0])
        if self._centers:
            advantage_BS = self._advantages_at_sampling(rollouts, segment_BT, rewards_BS, values_BS)
            num_segments_B = torch.tensor([len(parts) for parts in cuts], device=device)
            place_S = torch.arange(num_columns, device=device)
            present_BS = place_S < num_segments_B[:, None]
            offset_B = mean_of_others(advantage_BS, present_BS=present_BS)
        return TurnSignals(
            segment_BT=segment_BT,
            rewards_BS=rewards_BS,
            values_BS=values_BS,
            num_segments=sum(len(parts) for parts in cuts),
            offset_B=offset_B,
        )

    def _advantages_at_sampling(
        self, rollouts: Rollouts, segment_BT: Tensor, rewards_BS: Tensor, values_BS: Tensor
    ) -> Tensor:
        log_ratio_BS = segment_log_ratios(
            rollouts.tokens.sampled_logprobs_BT,
            reference_logprobs_BT=rollouts.reference_logprobs_BT,
            mask_BT=rollouts.mask_BT,
            segment_BT=segment_BT,
            like=values_BS,
        )
        residual_BS = segment_residuals(
            log_ratio_BS, rewards_BS=rewards_BS, values_BS=values_BS, beta2=self._settings.beta2
        )
        return traced(residual_BS, trace=self._settings.trace)

    def loss(self, signals: TurnSignals, micro: MicroBatch, scores: TokenScores) -> LossPart:
        return _part(
            turn_level_loss(
                scores.logprobs_BT,
                reference_logprobs_BT=micro.reference_logprobs_BT,
                mask_BT=micro.mask_BT,
                segment_BT=micro.cut(signals.segment_BT),
                rewards_BS=signals.rewards_BS[micro.places],
                values_BS=signals.values_BS[micro.places],
                settings=self._settings,
                num_sequences=micro.num_sequences,
                offset=signals.offset_B[micro.places],
            )
        )

    def metrics(
        self, rollouts: Rollouts, signals: TurnSignals, figures: StepFigures
    ) -> dict[str, float]:
        metrics = {
            **_residual_metrics(rollouts, figures),
            "num_segments_mean": signals.num_segments / len(rollouts),
        }
        # An episode's first turn opens a segment whatever is known.
        num_later_turns = sum(len(episode.turns) - 1 for episode in rollouts.trajectories)
        if num_later_turns:
            num_known = signals.num_segments - len(rollouts)
            metrics["known_turn_share"] = num_known / num_later_turns
        return metrics


def objective_settings(apo: ApoConfig) -> ApoSettings:
    """The part of the configuration that the trajectory loss reads."""
    return ApoSettings(
        beta2=apo.beta2,
        loss=apo.loss,
        length_normalization=apo.length_normalization,
        advantage_clamp=apo.advantage_clamp,
        kl_coefficient=apo.kl_coefficient,
    )


def _part(loss: ApoLoss) -> LossPart:
    return LossPart(loss=loss.loss, per_sequence={"residual": loss.residual})


def _residual_metrics(rollouts: Rollouts, figures: StepFigures) -> dict[str, float]:
    own = rollouts.take(rollouts.age_B == 0)
    successes = [float(trajectory.success) for trajectory in own.trajectories]
    return apo_metrics(
        residual_B=figures.own("residual"),
        log_ratio_B=figures.own("log_ratio"),
        kl_B=figures.own("kl"),
        num_tokens_B=figures.own("num_tokens"),
        v_star_B=own.v_star_B.cpu(),
        success_B=torch.tensor(successes),
    )


def _replay_metrics(figures: StepFigures) -> dict[str, float]:
    age_B, residual_B = figures.replayed("age"), figures.replayed("residual").double()
    metrics: dict[str, float] = {
        "num_replayed": len(age_B),
        "num_replayed_tokens": int(figures.replayed("num_tokens").sum()),
    }
    if len(age_B) > 0:
        metrics |= {
            "replayed_age_mean": age_B.double().mean().item(),
            "replayed_residual_mean": residual_B.mean().item(),
            "replayed_residual_variance": residual_B.var(correction=0).item(),
        }
    return metrics
