"""A tokenizer's chat template: how it is rendered, and what it writes around a response.

Templates are programs that differ from model to model. `read_chat_template` renders a few short
conversations to find out what the rest of the package must know: whether there is a system role,
which part of a response is already in the prompt (`<think>`), and what ends a turn.

A template that asks for the date gets `TEMPLATE_DATE`, so that a prompt is the same every day.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragen_apo.errors import ModelError

TEMPLATE_DATE = datetime.date(2024, 7, 26)
"""Today, to every template; the day that Llama's own names where it has no clock."""
CONVERSATION = (
    {"role": "user", "content": "Which?"},
    {"role": "assistant", "content": "This."},
    {"role": "user", "content": "And now?"},
)
_CLOCK = "strftime_now"
"""The function by which transformers tells a template the date."""
_SENTINEL = "\u241f"
"""Stands for a message when the template is rendered to find the text around it."""
_ANSWERED = ({"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL})
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions that the model may call, as `apply_chat_template` takes them."""


@dataclass(frozen=True)
class ChatTemplate:
    """What a tokenizer's template does, found out by rendering it."""

    tokenizer: PreTrainedTokenizerBase
    has_system_role: bool
    """Whether it renders a system message; Gemma's refuses one, others leave it out."""
    opening: str
    """What it has written of every response: `<think>`, an empty thought, or nothing; white space
    that follows is part of it."""
    closing: str
    """What it writes after every response: the token that ends a turn, or nothing."""
    tools: Tools = ()
    """What every prompt shows to the model, if the template does."""
    answer_role: str = "user"
    """Who answers a response: `tool` where there are tools and the template knows that role."""

    def render(self, messages: Messages) -> str:
        """The conversation as text, up to the opened response.

        Where there is no system role, a system message stands before the first user message, with
        an empty line between them.
        """
        if not self.has_system_role and messages and messages[0]["role"] == "system":
            system, first, *others = messages
            content = f"{system['content']}\n\n{first['content']}"
            messages = [{"role": first["role"], "content": content}, *others]
        return _render(self.tokenizer, messages, tools=self.tools)

    def between_responses(self, content: str, *, role: str | None = None) -> str:
        """The text from the end of a response to the next one, with the answer between them.

        The answer is that of another role than `answer_role`, if one is given.
        """
        messages = [*_ANSWERED, {"role": role or self.answer_role, "content": content}]
        return _render(self.tokenizer, messages, tools=self.tools).partition(_SENTINEL)[2]

    @property
    def end_ids(self) -> set[int]:
        """The tokens that end a response, as tokenizer and template name them."""
        end_of_text = self.tokenizer.eos_token_id
        found = {end_of_text} if isinstance(end_of_text, int) else set()
        return found.union(self.closing_ids[-1:])

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """The tokens after a response up to the one that ends the turn; none without such a one.

        That is one token in most templates. In some, white space comes before it.
        """
        token_ids = self.tokenizer.encode(self.closing, add_special_tokens=False)
        added = self.tokenizer.added_tokens_decoder
        ends = [index for index, token in enumerate(token_ids) if token in added]
        return tuple(token_ids[: ends[0] + 1]) if ends else ()


def read_chat_template(tokenizer: PreTrainedTokenizerBase, *, tools: Tools = ()) -> ChatTemplate:
    """Renders short conversations with the tokenizer's template, and with these tools.

    Raises ModelError if there is none, if it fails on a conversation of two turns, if it leaves out
    an earlier response, or if it opens only some responses.
    """
    folder = getattr(tokenizer, "name_or_path", "")
    name = f"'{folder}'" if folder else "this tokenizer"
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{name} has no chat template; expected one that renders user and assistant messages. "
            "Use an instruction-tuned model or set tokenizer.chat_template."
        )
    role = _answer_role(tokenizer, tools)
    try:
        first = _render(tokenizer, CONVERSATION[:1], tools=tools)
        whole = _render(tokenizer, [*_ANSWERED, {**CONVERSATION[2], "role": role}], tools=tools)
    except Exception as error:
        # A template is a program: it may fail in any way.
        raise ModelError(
            f"the chat template of {name} fails on a conversation of two turns "
            f"({type(error).__name__}: {error}); mend tokenizer.chat_template, or take the "
            "instruction-tuned model's own"
        ) from error
    _, found, between = whole.partition(_SENTINEL)
    if not found:
        raise ModelError(
            f"the chat template of {name} leaves out an earlier assistant message, so turns cannot "
            "be appended; use a template that renders every message"
        )
    openings = [_opening_of(text) for text in (first, between)]
    if openings[0] != openings[1]:
        raise ModelError(
            f"the chat template of {name} opens the first response with {openings[0]!r} and the "
            f"second with {openings[1]!r}; expected the same before every response. Mend "
            "tokenizer.chat_template"
        )
    ended = _try_to_render(tokenizer, _ANSWERED, tools=tools, add_generation_prompt=False)
    system = {"role": "system", "content": _SENTINEL}
    return ChatTemplate(
        tokenizer,
        has_system_role=_SENTINEL in _try_to_render(tokenizer, [system, CONVERSATION[0]]),
        opening=openings[0],
        closing=_common_start(ended.partition(_SENTINEL)[2], between),
        tools=tools,
        answer_role=role,
    )


def asks_for_the_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts depend on `TEMPLATE_DATE`."""
    return _CLOCK in str(tokenizer.chat_template)


def _answer_role(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> str:
    """`tool` if the template writes such a message after an answer to tools, otherwise `user`."""
    said = CONVERSATION[2]["content"]
    messages = [*_ANSWERED, {"role": "tool", "content": said}]
    rendered = _try_to_render(tokenizer, messages, tools=tools) if tools else ""
    return "tool" if said in rendered.partition(_SENTINEL)[2] else "user"


def _opening_of(prompt: str) -> str:
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def _common_start(first: str, second: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in pairs)


def _try_to_render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> str:
    """The conversation, or nothing where the template refuses it."""
    try:
        return _render(tokenizer, messages, **options)
    except (TemplateError, TypeError, ValueError, LookupError):
        return ""


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    tools: Tools = (),
    add_generation_prompt: bool = True,
) -> str:
    template = None
    schemas: list[Any] | None = [dict(tool) for tool in tools] or None
    if asks_for_the_date(tokenizer):
        template = _stopped_clock() + tokenizer.get_chat_template(tools=schemas)
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=schemas,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        chat_template=template,
    )
    assert isinstance(rendered, str)
    return rendered


def _stopped_clock() -> str:
    """A macro that takes the place of transformers' clock; functions cannot be handed to it.

    It fails on a format with other directives, which would stay in the prompt.
    """
    directives = "aAwdbBmyYHIMSpfjUWcxXeFDTRzZGVuCghrklP"
    replaced = [
        f"replace('%{sign}{letter}', '{TEMPLATE_DATE.strftime(f'%{sign}{letter}')}')"
        for sign in ("", "-")
        for letter in directives
    ]
    return (
        f"{{% macro {_CLOCK}(format) %}}{{% for part in format.split('%%') %}}"
        f"{{% set text = part | {' | '.join(replaced)} %}}{{% if '%' in text %}}"
        f"{{{{ raise_exception('{_CLOCK} knows no date of the form ' ~ format) }}}}{{% endif %}}"
        "{{ text ~ ('' if loop.last else '%') }}{% endfor %}{% endmacro +%}"
    )
