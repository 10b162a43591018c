"""Guesses of the next tokens: where they come from, and that they change nothing but the passes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.test_generation import play

from ragen_apo.policy.drafting import Recurrence
from ragen_apo.policy.generation import GenerationEngine, Row
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.seeding import generator

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(parts=st.lists(TOKENS, max_size=4), pair=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_pair_is_followed_by_what_followed_it_the_last_time(
    parts: list[list[int]], pair: tuple[int, int]
) -> None:
    recurrence = Recurrence()
    for part in parts:
        recurrence.extend(part)
    tokens = [token for part in parts for token in part]
    assert recurrence.tokens == tokens
    places = [place for place in range(2, len(tokens)) if tuple(tokens[place - 2 : place]) == pair]
    expected = tokens[places[-1] :][:3] if places else []
    assert recurrence.following(pair, length=3) == expected


def count_passes(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each forward pass adds how many tokens a row it read."""
    widths: list[int] = []
    hidden_states = model.hidden_states

    def counted(token_ids_BT: torch.Tensor, **kwargs):
        widths.append(token_ids_BT.shape[1])
        return hidden_states(token_ids_BT, **kwargs)

    monkeypatch.setattr(model, "hidden_states", counted)
    return widths


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
def test_the_same_is_written_whatever_is_guessed(
    any_model: LanguageModel,
    share_right: float,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = count_passes(any_model, monkeypatch)
    expected = play(any_model, range(7), temperature=temperature)
    num_passes = len(widths)
    draws = np.random.default_rng(0)

    def guess(engine: GenerationEngine, row: Row) -> list[int]:
        assert row.sampling
        if row.is_waiting:
            return []
        present = row.context.tokens
        assert present == row.read + row.unread
        (whole,) = (c.token_ids for c in expected if c.token_ids[: len(present)] == present)
        coming = whole[len(present) :][: min(4, row.sampling.num_left - 1)]
        return [token if draws.random() < share_right else 9 for token in coming]

    monkeypatch.setattr(GenerationEngine, "_guess", guess)
    for row, other in zip(
        play(any_model, range(7), temperature=temperature), expected, strict=True
    ):
        assert row.token_ids == other.token_ids
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=2e-5)
    if share_right == 1.0:
        assert len(widths) - num_passes < 0.7 * num_passes


def test_what_was_said_before_is_guessed_in_every_row_until_all_are_closed(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = count_passes(llama, monkeypatch)
    engine = GenerationEngine(llama, num_rows=3, capacity=100, draft_length=4)
    engine.stop_rule.end_ids.clear()
    length = 30

    def num_passes() -> int:
        before = len(widths)
        row = engine.open_row(generator(0))
        engine.respond([row], [[9, 10, 11]], max_new_tokens=length, temperature=1.0)
        engine.close_row(row)
        return len(widths) - before

    other = engine.open_row(generator(1))
    alone = num_passes()
    # The first two passes have no pair that was seen; the others take five tokens each.
    assert num_passes() <= 2 + -(-length // 5) < alone <= length
    engine.close_row(other)
    assert num_passes() == alone


def test_without_guesses_each_pass_reads_one_token(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = count_passes(llama, monkeypatch)
    engine = GenerationEngine(llama, num_rows=1, capacity=100)
    row = engine.open_row(generator(0))
    engine.stop_rule.end_ids.clear()
    engine.respond([row], [[9] * 5], max_new_tokens=20, temperature=0.0)
    assert widths == [5, *[1] * 19]
