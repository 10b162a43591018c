"""What the agent reads and writes in a turn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ragen_apo.choices import ResponseFormat
from ragen_apo.config.section import Penalty, Section, Size, require_json

_FILLED_IN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "raise_exception",
    "strftime_now",
)


def is_reserved_for_template(name: str) -> bool:
    """Whether a chat template gets this name from the agent, from transformers or the tokenizer."""
    return name in _FILLED_IN or name.endswith("_token")


class ContextConfig(Section):
    """What the policy reads besides system prompt, first and present observation."""

    mode: Literal["full", "last_turns", "single_turn"] = "full"
    """`full`: every turn so far; `last_turns`: the last num_turns turns; `single_turn`: the actions
    of the last num_turns turns, one line each."""
    num_turns: Size | None = None
    """How many turns `last_turns` and `single_turn` look back; null for `full`."""

    @property
    def label(self) -> str:
        """Names the window among the conditions of stored values."""
        return self.mode if self.num_turns is None else f"{self.mode}-{self.num_turns}"

    @model_validator(mode="after")
    def _windows_have_a_length(self) -> ContextConfig:
        if self.mode == "full" and self.num_turns is not None:
            raise ValueError(
                f"mode full holds every turn, got num_turns = {self.num_turns}; remove it, or use "
                "mode last_turns or single_turn"
            )
        if self.mode != "full" and self.num_turns is None:
            raise ValueError(
                f"mode {self.mode} needs num_turns, how many turns it looks back, at least 1; got "
                "null"
            )
        return self


class AgentConfig(Section):
    """The boundary between policy and environment."""

    max_response_tokens: Size = 40
    """Largest number of sampled tokens per turn."""
    max_context_tokens: Size = 1024
    """Largest number of tokens of one context, prompt and response (with `full`: of a whole
    episode). An episode or demonstration that needs more is truncated."""
    response_format: ResponseFormat = "think_answer"
    """`think_answer`: `<think>thought</think><answer>action</answer>`; `tool_call`: a call of one
    of the environment's tools, as the model's own chat template writes it."""
    format_penalty: Penalty = -0.05
    """Reward added for a response in which no action can be read. It reaches the environment as an
    empty action, so what the environment takes for an invalid action comes to it."""
    invalid_action_penalty: Penalty = 0.0
    """Reward added when the environment could not execute the action."""
    system_prompt: str = "none"
    """`none` (a chat template may insert its own, as SmolLM2's does: `ragen-apo show-prompt`);
    `rules` (the environment's rules); `rules_and_format` (these and the form of a response, which a
    model without a warm start does not know); or the text itself."""
    template_options: dict[str, Any] = Field(default={})
    """Options for the chat template of the model in `policy.path`, such as {enable_thinking: false}
    for Qwen3. The models that a run writes keep them as defaults."""
    context: ContextConfig = ContextConfig()

    @property
    def calls_tools(self) -> bool:
        return self.response_format == "tool_call"

    @model_validator(mode="after")
    def _template_options_are_free_names(self) -> AgentConfig:
        require_json(self.template_options)
        for name in self.template_options:
            if is_reserved_for_template(name):
                raise ValueError(
                    f"template_options names {name!r}, which every template is given already; "
                    "expected an option of the model's own template, such as enable_thinking"
                )
        return self

    @model_validator(mode="after")
    def _a_response_fits(self) -> AgentConfig:
        if self.max_response_tokens >= self.max_context_tokens:
            raise ValueError(
                f"max_response_tokens ({self.max_response_tokens}) must be less than "
                f"max_context_tokens ({self.max_context_tokens})"
            )
        return self
