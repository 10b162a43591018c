"""What the samples of Stage 1 say of single moves: an action in a state.

    A_hat(s, a) = mean (r + V_hat(s')) - V_hat(s)   over the samples that did a in s

r is the stored reward of the turn, s' is the state after it, and V_hat after the end is 0. Along an
episode the sum is the return so far, plus the value of the current state, minus the value of the
first state. So branches of one episode can be compared by these numbers alone. A move that no
sample made has no number; the guess for it is 0, which is as good as its state. Pure. Only the
store is read, so no reward of an episode in progress is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from ragen_apo.types import Trajectory, TurnFlag
from ragen_apo.values.state_values import state_values


@dataclass(frozen=True)
class Move:
    """What was executed in a state."""

    state_key: str
    action: str
    is_readable: bool
    """False for a response without the agreed form, which is executed as an empty action."""


def move_advantages(trajectories: Iterable[Trajectory], *, beta: float) -> Mapping[Move, float]:
    """A_hat of every move that a trajectory has made; a turn without a state key counts for none,
    and so does one before it.

    `beta` as in `soft_value`.
    """
    sampled = list(trajectories)
    values = state_values(sampled, beta=beta, min_visits=1)
    gains: dict[Move, list[float]] = defaultdict(list)
    for trajectory in sampled:
        for turn, following in zip_longest(trajectory.turns, trajectory.turns[1:]):
            if turn.state_key is None:
                continue
            value_after = 0.0
            if following is not None:
                if following.state_key is None:
                    continue
                value_after = values[following.state_key]
            readable = TurnFlag.FORMAT_ERROR.value not in turn.flags
            gain = turn.reward + value_after - values[turn.state_key]
            gains[Move(turn.state_key, turn.action, readable)].append(gain)
    return {move: fmean(each) for move, each in gains.items()}
