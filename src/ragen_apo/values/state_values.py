"""V* of the states that Stage 1 visited on its way, for turn-level A*-PO.

Consumes the reference's trajectories, whose turns name the state they were written in, and produces
values of states and, for a trajectory of the policy, the segments between known states. Pure.

    V_hat(s) = beta log mean exp(G / beta),   G = return-to-go of the reference from s

It needs no more episodes: the trajectories of a task in Stage 1 share states.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ragen_apo.types import Trajectory
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.regression import ValueRegression


@dataclass(frozen=True)
class ReferenceValues:
    """What Stage 2 reads of Stage 1: V* under the reference; empty for algorithms without V*."""

    tasks: Mapping[str, float] = field(default_factory=dict)
    """V* by task id."""
    states: Mapping[str, float] = field(default_factory=dict)
    """V* by state key, of states that were visited often enough."""
    regression: ValueRegression | None = None
    """V* of any state, in the place of `states`."""


@dataclass(frozen=True)
class Segment:
    """Turns of one episode from a state of known value up to the next such state, or the end."""

    first_turn: int
    num_turns: int
    reward: float
    """Sum of the turns' rewards."""
    value: float
    """V_hat of the state in which the first turn was written."""


def state_values(
    trajectories: Iterable[Trajectory], *, beta: float, min_visits: int
) -> dict[str, float]:
    """V_hat of every state that at least `min_visits` of the trajectories visit.

    A trajectory counts once a state, from its first visit, so the samples are independent. Turns
    without a state key count for no state. `beta` as in `soft_value`.
    """
    if min_visits < 1:
        raise ValueError(f"min_visits must be at least 1, got {min_visits}")
    samples_of: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        first_visits: dict[str, float] = {}
        turns = list(zip(trajectory.turns, returns_to_go(trajectory), strict=True))
        for turn, to_go in reversed(turns):
            if turn.state_key is not None:
                first_visits[turn.state_key] = to_go
        for state_key, value in first_visits.items():
            samples_of[state_key].append(value)
    return {
        state_key: soft_value(samples, beta=beta)
        for state_key, samples in samples_of.items()
        if len(samples) >= min_visits
    }


def returns_to_go(trajectory: Trajectory) -> list[float]:
    """Of each turn, what is earned in it and in those after it, added up from the end."""
    rewards = [turn.reward for turn in reversed(trajectory.turns)]
    return list(itertools.accumulate(rewards, initial=0.0))[:0:-1]


def state_coverage(
    trajectories: Iterable[Trajectory], *, min_visits: int
) -> dict[str, int | float | None]:
    """How many of the visited states `state_values` gives a value, as JSON values.

    `share_turns_known` is over the turns after each episode's first: the share in states that
    enough *other* episodes visited, an estimate for new episodes. None without such turns.
    """
    num_visits: Counter[str] = Counter()
    num_later_turns: Counter[str | None] = Counter()
    for trajectory in trajectories:
        num_visits.update(
            {turn.state_key for turn in trajectory.turns if turn.state_key is not None}
        )
        num_later_turns.update(turn.state_key for turn in trajectory.turns[1:])
    total = num_later_turns.total()
    known = sum(
        num_later_turns[state_key]
        for state_key, visits in num_visits.items()
        if visits - 1 >= min_visits
    )
    return {
        "num_states": len(num_visits),
        "num_known_states": sum(visits >= min_visits for visits in num_visits.values()),
        "share_turns_known": known / total if total else None,
    }


def segments(
    trajectory: Trajectory, *, task_value: float, values: Mapping[str, float]
) -> list[Segment]:
    """Cuts an episode at the states whose value is known; the first turn opens the first segment.

    `task_value` is V_hat of the first state. Where no later state is known, the whole episode is
    one segment: the trajectory form of A*-PO. The values and rewards telescope: the sum over
    segments of (reward + next value - value), with 0 after the end, is return - `task_value`.
    """
    starts = [(0, task_value)] + [
        (index, values[turn.state_key])
        for index, turn in enumerate(trajectory.turns)
        if index > 0 and turn.state_key is not None and turn.state_key in values
    ]
    ends = [start for start, _ in starts[1:]] + [len(trajectory.turns)]
    return [
        Segment(
            first_turn=start,
            num_turns=end - start,
            reward=sum(turn.reward for turn in trajectory.turns[start:end]),
            value=value,
        )
        for (start, value), end in zip(starts, ends, strict=True)
    ]


def turn_weights(
    trajectory: Trajectory,
    *,
    task_value: float,
    values: Mapping[str, float],
    beta: float,
    most: float,
) -> list[float]:
    """pi*/pi_ref of each turn of an episode of pi_ref: that of the segment it belongs to.

    exp((reward + V_hat(next state) - V_hat(own state)) / beta), V_hat after the end 0; arguments
    as in `segments`, beta > 0. The product over segments is the weight of the whole episode.

    No weight is larger than `most`. None of n episodes can weigh more than n. A turn could weigh up
    to exp(1 / beta), if others succeed from the next state and V_hat of this state does not include
    them.
    """
    parts = segments(trajectory, task_value=task_value, values=values)
    next_values = [part.value for part in parts[1:]] + [0.0]
    return [
        math.exp(min((part.reward + after - part.value) / beta, math.log(most)))
        for part, after in zip(parts, next_values, strict=True)
        for _ in range(part.num_turns)
    ]
