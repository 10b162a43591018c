"""Why an episode failed, as one of five named patterns.

Consumes finished trajectories of any environment; reads flags, actions and observations, never
token ids. Each failed episode has exactly one pattern, the first of this list that fits:

1. `invalid_format`: half or more of the turns carry a format error or an invalid action. Such a
   policy has hardly played, so nothing else it did is worth a name.
2. `wrong_purchase`: the environment ended the episode and it was no success. The agent decided.
3. `search_loop`: half or more of the turns (at least two) repeat an earlier turn: nearly the same
   action, answered with nearly the same text. An action that is repeated and brings something new
   (the next page, one more step of a walk) is no repeat.
4. `unreachable_target`: no turn carries `TurnFlag.TARGET_SHOWN`, so the goal was never on screen.
   Only where the environment emits this flag at all; see `reports_target`.
5. `timeout`: every other episode that was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ragen_apo.types import Trajectory, Turn, TurnFlag

NEAR_IDENTICAL_OVERLAP = 0.75
"""Texts that share this part of their words (Jaccard) count as nearly the same."""


class FailurePattern(str, Enum):
    """The name of a way to fail, in the order in which reports list them."""

    SEARCH_LOOP = "search_loop"
    WRONG_PURCHASE = "wrong_purchase"
    UNREACHABLE_TARGET = "unreachable_target"
    TIMEOUT = "timeout"
    INVALID_FORMAT = "invalid_format"


def failure_pattern(trajectory: Trajectory, *, target_reported: bool) -> FailurePattern | None:
    """The pattern of a failed episode; None for a success.

    `target_reported`: whether the environment says when the goal is on screen (`reports_target`).
    Without it, a goal that was never shown cannot be told from one that was overlooked.
    """
    if trajectory.success:
        return None
    if _is_mostly_invalid(trajectory):
        return FailurePattern.INVALID_FORMAT
    if trajectory.terminated:
        return FailurePattern.WRONG_PURCHASE
    if _is_loop(trajectory):
        return FailurePattern.SEARCH_LOOP
    if target_reported and not _target_shown(trajectory):
        return FailurePattern.UNREACHABLE_TARGET
    return FailurePattern.TIMEOUT


def reports_target(trajectories: Sequence[Trajectory]) -> bool:
    """Whether these episodes come from an environment that flags the goal when it is on screen.

    Read from the episodes themselves: one flag anywhere is proof. Where no episode at all saw its
    goal the answer is no, and those episodes are called timeouts.
    """
    return any(_target_shown(trajectory) for trajectory in trajectories)


def _target_shown(trajectory: Trajectory) -> bool:
    return any(TurnFlag.TARGET_SHOWN in turn.flags for turn in trajectory.turns)


def _is_mostly_invalid(trajectory: Trajectory) -> bool:
    invalid = sum(_is_invalid(turn) for turn in trajectory.turns)
    return invalid > 0 and 2 * invalid >= len(trajectory.turns)


def _is_invalid(turn: Turn) -> bool:
    return TurnFlag.FORMAT_ERROR in turn.flags or TurnFlag.INVALID_ACTION in turn.flags


def _is_loop(trajectory: Trajectory) -> bool:
    repeats = _num_repeats(trajectory)
    return repeats >= 2 and 2 * repeats >= len(trajectory.turns)


def _num_repeats(trajectory: Trajectory) -> int:
    """The number of turns whose action and answer were both nearly there before."""
    observations = [turn.observation for turn in trajectory.turns]
    answers = [*observations, trajectory.final_observation][1:]
    seen: list[tuple[frozenset[str], frozenset[str]]] = []
    repeats = 0
    for turn, answer in zip(trajectory.turns, answers, strict=True):
        action_words, answer_words = _action_words(turn.action), frozenset(answer.lower().split())
        if not action_words:
            continue
        repeats += any(
            _nearly_equal(action_words, earlier_action)
            and _nearly_equal(answer_words, earlier_answer)
            for earlier_action, earlier_answer in seen
        )
        seen.append((action_words, answer_words))
    return repeats


def _action_words(action: str) -> frozenset[str]:
    """The words of an action without regard to case, order and punctuation."""
    return frozenset("".join(c if c.isalnum() else " " for c in action.lower()).split())


def _nearly_equal(left: frozenset[str], right: frozenset[str]) -> bool:
    """Whether two sets of words overlap by `NEAR_IDENTICAL_OVERLAP` of their union."""
    return len(left & right) >= NEAR_IDENTICAL_OVERLAP * len(left | right)
