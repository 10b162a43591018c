"""An episode as a page shows it: folded texts, tokens, V* and residuals."""

from typing import Any

import pytest

from ragen_apo.web.view.episodes import (
    MAX_SHOWN_TOKENS,
    NUM_SHADES,
    ShownEpisode,
    StoredEpisode,
    sampled_episode,
    shown_episode,
    stored_episode,
)
from ragen_apo.web.view.token_texts import numbers
from tests.factories import played


def _turn(reward: float, *, v_star: float | None = None, **fields: Any) -> dict[str, Any]:
    """Two tokens, each half a nat likelier than under the reference."""
    defaults = {
        "observation": "a page",
        **dict.fromkeys(("response", "thought", "action"), ""),
        "flags": [],
        "token_ids": [7, 8],
        "logprobs": [-0.25, -3.0],
        "reference_logprobs": [-0.75, -3.5],
    }
    return {"reward": reward, "v_star": v_star, **defaults, **fields}


def _stored(*turns: dict[str, Any]) -> StoredEpisode:
    task = dict.fromkeys(("environment", "task_id", "split", "category"), "")
    row = {"episode": 0, "task": {"instruction": "buy", "payload": {"a": "secret"}, **task}}
    row |= {"success": True, "return": 1.0, "num_turns": len(turns), "stop_reason": ""}
    return stored_episode(row | {"failure": None, "final_observation": "the end", "turns": turns})


def _shown(*turns: dict[str, Any], **options: Any) -> ShownEpisode:
    return shown_episode(_stored(*turns), **{"decode": numbers, "beta2": 0.1, **options})


def test_the_residual_of_an_episode_is_return_minus_value_minus_log_ratio() -> None:
    shown = _shown(_turn(0.25, v_star=0.5), _turn(1.0))
    # 0.25 + 1 - 0.5 - 0.1 * 4 tokens * 0.5 nats
    assert shown.turns[0].residual == pytest.approx(0.55)
    assert shown.turns[0].num_residual_turns == 2
    assert shown.turns[1].residual is None


def test_a_state_of_known_value_begins_a_residual_of_its_own() -> None:
    shown = _shown(_turn(0.25, v_star=0.5), _turn(0.0), _turn(1.0, v_star=0.75))
    # 0.25 + 0 + 0.75 - 0.5 - 0.1 * 2 and 1 - 0.75 - 0.1 * 1
    assert [turn.residual for turn in shown.turns] == [
        pytest.approx(0.3),
        None,
        pytest.approx(0.15),
    ]


def test_a_log_ratio_divided_by_tokens_is_divided_here_too() -> None:
    shown = _shown(_turn(0.25, v_star=0.5), _turn(1.0), normalized=True)
    assert shown.turns[0].residual == pytest.approx(0.75 - 0.1 * 2 / 4)


@pytest.mark.parametrize(
    "turn",
    [
        _turn(1.0),
        _turn(1.0, v_star=0.5, reference_logprobs=[]),
        _turn(1.0, v_star=0.5, reference_logprobs=[-1.0]),
        _turn(1.0, v_star=0.5, logprobs=[]),
    ],
)
def test_nothing_is_said_of_what_is_not_stored(turn: dict[str, Any]) -> None:
    assert not _shown(turn).has_residuals


def test_an_algorithm_without_values_has_no_residuals() -> None:
    assert not _shown(_turn(1.0, v_star=0.5), beta2=None).has_residuals


def test_tokens_are_shaded_by_surprise_and_by_change() -> None:
    sure, surprising = _shown(_turn(0.0)).turns[0].tokens
    assert (sure.text, sure.shade, sure.ratio_shade) == ("⟨7⟩", 0, 2)
    assert (surprising.shade, surprising.log_ratio) == (3, pytest.approx(0.5))
    (far,) = _shown(_turn(0.0, token_ids=[1], logprobs=[-99.0], reference_logprobs=[0.0])).turns
    assert [(token.shade, token.ratio_shade) for token in far.tokens] == [(NUM_SHADES, -NUM_SHADES)]


def test_a_sample_of_the_value_store_has_its_tokens_and_the_value_of_its_task() -> None:
    shown = shown_episode(sampled_episode(played("easy"), number=3), decode=numbers, v_star=0.5)
    assert (shown.stored.index, shown.stored.episode_return) == (3, 1.0)
    assert shown.turns[0].v_star == 0.5
    assert [token.text for token in shown.turns[0].tokens] == ["⟨4⟩", "⟨5⟩"]


def test_many_tokens_are_cut() -> None:
    many = MAX_SHOWN_TOKENS + 5
    turn = _turn(0.0, token_ids=[1] * many, logprobs=[-1.0] * many, reference_logprobs=[])
    assert len(_shown(turn).turns[0].tokens) == MAX_SHOWN_TOKENS


@pytest.mark.parametrize(
    "fields",
    [
        {"observation": ["a", 1]},
        {"reward": "much"},
        {"flags": 7},
        {"token_ids": [-1]},
        {"token_ids": ["x"]},
        {"logprobs": [float("nan")]},
        {"v_star": float("nan")},
    ],
)
def test_a_row_of_another_form_is_refused_by_its_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"turns\.0\.{next(iter(fields))}"):
        _stored(_turn(0.0) | fields)


def test_the_whole_of_a_text_is_found_by_its_name() -> None:
    stored = _stored(_turn(1.0))
    assert stored.text("observation", 1) == "a page"
    assert stored.text("final_observation", 0) == "the end"
    assert stored.text("instruction", 0) == "buy"
    for field, turn in (("observation", 2), ("payload", 0), ("reward", 1), ("thought", 1)):
        assert stored.text(field, turn) is None
