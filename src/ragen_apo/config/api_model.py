"""What an evaluation of a model behind an API depends on: the content of its evaluation.yaml.

Only what changes its numbers. How many questions are asked at a time, time limits and keys are no
part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ragen_apo.choices import ResponseFormat
from ragen_apo.config.agent import ContextConfig
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.run import RunConfig
from ragen_apo.config.section import (
    NonNegative,
    Penalty,
    Section,
    Seed,
    Size,
    require_json,
)
from ragen_apo.errors import ConfigError

TOLD = "rules_and_format"
"""What a model that was not trained here has to be told: the rules and the form of a response."""
OWN_BODY = {
    "model": "--api-model",
    "messages": "the conversation",
    "temperature": "--temperature",
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "tools": "--response-format tool_call",
    "stream": "no option, as answers are read whole",
}
"""The keys of a request that are set here, and what sets each."""


class ApiAgentConfig(Section):
    """The keys of the section `agent` that hold for a model behind an API."""

    response_format: ResponseFormat = "think_answer"
    """Whether an answer has an action between tags, or calls a tool."""
    format_penalty: Penalty
    """Reward of a response in which no action can be read."""
    invalid_action_penalty: Penalty
    """Reward added when the environment could not execute the action."""
    system_prompt: str
    """`rules_and_format`, or the text itself."""
    context: ContextConfig
    """What the model reads besides system prompt, first and present observation."""


class ApiEvaluationConfig(Section):
    """Which episodes are played, and how an answer is drawn."""

    split: str
    """Tasks to play."""
    num_episodes: Size
    """Tasks in the split's order, one episode each."""
    temperature: NonNegative
    """Sampling temperature; 0 is greedy."""


class ApiConfig(Section):
    """The model and its server."""

    model: Annotated[str, Field(min_length=1)]
    """The name under which the server knows the model."""
    base_url: str
    """The root of the API, without keys."""
    max_tokens: Size
    """Tokens of an answer at most."""
    extra_body: dict[str, Any] = Field(default={})
    """Further keys of every request, such as {reasoning_effort: low}."""


class ApiModelConfig(Section):
    """Everything that the numbers of such an evaluation depend on."""

    seed: Seed
    environment: EnvironmentConfig
    agent: ApiAgentConfig
    evaluation: ApiEvaluationConfig
    api: ApiConfig


def check_extra_body(extra_body: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys of a request that are set already, and for what is not JSON."""
    if own := [name for name in extra_body if name in OWN_BODY]:
        name = own[0]
        raise ConfigError(
            f"extra_body: {name!r} is set by {OWN_BODY[name]}; expected other keys of the server's "
            'chat completions, such as {"reasoning_effort": "low"}'
        )
    try:
        require_json(extra_body)
    except ValueError as error:
        raise ConfigError(f"extra_body: {error}") from error


def api_model_config(
    config: RunConfig,
    *,
    model: str,
    base_url: str,
    max_tokens: int,
    extra_body: Mapping[str, Any],
) -> ApiModelConfig:
    """The parts of a run's configuration that hold for a model behind an API.

    Its system prompt is `rules_and_format` unless the configuration has a text of its own: `none`
    and `rules` are for models that have been taught the form. Raises what `check_extra_body` does.
    """
    check_extra_body(extra_body)
    agent = config.agent.model_dump(include=set(ApiAgentConfig.model_fields))
    if config.agent.system_prompt in ("none", "rules"):
        agent["system_prompt"] = TOLD
    evaluation = config.evaluation.model_dump(include=set(ApiEvaluationConfig.model_fields))
    return ApiModelConfig(
        seed=config.seed,
        environment=config.environment,
        agent=ApiAgentConfig(**agent),
        evaluation=ApiEvaluationConfig(**evaluation),
        api=ApiConfig(
            model=model, base_url=base_url, max_tokens=max_tokens, extra_body=dict(extra_body)
        ),
    )
