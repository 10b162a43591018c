"""Why an episode failed, as one of six patterns, and the words for them.

Consumes finished trajectories of any environment; reads flags, actions and observations, never
token ids. An environment may declare words of its own (`EnvironmentProperties.failure_words`); the
words here fit all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum

from ragen_apo.environments.base import FailureWords, PatternWords
from ragen_apo.types import Trajectory, TurnFlag

NEAR_IDENTICAL_OVERLAP = 0.75
"""Texts that share this part of their words (Jaccard) count as nearly the same."""


class FailurePattern(str, Enum):
    """The name of a way to fail, in the order in which they are looked for."""

    UNREADABLE = "unreadable"
    """Half or more of the turns failed, and no fewer by format errors than by invalid actions."""
    IMPOSSIBLE = "impossible"
    WRONG_FINAL_ACTION = "wrong_final_action"
    LOOP = "loop"
    """Half or more of the turns (at least two) repeat an earlier one and bring nothing new."""
    UNREACHABLE_TARGET = "unreachable_target"
    TIMEOUT = "timeout"


NEUTRAL_WORDS: Mapping[FailurePattern, PatternWords] = {
    FailurePattern.LOOP: PatternWords(
        name="loop",
        meaning="The agent repeats nearly the same action and gets nearly the same answer, until "
        "the episode is cut off.",
        advice="Check that repeating an action cannot pay. Let the observation say that nothing "
        "changed, and add demonstrations that recover from a fruitless action.",
    ),
    FailurePattern.WRONG_FINAL_ACTION: PatternWords(
        name="wrong final action",
        meaning="An action of the agent ended the episode, and the goal was not reached.",
        advice="Read the last turns. If the agent could know better, train longer or demonstrate "
        "the choice; if it could not, the observation lacks what it needs.",
    ),
    FailurePattern.UNREACHABLE_TARGET: PatternWords(
        name="unreachable target",
        meaning="The goal was never on screen, so no choice could have been right, and the episode "
        "was cut off.",
        advice="See whether a scripted baseline reaches the goal in these tasks. If it does not, "
        "the task is at fault; if it does, demonstrate how it gets there.",
    ),
    FailurePattern.TIMEOUT: PatternWords(
        name="timeout",
        meaning="The episode was cut off by the turn or context limit, without a loop and with the "
        "goal on screen (or in an environment that does not say).",
        advice="See whether the agent was on its way: then let the environment play more turns, or "
        "raise `agent.max_context_tokens`. If it wanders, a cost per turn helps.",
    ),
    FailurePattern.UNREADABLE: PatternWords(
        name="unreadable",
        meaning="Half or more of the turns failed, most of them because the response did not have "
        "the form of `agent.response_format`, so that no action could be read.",
        advice="If responses are cut off, raise `agent.max_response_tokens`. A pretrained model "
        "has to be told the form: `agent.system_prompt: rules_and_format`. Otherwise warm-start "
        "longer (`warm_start.demonstrations.num_steps`), or set `agent.format_penalty` further "
        "below 0.",
    ),
    FailurePattern.IMPOSSIBLE: PatternWords(
        name="impossible action",
        meaning="Half or more of the turns failed, most of them because the environment could not "
        "execute the action. It was well-formed.",
        advice="Tell the agent which actions there are: in the observation, or with "
        "`agent.system_prompt: rules`. Otherwise warm-start longer "
        "(`warm_start.demonstrations.num_steps`), or set `agent.invalid_action_penalty` below 0.",
    ),
}
"""The words where the environment declares none."""


def declared_words(words: FailureWords) -> dict[FailurePattern, dict[str, str]]:
    """The environment's words for its patterns, by field; without the empty ones."""
    return {
        pattern: {name: text for name, text in dataclasses.asdict(chosen).items() if text}
        for pattern in FailurePattern
        if (chosen := getattr(words, pattern.value)) != PatternWords()
    }


def failure_pattern(trajectory: Trajectory, *, target_reported: bool) -> FailurePattern | None:
    """The pattern of a failed episode; None for a success.

    `target_reported`: whether the environment says when the goal is on screen (`reports_target`).
    Without it, a goal that was never shown cannot be told from one that was overlooked.
    """
    if trajectory.success:
        return None
    unreadable = _num_flagged(trajectory, TurnFlag.FORMAT_ERROR)
    impossible = _num_flagged(trajectory, TurnFlag.INVALID_ACTION)
    if unreadable + impossible > 0 and 2 * (unreadable + impossible) >= len(trajectory.turns):
        is_unreadable = unreadable >= impossible
        return FailurePattern.UNREADABLE if is_unreadable else FailurePattern.IMPOSSIBLE
    if trajectory.terminated:
        return FailurePattern.WRONG_FINAL_ACTION
    if _is_loop(trajectory):
        return FailurePattern.LOOP
    if target_reported and not _target_shown(trajectory):
        return FailurePattern.UNREACHABLE_TARGET
    return FailurePattern.TIMEOUT


def reports_target(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the environment of these episodes flags the goal when it is on screen.

    One flag in any episode is proof. Without one the answer is no, and the episodes count as
    timeouts.
    """
    return any(_target_shown(trajectory) for trajectory in trajectories)


def _target_shown(trajectory: Trajectory) -> bool:
    return any(TurnFlag.TARGET_SHOWN in turn.flags for turn in trajectory.turns)


def _num_flagged(trajectory: Trajectory, flag: TurnFlag) -> int:
    """Turns with this flag; a turn has one of format error and invalid action at most."""
    return sum(flag in turn.flags for turn in trajectory.turns)


def _is_loop(trajectory: Trajectory) -> bool:
    repeats = _num_repeats(trajectory)
    return repeats >= 2 and 2 * repeats >= len(trajectory.turns)


def _num_repeats(trajectory: Trajectory) -> int:
    """The number of turns whose action and answer nearly equal those of an earlier turn."""
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
    """The words of an action without regard to case, order and punctuation; of one that has none,
    its signs.
    """
    words = "".join(c if c.isalnum() else " " for c in action.lower()).split()
    return frozenset(words or action.split())


def _nearly_equal(left: frozenset[str], right: frozenset[str]) -> bool:
    """Whether two sets of words overlap by `NEAR_IDENTICAL_OVERLAP` of their union."""
    return len(left & right) >= NEAR_IDENTICAL_OVERLAP * len(left | right)
