"""The form `think_answer` of a response: `<think>thought</think><answer>action</answer>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ragen_apo.policy.tokenizer import CLOSE_ANSWER, CLOSE_THOUGHT, OPEN_ANSWER, OPEN_THOUGHT

_RESPONSE = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")

RESPONSE_FORMAT = (
    "Answer every message in this form and write nothing else:\n"
    "<think>what you think</think><answer>one action</answer>"
)
"""The description, for a system prompt, of the form that `parse_response` reads."""


@dataclass(frozen=True)
class ParsedResponse:
    """Thought and action of a response; `is_valid` is False if it does not have the agreed form."""

    thought: str
    action: str
    is_valid: bool


def parse_response(text: str) -> ParsedResponse:
    """Reads `<think>thought</think><answer>action</answer>`; anything else is a format error.

    So is a tag inside the thought or the action.
    """
    match = _RESPONSE.fullmatch(text)
    if match is None or _TAG.search(match[1]) or _TAG.search(match[2]):
        return ParsedResponse(thought="", action="", is_valid=False)
    return ParsedResponse(thought=match[1].strip(), action=match[2].strip(), is_valid=True)


def render_response(*, thought: str, action: str) -> str:
    """The response with this thought and action; the inverse of `parse_response`."""
    return f"{OPEN_THOUGHT}{thought}{CLOSE_THOUGHT}{OPEN_ANSWER}{action}{CLOSE_ANSWER}"
