"""The form `tool_call` of a response: a thought, and a call of one of the environment's tools.

    <think>a red mug</think>

    <tool_call>
    {"name": "search", "arguments": {"words": "red mug"}}
    </tool_call>

What stands around the JSON depends on the model (`policy.call_form`). The recorded action is the
text that the call stands for, so whatever reads actions need not know of tools. Several calls are
one action if the tools allow it (`Tool.is_joinable`). If one of the tools is a message
(`Tool.is_message`), a response without a call is a call of that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.environments.tools import Tool, called, calls_of, message_of
from ragen_apo.errors import ConfigError
from ragen_apo.files import parse_json
from ragen_apo.policy.call_form import BEGINS_AS_CALL, CallForm
from ragen_apo.policy.tokenizer import CLOSE_THOUGHT, OPEN_THOUGHT
from ragen_apo.printable import shortened

_FAULT = ParsedResponse(thought="", action="", is_valid=False)
_THOUGHT_TAG = re.compile(f"{OPEN_THOUGHT}|{CLOSE_THOUGHT}")


def tool_format(tools: Sequence[Tool]) -> str:
    """The description of the form, for a system prompt; the template shows the rest."""
    form = (
        "Answer every message with one tool call and write nothing after it. Where an action is "
        "described as text, call the tool that does the same."
    )
    message = message_of(tools)
    if message is None:
        return form
    return (
        f"{form} In place of {message.signature}, write the text alone, without a call; whatever "
        f"you think stands before it, between {OPEN_THOUGHT} and {CLOSE_THOUGHT}."
    )


def expected_calls(tools: Sequence[Tool]) -> str:
    """The answer to a response without a call that can be executed."""
    *others, last = (tool.signature for tool in called(tools))
    listed = f"{', '.join(others)} or {last}" if others else last
    message = message_of(tools)
    alone = f", or with the text of {message.signature} alone" if message else ""
    return f"Answer with one call of {listed}{alone}."


@dataclass(frozen=True)
class ToolCalls:
    """Reads and writes responses that call one of these tools."""

    tools: Sequence[Tool]
    form: CallForm

    def parse(self, text: str, *, is_cut_off: bool = False) -> ParsedResponse:
        """Thought and action text of a response; what stands before the call is the thought.

        No call, one that is no JSON, text behind it, and several where no tool is joinable are
        format errors. Without an action are a call of an unknown tool or with arguments that do not
        fit, and several calls of which one is such, not joinable, or has a line break in its text.
        Text without a call is a message, if one of the tools is, unless it is empty or was cut off.
        """
        thought, said = _behind_thought(text)
        before, calls = self.form.split(said)
        if OPEN_THOUGHT in before and CLOSE_THOUGHT not in before:
            return _FAULT
        if not calls:
            before, _, message = said.rpartition(CLOSE_THOUGHT)
            thought = _THOUGHT_TAG.sub("", thought + before).strip()
            return _FAULT if is_cut_off else self._message(thought, message.strip())
        is_one = len(calls) == 1
        tools = [tool for tool in self.tools if is_one or tool.is_joinable]
        read = (_action(tools, call) for call in calls)
        actions = [action for action in read if action is not None]
        if not tools or len(actions) < len(calls):
            return _FAULT
        can_be_done = all(actions) and (is_one or not any("\n" in action for action in actions))
        thought = _THOUGHT_TAG.sub("", thought + before).strip()
        return ParsedResponse(thought, "\n".join(actions) if can_be_done else "", is_valid=True)

    def found_in(self, text: str) -> bool:
        """Whether a call begins in a response, behind its thought."""
        return bool(self.form.split(_behind_thought(text)[1])[1])

    def _message(self, thought: str, text: str) -> ParsedResponse:
        """Text without a call as the message; what was meant as a call is none.

        A message may be written as the rules write actions, `answer(42)`.
        """
        message, closing = message_of(self.tools), self.form.closing.strip()
        is_broken = (closing and closing in text) or BEGINS_AS_CALL.match(text)
        if message is None or not text or is_broken:
            return _FAULT
        written = next((tool for tool in self.tools if text.startswith(f"{tool.name}(")), None)
        if written is not None and written.arguments_of(text) is not None:
            return ParsedResponse(thought, text, is_valid=True) if written == message else _FAULT
        action = message.action_of(dict.fromkeys(message.parameters, text))
        return ParsedResponse(thought, action or "", is_valid=True)

    def render(self, *, thought: str, action: str) -> str:
        """The response with this thought and the calls that stand for this action text.

        Raises ConfigError for an action that no tool writes.
        """
        found = calls_of(self.tools, action)
        if not found:
            raise ConfigError(
                f"agent.response_format is tool_call, and no tool of the environment writes the "
                f"action {shortened(repr(action), 80)}; expected one of "
                f"{', '.join(tool.action for tool in self.tools)}. Leave this demonstration out, "
                "or set agent.response_format to think_answer"
            )
        written = [
            self.form.write(tool.name, json.dumps(arguments, ensure_ascii=False))
            for tool, arguments in found
        ]
        call, (tool, arguments) = "\n".join(written), found[0]
        if tool.is_message:
            (text,) = arguments.values()
            plain = ParsedResponse("", tool.action_of(arguments) or "", is_valid=True)
            call = text if self.parse(text) == plain else call
        return f"{OPEN_THOUGHT}{thought}{CLOSE_THOUGHT}\n\n{call}"


def _behind_thought(text: str) -> tuple[str, str]:
    """A response's thought and what follows it: everything, if no thought is closed."""
    thought, closed, said = text.partition(CLOSE_THOUGHT)
    return (thought, said) if closed else ("", text)


def _action(tools: Sequence[Tool], call: str) -> str | None:
    """The action text of a call as JSON: "" if no tool writes it, and None if it is no call."""
    try:
        value = parse_json(call)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    tool = next((tool for tool in tools if tool.name == value["name"]), None)
    if tool is None or not isinstance(arguments, dict):
        return ""
    return (tool.action_of(arguments) or "").strip()
