r"""How a model writes a tool call: the JSON of name and arguments, and what stands around it.

    Qwen, SmolLM3   <tool_call>\n{"name": "move", "arguments": {"direction": "Up"}}\n</tool_call>
    Llama           {"name": "move", "parameters": {"direction": "Up"}}

It is found out by rendering a call with the chat template. Templates that write calls otherwise
(as XML, or as Python) are refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from jinja2 import TemplateError

from ragen_apo.errors import ModelError
from ragen_apo.policy.chat_template import ChatTemplate
from ragen_apo.policy.tokenizer import CLOSE_THOUGHT, OPEN_THOUGHT
from ragen_apo.printable import shortened

_WAY_OUT = (
    "Take a model whose template does, such as Qwen2.5, Qwen3 or Llama 3.1, or set "
    "agent.response_format to think_answer"
)
_NAME, _ARGUMENTS = "probe", '{"of": "it"}'
_QUESTION, _RESULT = {"role": "user", "content": "Go."}, "Done."
_CALL = re.compile(
    r'\{"name": "probe", "(?P<key>arguments|parameters)": ' + re.escape(_ARGUMENTS) + r"\}"
)
_OBJECT = re.compile(r'\{\s*"')
BEGINS_AS_CALL = re.compile(r'\{\s*"name"\s*:')
_EMPTY_THOUGHT = re.compile(rf"{OPEN_THOUGHT}\s*{CLOSE_THOUGHT}\s*")


@dataclass(frozen=True)
class CallForm:
    """A tool call as text."""

    opening: str = "<tool_call>\n"
    """What stands before the JSON, if anything does."""
    closing: str = "\n</tool_call>"
    key: str = "arguments"
    """What the arguments are called in the JSON."""

    def write(self, name: str, arguments: str) -> str:
        """A call; the arguments are JSON already."""
        call = f'{{"name": {json.dumps(name)}, {json.dumps(self.key)}: {arguments}}}'
        return f"{self.opening}{call}{self.closing}"

    def split(self, text: str) -> tuple[str, list[str]]:
        """What stands before the first call, and the JSON of each call up to the end of the text.

        No JSON if no call begins; "" alone if something else follows what closes one.
        """
        opening, closing = self.opening.strip(), self.closing.strip()
        begin = text.find(opening) if opening else _first_call(text)
        if begin < 0:
            return text, []
        before, rest = text[:begin], text[begin:].removeprefix(opening).strip()
        if not closing:
            return before, _objects(rest)
        if not rest.endswith(closing):
            return before, [""]
        between = rf"{re.escape(closing)}\s*{re.escape(opening)}"
        return before, re.split(between, rest.removesuffix(closing))


def _first_call(text: str) -> int:
    """Where JSON with a name begins, or what seems to be meant as such; -1 if nothing does.

    Other JSON is read over, with all that is in it.
    """
    position = 0
    while begins := _OBJECT.search(text, position):
        start = begins.start()
        try:
            value, position = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            if BEGINS_AS_CALL.match(text, start):
                return start
            position = start + 1
        else:
            if isinstance(value.get("name"), str):
                return start
    return -1


def _objects(text: str) -> list[str]:
    """JSON objects that follow each other; the whole text if that is something else."""
    found: list[str] = []
    rest = text
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return [text]
        found.append(rest[:end])
        rest = rest[end:].lstrip(" \t\r\n;")
    return found


def read_call_form(template: ChatTemplate) -> CallForm:
    """The form in which this template, which has been given tools, writes a call.

    Raises ModelError with a way out for a template that does not show tools, that ends no turn, or
    that writes no JSON.
    """
    _require_shown(template)
    written = _written_call(template)
    found = _CALL.search(written)
    if found is None or not template.closing_ids:
        raise ModelError(
            "agent.response_format is tool_call, and the model's chat template writes a call as "
            f"{shortened(repr(written), 120)}; expected JSON such as "
            '{"name": ..., "arguments": {...}} and a token that ends the turn. ' + _WAY_OUT
        )
    return CallForm(written[: found.start()], written[found.end() :], found["key"])


def _require_shown(template: ChatTemplate) -> None:
    shown, unshown = (each.render([_QUESTION]) for each in (template, replace(template, tools=())))
    names = [tool["function"]["name"] for tool in template.tools]
    if shown == unshown or not all(name in shown for name in names):
        raise ModelError(
            "agent.response_format is tool_call, and the model's chat template does not show the "
            f"tools ({', '.join(names)}) to it. {_WAY_OUT}"
        )


def _written_call(template: ChatTemplate) -> str:
    """The call alone; or, where it cannot be cut out, the end of the conversation or the error."""
    function = {"name": _NAME, "arguments": json.loads(_ARGUMENTS)}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00000", "function": function}],
    }
    result = {"role": template.answer_role, "content": _RESULT}
    try:
        written = template.render([_QUESTION, call, result])
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    prompt = template.render([_QUESTION]).removesuffix(template.opening)
    answer = template.between_responses(_RESULT)
    if not (written.startswith(prompt) and written.endswith(answer)):
        return written[-len(answer) - 80 :]
    written = written.removeprefix(prompt).removesuffix(answer)
    return _EMPTY_THOUGHT.sub("", written, count=1)
