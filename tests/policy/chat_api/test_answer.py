"""What the body of a response says, in the variants of different servers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.policy.chat_api.answer import (
    Answer,
    Complaint,
    ToolCall,
    read_answer,
    read_complaint,
)
from tests.chat_server import completion


def read(message: Any, **choice: Any) -> Answer:
    answer = read_answer(json.dumps(completion(message, **choice)))
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_stands_beside_the_content(field: str) -> None:
    answer = read({"content": "<answer>a</answer>", field: "because"})
    assert (answer.content, answer.reasoning) == ("<answer>a</answer>", "because")


@pytest.mark.parametrize(
    "message", [{"content": None}, {"content": ""}, {}, {"content": None, "tool_calls": [{}]}]
)
def test_a_message_without_text_is_an_empty_answer(message: dict[str, Any]) -> None:
    answer = read(message)
    assert (answer.content, answer.refused) == ("", False)


def test_a_text_in_parts_is_joined() -> None:
    texts = [{"type": "text", "text": text} for text in ("<answer>", "a")]
    parts = [texts[0], {"type": "thinking", "text": "b"}, None, texts[1]]
    assert read({"content": parts}).content == "<answer>a"


def test_calls_are_read_whether_their_arguments_are_text_or_an_object() -> None:
    whole = {"id": "c1", "type": "function", "function": {"name": "buy", "arguments": '{"id": 3}'}}
    bare = {"function": {"name": "buy", "arguments": {"id": 3}}}
    odd = [None, {}, {"function": "buy"}, {"function": {"name": None}}]
    answer = read({"content": None, "tool_calls": [whole, bare, *odd]})
    assert answer.tool_calls == (
        ToolCall("buy", '{"id": 3}', "c1"),
        ToolCall("buy", '{"id": 3}'),
        ToolCall("", "{}"),
    )
    assert read({"content": "a", "tool_calls": "none"}).tool_calls == ()


def test_refusals_are_told_apart_from_empty_answers() -> None:
    assert read({"content": None, "refusal": "I cannot"}).refused
    assert read({"content": None}, finish_reason="content_filter").refused


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": True}, 5])
def test_a_cost_that_is_not_told_is_unknown(usage: Any) -> None:
    answer = read_answer(json.dumps({**completion("a"), "usage": usage}))
    assert isinstance(answer, Answer)
    assert answer.prompt_tokens is answer.completion_tokens is None


def test_half_a_surrogate_pair_becomes_text_that_a_file_can_keep() -> None:
    assert read("a\ud800b😀").content == "a�b😀"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "no such model", "code": 404}}', "no such model"),
        ('{"error": "no such model"}', "no such model"),
        ('{"detail": "no such model"}', "no such model"),
        ('{"object": "error", "message": "no such\\nmodel"}', "no such model"),
        ("no such model", "no such model"),
        ('{"detail": [{"msg": "too small"}]}', "[{'msg': 'too small'}]"),
        ("", ""),
        ("\x1b[2Jcleared", "\\x1b[2Jcleared"),
    ],
)
def test_complaints_are_read_in_all_their_forms(body: str, message: str) -> None:
    assert read_complaint(body).message == message


def test_a_complaint_in_a_successful_response_is_one() -> None:
    body = '{"error": {"message": "busy", "code": 502}}'
    assert read_answer(body) == Complaint("busy", code="502")
    assert read_answer('{"error": "busy"}') == Complaint("busy", status=502)


@given(st.binary(max_size=60))
def test_no_body_is_too_strange_for_a_complaint(body: bytes) -> None:
    text = body.decode("utf-8", errors="replace")
    assert "\n" not in read_complaint(text).message


ATOMS = (
    st.none() | st.integers(-1, 1) | st.just(float("nan")) | st.sampled_from(["", "a", "\ud800"])
)


def inside(names: list[str]) -> st.SearchStrategy[Any]:
    return ATOMS | st.lists(ATOMS, max_size=2) | st.dictionaries(st.sampled_from(names), ATOMS)


MESSAGE = inside(["content", "refusal", "reasoning_content"])
CHOICE = ATOMS | st.fixed_dictionaries({"message": MESSAGE, "finish_reason": ATOMS})
BODY = ATOMS | st.fixed_dictionaries(
    {
        "choices": ATOMS | st.lists(CHOICE, max_size=1),
        "usage": inside(["prompt_tokens"]),
        "error": inside(["message", "code"]),
    }
)


@given(BODY)
def test_a_body_is_an_answer_a_complaint_or_a_value_error(value: Any) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(read_answer(json.dumps(value)), Answer | Complaint)
