"""From an episode in progress to what a page shows, in the form of the viewer's pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.evaluation.summary import turn_row
from ragen_apo.web.at_work.episode import PlayedEpisode
from ragen_apo.web.at_work.worker import Writing
from ragen_apo.web.view.episodes import (
    Decode,
    ShownEpisode,
    ShownToken,
    ShownTurn,
    StoredEpisode,
    row_with_tokens,
    shown_episode,
    shown_tokens,
    stored_episode,
)


@dataclass(frozen=True)
class ShownComparison:
    """A turn as another policy sees it."""

    policy: str
    own_tokens: tuple[ShownToken, ...]
    """Of the turn: under the policy that wrote it and against the other; under the other alone
    where a person has written it."""
    log_ratio: float | None
    """Of all tokens of the turn; None for a turn of a person."""
    logprob: float
    """Of all tokens of the turn, under the other policy."""
    tokens: tuple[ShownToken, ...]
    """Its own answer."""
    parsed: ParsedResponse
    agreement: str
    """What its answer has in common with the turn."""
    v_star: float | None


@dataclass(frozen=True)
class Item:
    """A turn on the page."""

    turn: ShownTurn
    by_hand: bool
    comparison: ShownComparison | None


def stored(played: PlayedEpisode) -> StoredEpisode:
    """The episode as files of a run have it, with the tokens that a policy has written."""
    turns = [_turn_row(played, number) for number, _ in enumerate(played.turns, 1)]
    return stored_episode(
        {
            "episode": played.choice.task,
            "task": asdict(played.episode.request.task),
            "success": played.outcome is not None and played.outcome.success,
            "return": sum(turn.reward for turn in played.turns),
            "num_turns": len(turns),
            "stop_reason": played.stop_reason.value if played.stop_reason else "",
            "failure": None,
            "final_observation": played.episode.observation,
            "turns": turns,
        }
    )


def _turn_row(played: PlayedEpisode, number: int) -> dict[str, Any]:
    turn, by_hand = played.turns[number - 1], played.by_hand[number - 1]
    row = turn_row(turn) if by_hand else row_with_tokens(turn)
    comparison = played.comparisons.get(number)
    if comparison is not None and comparison.is_reference:
        row["v_star"] = comparison.v_star
        row["reference_logprobs"] = [] if by_hand else comparison.logprobs
    return row


def episode_shown(played: PlayedEpisode, decode: Decode) -> tuple[ShownEpisode, list[Item]]:
    """The episode, and its turns with what was asked about them."""
    shown = shown_episode(stored(played), decode=decode)
    items = [
        Item(turn, by_hand, _comparison(played, turn.number, decode))
        for turn, by_hand in zip(shown.turns, played.by_hand, strict=True)
    ]
    return shown, items


def _comparison(played: PlayedEpisode, number: int, decode: Decode) -> ShownComparison | None:
    comparison = played.comparisons.get(number)
    if comparison is None:
        return None
    turn, by_hand = played.turns[number - 1], played.by_hand[number - 1]
    ids, other = turn.response_token_ids, comparison.logprobs
    agreement = "another action"
    if comparison.text == turn.response:
        agreement = "the same words"
    elif comparison.parsed.is_valid and comparison.parsed.action == turn.action:
        agreement = "the same action"
    return ShownComparison(
        policy=comparison.policy,
        own_tokens=shown_tokens(ids, other, decode)
        if by_hand
        else shown_tokens(ids, turn.logprobs, decode, other),
        log_ratio=None if by_hand else sum(turn.logprobs) - sum(other),
        logprob=sum(other),
        tokens=shown_tokens(comparison.response.token_ids, comparison.response.logprobs, decode),
        parsed=comparison.parsed,
        agreement=agreement,
        v_star=comparison.v_star,
    )


def written_so_far(writing: Writing, decode: Decode) -> tuple[ShownToken, ...]:
    """The tokens of a response that is being written."""
    ids = list(writing.token_ids)  # its log-probabilities are there before a token is
    return shown_tokens(ids, writing.logprobs, decode)
