"""An episode for a page: its turns with folded texts, tokens by surprise, V* and residuals.

Consumes a row of episodes.jsonl or rollouts.jsonl, or a trajectory of the value store as JSON. What
a row does not hold is None here, and the page says so.

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
from typing import Any

from ragen_apo.report.load import finite, mapping

MAX_SHOWN_CHARACTERS = 3000
"""Of a text on a page with others; the rest has a page of its own."""
MAX_SHOWN_TOKENS = 1200
"""Of a turn."""
NUM_SHADES = 6
SHADE_STEP = 1.0
"""Nats from one shade to the next: 6 of them are a token that was sampled once in 400 times."""
RATIO_SHADE_STEP = 0.25
"""The same for the change against the reference, which is smaller."""

TEXTS = ("observation", "response", "thought", "action")
"""Of a turn; `final_observation` is the episode's."""


@dataclass(frozen=True)
class Folded:
    """A text, or its beginning."""

    text: str
    num_characters: int

    @property
    def is_cut(self) -> bool:
        return self.num_characters > len(self.text)


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


@dataclass(frozen=True)
class ShownTurn:
    """One turn."""

    number: int
    observation: Folded
    thought: Folded
    action: Folded
    response: Folded
    reward: float | None
    flags: tuple[str, ...]
    num_prompt_tokens: int | None
    num_response_tokens: int | None
    tokens: tuple[ShownToken, ...] | None
    """None where the file has no log-probabilities."""
    num_tokens_left_out: int
    log_ratio: float | None
    """Of all its tokens."""
    v_star: float | None
    residual: float | None
    """In the first turn of each stretch between states of known value."""
    num_residual_turns: int
    """Turns of that stretch."""


@dataclass(frozen=True)
class ShownEpisode:
    """An episode."""

    instruction: Folded
    category: str
    task_id: str
    split: str
    policy: str
    success: bool
    episode_return: float | None
    stop_reason: str
    failure: str | None
    step: int | None
    final_observation: Folded
    turns: tuple[ShownTurn, ...]

    @property
    def has_tokens(self) -> bool:
        """Whether the file has the log-probabilities of its tokens."""
        return any(turn.tokens is not None for turn in self.turns)

    @property
    def has_reference(self) -> bool:
        return any(turn.log_ratio is not None for turn in self.turns)

    @property
    def has_values(self) -> bool:
        return any(turn.v_star is not None for turn in self.turns)

    @property
    def has_residuals(self) -> bool:
        return any(turn.residual is not None for turn in self.turns)


Decode = Callable[[Sequence[int]], list[str]]
"""The text of each of these tokens."""


def folded(value: object, most: int = MAX_SHOWN_CHARACTERS) -> Folded:
    """A text of a row as a page shows it; empty where it is none."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return Folded(text[:most], len(text))


def shown_episode(
    row: Mapping[str, Any],
    *,
    decode: Decode,
    beta2: float | None = None,
    v_star: float | None = None,
    normalized: bool = False,
) -> ShownEpisode:
    """The episode of a row.

    `beta2` is that of the run's algorithm, None where it has no residuals. `v_star` is that of the
    task, for rows that do not say. `normalized`: the log ratio is divided by the sampled tokens.
    """
    task, turns = mapping(row.get("task")), [mapping(each) for each in _list(row.get("turns"))]
    rewards = [finite(turn.get("reward")) or 0.0 for turn in turns]
    values = [finite(turn.get("v_star")) for turn in turns]
    if values and values[0] is None:
        values[0] = v_star
    ratios = [_log_ratio(turn) for turn in turns]
    scale = sum(len(_list(turn.get("token_ids"))) for turn in turns) if normalized else 1
    residuals = _residuals(rewards, values, ratios, beta2=None if not scale else beta2, scale=scale)
    step, value = finite(row.get("step")), finite(row.get("return"))
    return ShownEpisode(
        instruction=folded(task.get("instruction")),
        category=folded(task.get("category"), 80).text,
        task_id=folded(task.get("task_id"), 80).text,
        split=folded(task.get("split"), 80).text,
        policy=folded(row.get("policy") or row.get("policy_version"), 300).text,
        success=row.get("success") is True,
        episode_return=sum(rewards) if value is None else value,
        stop_reason=folded(row.get("stop_reason"), 200).text,
        failure=row["failure"] if isinstance(row.get("failure"), str) else None,
        step=None if step is None else int(step),
        final_observation=folded(row.get("final_observation")),
        turns=tuple(
            _turn(
                turn,
                number=number,
                decode=decode,
                log_ratio=ratios[number - 1],
                v_star=values[number - 1],
                residual=residuals.get(number - 1),
            )
            for number, turn in enumerate(turns, 1)
        ),
    )


def text_of(row: Mapping[str, Any], field: str, number: int) -> str | None:
    """The whole text of a field: of turn `number` (from 1), or of the episode for 0."""
    turns = _list(row.get("turns"))
    if number == 0:
        source = row if field == "final_observation" else mapping(row.get("task"))
        is_known = field in ("final_observation", "instruction")
    else:
        source = mapping(turns[number - 1]) if 0 < number <= len(turns) else {}
        is_known = field in TEXTS
    text = source.get(field) if is_known else None
    return text if isinstance(text, str) else None


def _turn(
    turn: Mapping[str, Any],
    *,
    number: int,
    decode: Decode,
    log_ratio: float | None,
    v_star: float | None,
    residual: tuple[float, int] | None,
) -> ShownTurn:
    tokens, num_left_out = _tokens(turn, decode)
    num_prompt, num_response = turn.get("num_prompt_tokens"), turn.get("num_response_tokens")
    return ShownTurn(
        number=number,
        observation=folded(turn.get("observation")),
        thought=folded(turn.get("thought")),
        action=folded(turn.get("action")),
        response=folded(turn.get("response")),
        reward=finite(turn.get("reward")),
        flags=tuple(folded(flag, 60).text for flag in _list(turn.get("flags"))[:20]),
        num_prompt_tokens=num_prompt if isinstance(num_prompt, int) else None,
        num_response_tokens=num_response if isinstance(num_response, int) else None,
        tokens=tokens,
        num_tokens_left_out=num_left_out,
        log_ratio=log_ratio,
        v_star=v_star,
        residual=None if residual is None else residual[0],
        num_residual_turns=0 if residual is None else residual[1],
    )


def _tokens(turn: Mapping[str, Any], decode: Decode) -> tuple[tuple[ShownToken, ...] | None, int]:
    """The tokens of a turn, those of the store included, and how many more there are."""
    ids = _ids(turn)
    logprobs = [finite(each) for each in _list(turn.get("logprobs"))]
    if not ids or len(ids) != len(logprobs):
        return None, 0
    reference = [finite(each) for each in _list(turn.get("reference_logprobs"))]
    shown = slice(0, MAX_SHOWN_TOKENS)
    against = reference if len(reference) == len(ids) else [None] * len(ids)
    tokens = tuple(
        ShownToken(text, own, None if other is None else own - other)
        for text, own, other in zip(
            decode(ids[shown]), logprobs[shown], against[shown], strict=True
        )
        if own is not None
    )
    return tokens, max(0, len(ids) - MAX_SHOWN_TOKENS)


def _ids(turn: Mapping[str, Any]) -> list[int]:
    ids = _list(turn.get("token_ids") or turn.get("response_token_ids"))
    is_right = all(type(each) is int and 0 <= each < 1 << 31 for each in ids)
    return ids if is_right else []


def _log_ratio(turn: Mapping[str, Any]) -> float | None:
    """Log pi - log pi_ref of a turn's tokens, None where one of them is not known."""
    own = [finite(each) for each in _list(turn.get("logprobs"))]
    reference = [finite(each) for each in _list(turn.get("reference_logprobs"))]
    if not own or len(own) != len(reference):
        return None
    differences = [
        a - b for a, b in zip(own, reference, strict=True) if a is not None and b is not None
    ]
    return sum(differences) if len(differences) == len(own) else None


def _residuals(
    rewards: Sequence[float],
    values: Sequence[float | None],
    ratios: Sequence[float | None],
    *,
    beta2: float | None,
    scale: int,
) -> dict[int, tuple[float, int]]:
    """Delta of each stretch and its number of turns, by its first turn (from 0)."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if beta2 is None or not known or known[0][0] != 0:
        return {}
    residuals: dict[int, tuple[float, int]] = {}
    for (start, value), (end, after) in pairwise([*known, (len(rewards), 0.0)]):
        inside = [ratio for ratio in ratios[start:end] if ratio is not None]
        if len(inside) == end - start:
            delta = sum(rewards[start:end]) + after - value - beta2 * sum(inside) / scale
            residuals[start] = (delta, end - start)
    return residuals


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
