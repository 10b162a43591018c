"""Episodes without their detours: turns are left out as long as what remains still succeeds.

    search, open 3, back, open 1, buy   ->   search, open 1, buy

What remains is played again from the start, in an environment where the same actions lead to the
same state. Responses stay as they were sampled; what is read between them is what the environment
answers now. So the tokens are those of a policy that had gone the short way at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragen_apo.agent.context import ContextManager
from ragen_apo.agent.environment_manager import EnvironmentManager, Outcome
from ragen_apo.agent.proxy import Episode, EpisodeRequest, begin_episodes, play_turns
from ragen_apo.policy.engine import Response
from ragen_apo.types import Trajectory, TurnFlag

MAX_REPLAYS = 200
"""Of one episode; a long one keeps the detours that were not found by then."""


@dataclass(frozen=True)
class Shortened:
    """An episode without some of its turns."""

    trajectory: Trajectory
    kept: tuple[int, ...]
    """The turns that remain, by their number in the whole episode."""


def without_detours(
    trajectory: Trajectory, environments: EnvironmentManager, context: ContextManager
) -> Shortened:
    """The success without the turns that it does not need; whole if it needs them all.

    The longest block of turns that can be left out is, and then the next, until none can. What
    remains succeeds with no smaller return. Whole stay failures, and an episode that takes another
    course when it is played again. Log-probabilities are those of the whole episode.

    Raises EnvironmentFaultError if an environment raises, after its retries.
    """
    found = Shortened(trajectory, tuple(range(len(trajectory.turns))))
    if (
        not trajectory.success
        or _played(trajectory, found.kept, environments, context) != trajectory
    ):
        return found
    num_left = MAX_REPLAYS
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for kept in _shorter(found.kept):
            if num_left == 0:
                return found
            num_left -= 1
            again = _played(trajectory, kept, environments, context)
            if again and again.episode_return >= found.trajectory.episode_return:
                found, is_shorter = Shortened(again, kept), True
                break
    return found


def _shorter(turns: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The turns without one block of them, the longest blocks first; the last turn stays."""
    for length in range(len(turns) - 1, 0, -1):
        for start in range(len(turns) - length):
            yield (*turns[:start], *turns[start + length :])


def _played(
    trajectory: Trajectory,
    kept: Sequence[int],
    environments: EnvironmentManager,
    context: ContextManager,
) -> Trajectory | None:
    """The episode of these turns, if it succeeds with the last of them and fits the context."""
    num_failures = 0
    outcome, episode = _end(trajectory, kept, environments, context)
    while outcome.failure is not None:
        num_failures += 1
        environments.require_retry(outcome.failure, num_failures)
        outcome, episode = _end(trajectory, kept, environments, context)
    environments.release(episode.environment)
    if not outcome.success or len(episode.turns) < len(kept):
        return None
    return episode.finished(outcome, policy_version=trajectory.policy_version)


def _end(
    trajectory: Trajectory,
    kept: Sequence[int],
    environments: EnvironmentManager,
    context: ContextManager,
) -> tuple[Outcome, Episode]:
    """How an episode of these turns ends, or what its last answer is."""
    request = EpisodeRequest(trajectory.task, trajectory.seed)
    (episode,) = begin_episodes([(0, request)], environments, context)
    outcome = Outcome("")
    for number in kept:
        turn = trajectory.turns[number]
        stopped = TurnFlag.RESPONSE_TRUNCATED.value not in turn.flags
        response = Response(turn.response_token_ids, turn.logprobs, stopped)
        answered = [(episode, response, turn.response)]
        played = play_turns(answered, environments, context, may_fail=True)
        ((outcome, is_over),) = played
        if is_over:
            break
    return outcome, episode
