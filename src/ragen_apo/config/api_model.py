"""What an evaluation of a model behind an API depends on: the content of its evaluation.yaml.

Only what changes its numbers. How many questions are asked at a time, time limits and keys are no
part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.run import RunConfig
from ragen_apo.config.section import Section, Seed, Size, require_json
from ragen_apo.config.training import EvaluationConfig
from ragen_apo.errors import ConfigError

AGENT_KEYS = (
    "response_format",
    "format_penalty",
    "invalid_action_penalty",
    "system_prompt",
    "context",
)
"""The keys of `agent` that such an evaluation depends on."""
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
    """Everything that the numbers of such an evaluation depend on, and some keys that they do not:
    `written` leaves out what is for a model of ours.
    """

    seed: Seed
    environment: EnvironmentConfig
    agent: AgentConfig
    evaluation: EvaluationConfig
    api: ApiConfig

    def written(self) -> dict[str, Any]:
        """The content of evaluation.yaml."""
        return self.model_dump(
            by_alias=True,
            include={
                "seed": True,
                "environment": True,
                "agent": {*AGENT_KEYS},
                "evaluation": {"split", "num_episodes", "temperature"},
                "api": True,
            },
        )


def prompt_told(system_prompt: str) -> str:
    """What such a model is told in place of a run's `agent.system_prompt`: `none` and `rules` are
    for models that have been taught the form.
    """
    return TOLD if system_prompt in ("none", "rules") else system_prompt


def check_extra_body(extra_body: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys of a request that are set already, and for what is not JSON."""
    if strange := [name for name in extra_body if not isinstance(name, str)]:
        raise ConfigError(f"extra_body: got the key {strange[0]!r}, expected keys that are text")
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
    config: RunConfig, *, model: str, base_url: str, max_tokens: int, extra_body: Mapping[str, Any]
) -> ApiModelConfig:
    """The parts of a run's configuration that hold for a model behind an API.

    Its system prompt is that of `prompt_told`. Raises what `check_extra_body` does.
    """
    check_extra_body(extra_body)
    told = prompt_told(config.agent.system_prompt)
    agent = config.agent.model_copy(update={"system_prompt": told})
    return ApiModelConfig(
        seed=config.seed,
        environment=config.environment,
        agent=agent,
        evaluation=config.evaluation,
        api=ApiConfig(
            model=model, base_url=base_url, max_tokens=max_tokens, extra_body=dict(extra_body)
        ),
    )
