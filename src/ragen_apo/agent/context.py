"""The context manager: renders observations to tokens and parses responses to actions.

Consumes the tokenizer's chat template and the turns so far; produces the tokens that a turn adds to
the context, or the whole context where a window has moved. Only the text between two responses is
tokenised, sampled tokens stay as they were sampled. Special tokens come from the template alone,
not from the messages (see `plain_text`).

Of a response, what the template has written already (`<think>`) stands in the prompt: it is neither
sampled nor demonstrated, and the parser reads it first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ragen_apo.agent.plain_text import PlainTextEncoder
from ragen_apo.agent.responses import (
    RESPONSE_FORMAT,
    ParsedResponse,
    parse_response,
    render_response,
)
from ragen_apo.agent.tool_calls import ToolCalls, tool_format
from ragen_apo.environments.tools import Tool, message_of, schemas_of
from ragen_apo.errors import ContextError
from ragen_apo.policy.call_form import read_call_form
from ragen_apo.policy.chat_template import read_chat_template
from ragen_apo.policy.tokenizer import CLOSE_ANSWER, CLOSE_THOUGHT, OPEN_THOUGHT, text_of
from ragen_apo.types import Task, Turn

_NUM_CACHED_PAGES = 4096


def system_prompt(configured: str, *, rules: str, tools: Sequence[Tool] = ()) -> str | None:
    """The text that `agent.system_prompt` stands for, with the environment's rules.

    `tools` are those that responses call, if they do.
    """
    form = tool_format(tools) if tools else RESPONSE_FORMAT
    chosen = {
        "none": None,
        "rules": rules,
        "rules_and_format": f"{rules}\n\n{form}".lstrip(),
    }
    return chosen.get(configured, configured)


@dataclass(frozen=True)
class ContextWindow:
    """The earlier turns in a prompt, besides the first and the present observation."""

    num_turns: int | None = None
    """The number of last turns that are whole; None for all, the full context."""
    num_actions: int = 0
    """The memory: of the turns before those, the number of last ones whose actions are listed."""

    def num_left_out(self, num_turns: int) -> int:
        """The number of turns that are not whole, of `num_turns`."""
        return 0 if self.num_turns is None else max(num_turns - self.num_turns, 0)

    def observations(self, turns: Sequence[Turn], observation: str) -> list[str]:
        """The texts that the agent reads, the present observation last.

        Where turns are left out, the first text is the first observation (which states the task),
        the lines of `mention` and the first observation of the window.
        """
        num_left_out = self.num_left_out(len(turns))
        texts = [*(turn.observation for turn in turns), observation]
        if num_left_out == 0:
            return texts
        mention = self.mention(turns[:num_left_out])
        return ["\n".join([texts[0], *mention, texts[num_left_out]]), *texts[num_left_out + 1 :]]

    def mention(self, left_out: Sequence[Turn]) -> list[str]:
        """The lines that replace the turns that are left out: `...`, or the memory.

            Actions so far:
            1. search red mug
            Now:

        The memory comes from the recorded actions, so it works for every model and for scripted
        demonstrations, and responses have the same form with it.
        """
        if not self.num_actions:
            return ["..."]
        numbered = [
            f"{number}. {' '.join(turn.action.split()) or '(none)'}"
            for number, turn in enumerate(left_out, start=1)
        ]
        return ["Actions so far:", *numbered[-self.num_actions :], "Now:"]


FULL_CONTEXT = ContextWindow()


@dataclass(frozen=True)
class Prompt:
    """The tokens that precede a response and are not in the context yet."""

    token_ids: tuple[int, ...]
    restarts: bool
    """True if the tokens are the whole context, False if they continue what is there."""


@dataclass(frozen=True)
class TokenLimits:
    """Upper limits of a context and of a response."""

    max_context_tokens: int
    max_response_tokens: int

    def fit(self, num_read_tokens: int, *, num_response_tokens: int = 0) -> bool:
        """Whether the longest response, or the given one if longer, fits after the tokens read."""
        longest = max(num_response_tokens, self.max_response_tokens)
        return num_read_tokens + longest <= self.max_context_tokens

    def refusal(
        self, task: Task, num_read_tokens: int, *, num_response_tokens: int = 0
    ) -> ContextError:
        """The error for a task whose first response does not fit into the context."""
        return ContextError(
            f"task {task.task_id} opens with {num_read_tokens} tokens, which with a response of "
            f"{max(num_response_tokens, self.max_response_tokens)} exceed "
            f"agent.max_context_tokens = {self.max_context_tokens}; raise it, or shorten the "
            "observation or system prompt."
        )


class ContextManager:
    """Makes the prompt of each response.

    With `tools`, prompts show them and a response is a call of one. `end_ids` are the tokens that
    end a response (`LanguageModel.end_ids`), by default those that the tokenizer and its template
    name. Raises ModelError where `read_chat_template` and, with tools, `read_call_form` do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None,
        limits: TokenLimits,
        window: ContextWindow = FULL_CONTEXT,
        end_ids: Sequence[int] = (),
        tools: Sequence[Tool] = (),
    ) -> None:
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.window, self.limits = window, limits
        schemas = schemas_of(tools)
        self.template = read_chat_template(tokenizer, tools=schemas)
        self._calls = ToolCalls(tools, read_call_form(self.template)) if tools else None
        self._end_ids = frozenset(end_ids or self.template.end_ids)
        self._num_closing = max(len(self.template.closing_ids), 1)
        self._plain_text = PlainTextEncoder(tokenizer)
        # Episodes of one task read the same pages again and again.
        self._tokens_between = functools.lru_cache(_NUM_CACHED_PAGES)(self._between)

    def prompt(self, turns: Sequence[Turn], observation: str) -> Prompt:
        """The prompt of the response to `observation`, after these turns of the episode.

        Until a turn is left out, the context continues. From then on each prompt is a new context:
        system prompt, and the window's observations with the responses between them.
        """
        num_left_out = self.window.num_left_out(len(turns))
        if not turns:
            return Prompt(tuple(self.first_prompt(observation)), restarts=False)
        if num_left_out == 0:
            added = self._prompt_after(turns[-1], observation)
            return Prompt(tuple(added), restarts=False)
        opening, *following = self.window.observations(turns, observation)
        token_ids = self.first_prompt(opening)
        for turn, answer in zip(turns[num_left_out:], following, strict=True):
            token_ids += turn.response_token_ids
            token_ids += self._prompt_after(turn, answer)
        return Prompt(tuple(token_ids), restarts=True)

    def first_prompt(self, observation: str) -> list[int]:
        """The tokens before the first response: system prompt, observation, the opened response."""
        messages = [{"role": "user", "content": self._plain_text.mark(observation)}]
        if self.system_prompt:
            system = self._plain_text.mark(self.system_prompt)
            messages.insert(0, {"role": "system", "content": system})
        return self._plain_text.encode(self.template.render(messages))

    def _prompt_after(self, turn: Turn, observation: str) -> list[int]:
        """A call is answered by the tool, a message by the user."""
        calls = self._calls
        is_message = (
            calls and message_of(calls.tools) and not calls.found_in(self._read(turn.response)[0])
        )
        role = "user" if is_message else None
        return self.next_prompt(observation, last_response=turn.response_token_ids, role=role)

    def next_prompt(
        self, observation: str, *, last_response: Sequence[int], role: str | None = None
    ) -> list[int]:
        """The tokens between a response and the next one, with an answer of the role or of the
        template's own.

        If the response ended with a token by which the template goes on, such as the end of a turn,
        that token is not added a second time.
        """
        token_ids = list(self._tokens_between(observation, role))
        closing = token_ids[: self._num_closing]
        if last_response and last_response[-1] in self._end_ids.intersection(closing):
            return token_ids[closing.index(last_response[-1]) + 1 :]
        return token_ids

    def _between(self, observation: str, role: str | None) -> tuple[int, ...]:
        """The template's tokens between two responses, with the observation."""
        text = self.template.between_responses(self._plain_text.mark(observation), role=role)
        return tuple(self._plain_text.encode(text))

    def parse(self, text: str, *, is_cut_off: bool = False) -> ParsedResponse:
        """Reads a response, after what the template has written of it.

        `is_cut_off`: the token limit ended it.

        After an empty thought of the template's (`<think></think>`), a response with a thought of
        its own has the agreed form, too.
        """
        return self._read(text, is_cut_off=is_cut_off)[1]

    def _read(self, text: str, *, is_cut_off: bool = False) -> tuple[str, ParsedResponse]:
        """The text that is read, with or without the template's part, and what it says."""
        calls = self._calls
        parse = functools.partial(calls.parse, is_cut_off=is_cut_off) if calls else parse_response
        whole = self.template.opening + text
        read = parse(whole)
        if read.is_valid or not self._thought_is_over:
            return whole, read
        return text, parse(text)

    def write_response(self, *, thought: str, action: str) -> str:
        """The text that a policy would have to write for this thought and action.

        It is the inverse of `parse`: what the template has written is left out.
        """
        render = self._calls.render if self._calls else render_response
        text = render(thought=thought, action=action)
        if self._thought_is_over:
            return text.removeprefix(f"{OPEN_THOUGHT}{CLOSE_THOUGHT}").lstrip()
        return text.removeprefix(self.template.opening.rstrip())

    @property
    def _thought_is_over(self) -> bool:
        return CLOSE_THOUGHT in self.template.opening

    def encode_response(self, text: str) -> list[int]:
        """The tokens of a scripted response; responses of the policy are never tokenised.

        A closing tag ends an answer; a tool call ends with the turn, and its tags may be tokens.
        """
        marked = self._plain_text.mark(text)
        if not self._calls:
            return self._plain_text.encode(marked)
        for part in (self._calls.form.opening, self._calls.form.closing):
            marked = marked.replace(self._plain_text.mark(part), part)
        return [*self._plain_text.encode(marked), *self.template.closing_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response without the token that ended it, for people and for parsing.

        The closing tag stays, also where it is the token that ends a response.
        """
        if token_ids and token_ids[-1] in self._end_ids:
            is_tag = self.tokenizer.convert_ids_to_tokens(token_ids[-1]) == CLOSE_ANSWER
            token_ids = token_ids if is_tag else token_ids[:-1]
        return text_of(self.tokenizer, token_ids)
