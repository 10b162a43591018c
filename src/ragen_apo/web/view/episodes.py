"""An episode for a page: its turns with tokens by surprise, V* and residuals.

Consumes a row of episodes.jsonl or rollouts.jsonl, or a trajectory of the value store. What its
file does not hold is None or empty here, and the page says so.

    delta = r + V*(next known state) - V*(own state) - beta2 (log pi - log pi_ref)

This is the residual of the turns from one state of known value to the next; the value after the end
is 0. If only the first state is known, it is A*-PO's residual of the whole episode, R - V* - beta2
(log pi - log pi_ref).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from ragen_apo.evaluation.summary import episode_row, turn_row
from ragen_apo.files import parse_record
from ragen_apo.report.episodes import Episode, EpisodeTurn
from ragen_apo.types import Trajectory, Turn

MAX_SHOWN_TOKENS = 1200
"""Of a turn."""
NUM_SHADES = 6
SHADE_STEP = 1.0
"""Nats from one shade to the next: 6 of them are a token that was sampled once in 400 times."""
RATIO_SHADE_STEP = 0.25
"""The same for the change against the reference, which is smaller."""

TEXTS = ("observation", "response", "thought", "action")
"""Of a turn."""

Decode = Callable[[Sequence[int]], list[str]]
"""The text of each of these tokens."""


class StoredTurn(EpisodeTurn, frozen=True):
    """A turn with what its file has of its tokens."""

    num_prompt_tokens: int | None = None
    num_response_tokens: int | None = None
    token_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = ()
    """The sampled ones, as their log-probabilities."""
    logprobs: tuple[FiniteFloat, ...] = ()
    reference_logprobs: tuple[FiniteFloat, ...] = ()
    v_star: FiniteFloat | None = None
    """Of its state, where that is known."""

    @property
    def log_ratio(self) -> float | None:
        """Log pi - log pi_ref of its tokens, where the file has both."""
        if not self.logprobs or len(self.logprobs) != len(self.reference_logprobs):
            return None
        return sum(a - b for a, b in zip(self.logprobs, self.reference_logprobs, strict=True))


class StoredEpisode(Episode, frozen=True):
    """An episode as a file of a run has it."""

    step: int | None = None
    """Of training."""
    turns: tuple[StoredTurn, ...]

    def text(self, field: str, turn: int) -> str | None:
        """A text by its name: of a turn, from 1, or of the episode for 0; None for no such text."""
        if turn == 0:
            whole = {
                "instruction": self.task.instruction,
                "final_observation": self.final_observation,
            }
            return whole.get(field)
        if field in TEXTS and turn <= len(self.turns):
            return getattr(self.turns[turn - 1], field) or None
        return None


_EPISODE = TypeAdapter(StoredEpisode)


def stored_episode(row: Mapping[str, Any]) -> StoredEpisode:
    """The episode of a row. Raises ValueError, with the field, for a row of another form."""
    return parse_record(_EPISODE, row)


def sampled_episode(trajectory: Trajectory, *, number: int) -> StoredEpisode:
    """A sample of the value store."""
    row = episode_row(trajectory, episode=number, policy=trajectory.policy_version, pattern=None)
    return stored_episode(row | {"turns": [row_with_tokens(turn) for turn in trajectory.turns]})


def row_with_tokens(turn: Turn) -> dict[str, Any]:
    """A turn as files have it that keep its tokens."""
    return turn_row(turn) | {"token_ids": turn.response_token_ids, "logprobs": turn.logprobs}


@dataclass(frozen=True)
class ShownToken:
    """A sampled token."""

    text: str
    logprob: float
    log_ratio: float | None
    """log pi - log pi_ref, where the reference scored it."""

    @property
    def shade(self) -> int:
        """0 where the policy was sure of it, up to `NUM_SHADES`."""
        return min(NUM_SHADES, int(max(0.0, -self.logprob) / SHADE_STEP + 0.5))

    @property
    def ratio_shade(self) -> int:
        """As `shade`, of how far policy and reference differ; negative where it is rarer now."""
        ratio = self.log_ratio or 0.0
        return int(math.copysign(min(NUM_SHADES, int(abs(ratio) / RATIO_SHADE_STEP + 0.5)), ratio))


def shown_tokens(
    ids: Sequence[int],
    logprobs: Sequence[float],
    decode: Decode,
    reference: Sequence[float] | None = None,
) -> tuple[ShownToken, ...]:
    """The first `MAX_SHOWN_TOKENS` of some tokens, against the reference's where they are given."""
    texts = decode(ids[:MAX_SHOWN_TOKENS])
    ratios = (
        [None] * len(ids)
        if reference is None
        else [own - other for own, other in zip(logprobs, reference, strict=True)]
    )
    return tuple(map(ShownToken, texts, logprobs, ratios))


@dataclass(frozen=True)
class ShownTurn:
    """One turn."""

    number: int
    """From 1."""
    stored: StoredTurn
    tokens: tuple[ShownToken, ...]
    """Empty where the file has no log-probabilities."""
    v_star: float | None
    value_name: str
    """What it is: an ablation subtracts something else than V*."""
    residual: float | None
    """In the first turn of each stretch between states of known value."""
    num_residual_turns: int
    """Turns of that stretch."""
    reads_whole: bool = False
    """Whether its prompt tokens are those of the whole conversation, as a server counts them, and
    not those that are new in this turn."""


@dataclass(frozen=True)
class ShownEpisode:
    """An episode."""

    stored: StoredEpisode
    turns: tuple[ShownTurn, ...]

    @property
    def has_tokens(self) -> bool:
        """Whether the file has the log-probabilities of its tokens."""
        return any(turn.tokens for turn in self.turns)

    @property
    def has_reference(self) -> bool:
        return any(turn.stored.log_ratio is not None for turn in self.turns)

    @property
    def has_values(self) -> bool:
        return any(turn.v_star is not None for turn in self.turns)

    @property
    def has_residuals(self) -> bool:
        return any(turn.residual is not None for turn in self.turns)


def shown_episode(
    stored: StoredEpisode,
    *,
    decode: Decode,
    beta2: float | None = None,
    v_star: float | None = None,
    value_name: str = "V*",
    normalized: bool = False,
    reads_whole: bool = False,
) -> ShownEpisode:
    """The episode for a page.

    `beta2` is that of the run's algorithm, None where it has no residuals. `v_star` is that of the
    task, for files that do not say. `normalized`: the log ratio is divided by the sampled tokens.
    `reads_whole` is that of its turns.
    """
    values = [turn.v_star for turn in stored.turns]
    if values and values[0] is None:
        values[0] = v_star
    scale = sum(len(turn.token_ids) for turn in stored.turns) if normalized else 1
    residuals = {} if beta2 is None or not scale else _residuals(stored, values, beta2 / scale)
    turns: list[ShownTurn] = []
    for number, (turn, value) in enumerate(zip(stored.turns, values, strict=True), 1):
        residual, num_turns = residuals.get(number, (None, 0))
        tokens = _tokens(turn, decode)
        parts = (tokens, value, value_name, residual, num_turns, reads_whole)
        turns.append(ShownTurn(number, turn, *parts))
    return ShownEpisode(stored, tuple(turns))


def _tokens(turn: StoredTurn, decode: Decode) -> tuple[ShownToken, ...]:
    if len(turn.token_ids) != len(turn.logprobs):
        return ()
    reference = None if turn.log_ratio is None else turn.reference_logprobs
    return shown_tokens(turn.token_ids, turn.logprobs, decode, reference)


def _residuals(
    stored: StoredEpisode, values: Sequence[float | None], beta: float
) -> dict[int, tuple[float, int]]:
    """Delta of each stretch and its number of turns, by its first turn; `beta` for each token."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if not known or known[0][0] != 0:
        return {}
    residuals: dict[int, tuple[float, int]] = {}
    for (start, value), (end, after) in pairwise([*known, (len(values), 0.0)]):
        stretch = stored.turns[start:end]
        ratios = [ratio for turn in stretch if (ratio := turn.log_ratio) is not None]
        if len(ratios) == len(stretch):
            delta = sum(turn.reward for turn in stretch) + after - value - beta * sum(ratios)
            residuals[start + 1] = (delta, end - start)
    return residuals
