"""The options of `evaluate` for a model behind an API, and what the command does with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from ragen_apo.choices import ResponseFormat
from ragen_apo.cli.common import Number, print_evaluation, say
from ragen_apo.errors import ConfigError
from ragen_apo.plural import counted

_GROUP = Group("A model behind an API", sort_key=10)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class ApiOptions:
    """What is played, by which model, and where the results go."""

    api_model: str | None = None
    """Play with this model of a server, under its name there, instead of with a run."""
    base_url: str | None = None
    """Root of the server's OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    out: Path | None = None
    """Folder of the evaluation, which goes on there if it was interrupted. Default:
    runs/api/MODEL-ENVIRONMENT."""
    environment: str | None = None
    """Name of an environment, path.py:function or module:function. Default: the configuration's."""
    environment_option: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """An option of the environment, as key=value; may be given several times."""
    config: Path | None = None
    """A YAML file, such as a run's or the evaluation.yaml of an evaluation to go on with, whose
    sections environment, agent, evaluation, whose seed and rollouts.num_environment_workers are
    used."""
    max_turns: Number | None = None
    """Short for --environment-option max_turns=N."""
    response_format: ResponseFormat | None = None
    """How the model answers: think_answer (tags) or tool_call. Default: agent.response_format."""
    temperature: float | None = None
    """Sampling temperature. Default: evaluation.temperature, 0."""
    max_tokens: Number = 512
    """Tokens of an answer at most, a model's own thinking included."""
    extra_body: str | None = None
    """Further keys of every request, as a JSON object such as '{"reasoning_effort": "low"}'."""
    concurrency: Number = 8
    """Episodes that are played at a time."""
    environment_workers: Number | None = None
    """Environments that may act at the same time, for slow ones. Default:
    rollouts.num_environment_workers, 1."""
    timeout: float = 300.0
    """Seconds for one answer, after which it is asked for again."""
    api_key_env: str | None = None
    """Environment variable with the key. Default: OPENAI_API_KEY, if it is set, and only over
    https or to this machine."""


def refuse_api_options(api: ApiOptions) -> None:
    """Raises ConfigError if an option is given that only a model behind an API has."""
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(api)
        if getattr(api, field.name) != field.default
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: for a model behind an API, which --api-model names; a run is "
            "evaluated with its own configuration"
        )


def evaluate_model_of_api(api: ApiOptions, *, split: str | None, episodes: int | None) -> None:
    """Evaluates and prints the table."""
    from ragen_apo.api import evaluate_api, read_config

    if api == ApiOptions():
        raise ConfigError("give a run directory to evaluate, or --api-model and --base-url")
    if not api.api_model or not api.base_url:
        missing = "--base-url" if api.api_model else "--api-model"
        raise ConfigError(
            f"{missing} is missing: --api-model NAME and --base-url URL together say which model "
            "plays, such as --api-model smollm2 --base-url http://127.0.0.1:8000/v1"
        )
    asked = {"split": split, "num_episodes": episodes, "temperature": api.temperature}
    workers = api.environment_workers
    form = {} if api.response_format is None else {"response_format": api.response_format}
    config = read_config(
        {} if api.config is None else _settings(api.config),
        environment=_environment(api),
        agent=form,
        evaluation={key: value for key, value in asked.items() if value is not None},
        rollouts={} if workers is None else {"num_environment_workers": workers},
    )
    out = api.out or default_folder(api.api_model, config.environment.name)
    results = evaluate_api(
        api.api_model,
        out,
        base_url=api.base_url,
        config=config,
        max_tokens=api.max_tokens,
        extra_body=_extra_body(api.extra_body),
        concurrency=api.concurrency,
        timeout_seconds=api.timeout,
        api_key_env=api.api_key_env,
    )
    _print(results, out)


def default_folder(model: str, environment: str) -> Path:
    """A folder named after model and environment, without characters that a path gives a sense."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", f"{model}-{environment}").strip("-.")
    return Path("runs", "api", name[-100:] or "model")


def _settings(path: Path) -> Path | Mapping[str, Any]:
    """The file; of an evaluation.yaml all but its model and server, which the options name."""
    from ragen_apo.config.load import read_values

    values, problems = read_values(path)
    if problems or "api" not in values:
        return path
    return {key: value for key, value in values.items() if key != "api"}


def _environment(api: ApiOptions) -> Mapping[str, Any] | None:
    """The keys of the section that the command line says; None if it says none."""
    options = _options(api.environment_option)
    if api.max_turns is not None:
        options["max_turns"] = api.max_turns
    named = {} if api.environment is None else {"name": api.environment}
    return {**options, **named} or None


def _extra_body(text: str | None) -> Mapping[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        raise ConfigError(
            f'--extra-body takes a JSON object, such as \'{{"reasoning_effort": "low"}}\', got '
            f"{str(text)[:60]!r}"
        )
    return value


def _options(tokens: Sequence[str]) -> dict[str, Any]:
    from ragen_apo.config.overrides import parse_options

    for token in tokens:
        if "=" not in token:
            raise ConfigError(
                f"--environment-option takes key=value, such as max_turns=5, got {token[:40]!r}"
            )
    return parse_options([f"--{token.removeprefix('--')}" for token in tokens])


def _print(results: Mapping[str, Any], out: Path) -> None:
    print_evaluation(results, policy=f"{results['policy']} (API)", whose="model")
    usage = results["api"]
    say(
        f"{counted(usage['answers'], 'answer')}: "
        f"{counted(usage['prompt_tokens'], 'prompt token')}, "
        f"{counted(usage['completion_tokens'], 'completion token')}; "
        f"{usage['format_errors']:,} without a readable action"
    )
    say(f"evaluation: {out}")
