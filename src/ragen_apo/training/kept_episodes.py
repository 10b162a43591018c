"""Some episodes of a step as rows of rollouts.jsonl, for people who want to see how it learns.

Consumes the step's rollouts, before any update; produces the rows of `episodes.jsonl` with more:

    step                          from 1, as in metrics.jsonl; `episode` is the number in the step
    turns.token_ids, .logprobs    as sampled
    turns.reference_logprobs      of these tokens; none where the step did not train on them
    turns.v_star                  V* of the state the turn was written in, where it is known

Nothing is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ragen_apo.evaluation.failures import failure_pattern, reports_target
from ragen_apo.evaluation.summary import episode_row
from ragen_apo.training.rollouts import Rollouts
from ragen_apo.types import Trajectory
from ragen_apo.values.state_values import ReferenceValues

NUM_DIGITS = 4
"""Of log-probabilities: enough to look at, and half of the file."""


def kept_episodes(
    rollouts: Rollouts, *, scored: Rollouts | None, num_episodes: int
) -> list[dict[str, Any]]:
    """The rows of the best episode, of the worst and of the first ones, in the step's order.

    `scored` are those of them that the step trained on, with the reference's log-probabilities.
    """
    trajectories = rollouts.trajectories
    returns = [trajectory.episode_return for trajectory in trajectories]
    target_reported = reports_target(trajectories)
    rows: list[dict[str, Any]] = []
    for index in chosen(returns, num_episodes=num_episodes):
        trajectory = trajectories[index]
        pattern = failure_pattern(trajectory, target_reported=target_reported)
        row = episode_row(
            trajectory, episode=index, policy=trajectory.policy_version, pattern=pattern
        )
        row["step"] = rollouts.step + 1
        reference = _of_turns(trajectory, scored, lambda each: each.reference_logprobs_BT)
        by_regression = _of_turns(trajectory, scored, lambda each: each.state_values_BT)
        for number, turn in enumerate(trajectory.turns):
            row["turns"][number] |= {
                "token_ids": list(turn.response_token_ids),
                "logprobs": _rounded(turn.logprobs),
                "reference_logprobs": _rounded(reference[number]),
                "v_star": next(
                    iter(by_regression[number]), _stored_value(trajectory, number, rollouts.values)
                ),
            }
        rows.append(row)
    return rows


def chosen(returns: Sequence[float], *, num_episodes: int) -> list[int]:
    """The indices of the best return, of the worst and of the first ones; of equals the first."""
    indices = range(len(returns))
    best, worst = max(indices, key=returns.__getitem__), min(indices, key=returns.__getitem__)
    return sorted(list(dict.fromkeys([best, worst, *indices]))[:num_episodes])


def _of_turns(
    trajectory: Trajectory, scored: Rollouts | None, read: Callable[[Rollouts], Tensor | None]
) -> list[list[float]]:
    """What `read` says of each turn's tokens; of none where it, or the step, has nothing."""
    trained_on = () if scored is None else scored.trajectories
    row = next((row for row, each in enumerate(trained_on) if each is trajectory), None)
    if scored is None or row is None or (values_BT := read(scored)) is None:
        return [[] for _ in trajectory.turns]
    turn_T, values_T = scored.turn_index_BT[row].cpu(), values_BT[row].cpu()
    return [values_T[turn_T == number].tolist() for number in range(len(trajectory.turns))]


def _rounded(logprobs: Sequence[float]) -> list[float]:
    return [round(logprob, NUM_DIGITS) for logprob in logprobs]


def _stored_value(trajectory: Trajectory, number: int, values: ReferenceValues) -> float | None:
    """V* of the task in the first turn, of the state later on."""
    if number == 0:
        return values.tasks.get(trajectory.task.task_id)
    return values.states.get(trajectory.turns[number].state_key or "")
