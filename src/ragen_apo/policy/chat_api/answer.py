"""What a server's answer says: the answer of the model, or why there is none.

Consumes the text of a response; produces records. The names of fields are those of OpenAI's chat
completions, with `reasoning_content` and `reasoning`, in which servers put a model's own thinking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ragen_apo.files import parse_json
from ragen_apo.printable import printable, shortened

MAX_MESSAGE_CHARACTERS = 300
_PASSING_STATUS = 502
_CONTEXT_FULL = re.compile(
    r"prompt is too long|too many (input )?tokens|input (is )?too long"
    r"|^(?=.*(context[ _-]?(length|window|size|limit)|max_model_len))"
    r".*(exceed|maximum|longer|larger|overflow|request|fit|too (long|large|many))",
    re.IGNORECASE,
)
"""A context alone may be that of a field which the server does not know."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, as the server has read it."""

    name: str
    arguments: str
    """JSON, if the model has written it well."""
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """What the model wrote in one turn, and what it cost."""

    content: str
    """Empty if the model wrote nothing, refused or called a tool."""
    reasoning: str = ""
    """What the server has split off as the model's own thinking."""
    finish_reason: str = ""
    """`length` if the limit of tokens ended it."""
    refused: bool = False
    prompt_tokens: int | None = None
    """As the server counts them; None where it does not say."""
    completion_tokens: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Complaint:
    """What a server says instead of an answer."""

    message: str = ""
    """One line without control characters."""
    code: str = ""
    status: int = 400
    """The HTTP status that it would have had, where it stands inside an answer without a code."""

    @property
    def context_full(self) -> bool:
        """Whether prompt and answer do not fit into the model's context."""
        return self.code == "context_length_exceeded" or bool(_CONTEXT_FULL.search(self.message))


def read_answer(body: str) -> Answer | Complaint:
    """The answer in the body of a successful response; some servers complain in there, too.

    Raises ValueError that says what is wrong with the body: not JSON, no choices, no message.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, got {type(value).__name__}")
    choices = value.get("choices")
    if not choices and value.get("error"):
        found = _complaint_of(value["error"])
        return found if found.code else replace(found, status=_PASSING_STATUS)
    if not isinstance(choices, list) or not choices:
        raise ValueError("it has no choices")
    choice = choices[0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise ValueError("its first choice has no message")
    if choice.get("error") or choice.get("finish_reason") == "error":
        # A router's answer of a model that failed: the same question may succeed.
        found = _complaint_of(choice.get("error") or "the model failed")
        return replace(found, status=_PASSING_STATUS)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(_text(part.get("text")) for part in parts)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of its message is {type(content).__name__}, expected text")
    usage = value.get("usage")
    return Answer(
        content=_text(content),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        finish_reason=_text(choice.get("finish_reason")),
        refused=bool(message.get("refusal")) or choice.get("finish_reason") == "content_filter",
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        tool_calls=_tool_calls(message.get("tool_calls")),
    )


def read_complaint(body: str) -> Complaint:
    """Message and code in the body of a refusal, in whichever of the common forms; never raises."""
    try:
        value = parse_json(body)
    except ValueError:
        return Complaint(_one_line(body[:2000]))
    return _complaint_of(value.get("error", value) if isinstance(value, dict) else value)


def _complaint_of(error: Any) -> Complaint:
    if not isinstance(error, dict):
        return Complaint(_one_line(error))
    message = error.get("message") or error.get("detail") or error.get("msg") or ""
    return Complaint(_one_line(message), code=_one_line(error.get("code") or ""))


def _one_line(value: Any) -> str:
    return shortened(printable(" ".join(_whole(str(value)).split())), MAX_MESSAGE_CHARACTERS)


def _tool_calls(value: Any) -> tuple[ToolCall, ...]:
    """The calls in a message; some servers send the arguments as an object instead of its text."""
    calls = [call for call in value if isinstance(call, dict)] if isinstance(value, list) else []
    found: list[ToolCall] = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            found.append(ToolCall(_text(function.get("name")), _whole(text), _text(call.get("id"))))
    return tuple(found)


def _text(value: Any) -> str:
    return _whole(value) if isinstance(value, str) else ""


def _whole(text: str) -> str:
    """The text with a replacement for each half of a surrogate pair, which no file could keep."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None
