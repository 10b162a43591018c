"""The command `evaluate`: of a run, with a search or without, or of a model behind an API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from ragen_apo.choices import ResponseFormat, SearchRanking
from ragen_apo.cli.common import (
    Folder,
    Number,
    TrustRemoteCode,
    app,
    examples,
    print_policies,
    say,
)
from ragen_apo.config.references import file_of
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from ragen_apo.plural import counted

if TYPE_CHECKING:
    from ragen_apo.api import Run

_OF_SEARCH = Group("A search over turns", sort_key=9)
_OF_API = Group("A model behind an API", sort_key=10)


@Parameter(name="*", group=_OF_SEARCH)
@dataclass(frozen=True)
class SearchOptions:
    """What is kept of how many candidates; docs/search.md says more."""

    search: Literal["beam", "best-of-n"] | None = None
    """Play the best of several branches that are pruned turn by turn, or the best of whole
    episodes. Default: as evaluation.search configures, which is no search."""
    width: Number | None = None
    """Branches that are kept, or episodes. Default: 4."""
    candidates: Number | None = None
    """Responses that a beam samples for each branch in a turn. Default: as many as --width."""
    rank_by: SearchRanking | None = None
    """What decides. values: V* where the run's store knows the move, likelihood elsewhere;
    regression: Q* of each move as the run's episodes of Stage 1 predict it; likelihood; votes: how
    many candidates do the same, with beam; reward: that of the finished episodes, which no deployed
    agent sees: an upper bound, with best-of-n. Default: values."""
    search_tokens: Number | None = None
    """Tokens sampled for an episode after which its best branch goes on greedily."""

    def section(self) -> dict[str, Any] | None:
        """The keys of `evaluation.search` that are given; None if none is."""
        keys = _given(
            method=self.search and self.search.replace("-", "_"),
            width=self.width,
            candidates=self.candidates,
            rank_by=self.rank_by,
            max_tokens=self.search_tokens,
        )
        return keys or None


@Parameter(name="*", group=_OF_API)
@dataclass(frozen=True)
class ApiOptions:
    """What is played, by which model, and where the results go."""

    api_model: str | None = None
    """Play with this model of a server, under its name there, instead of with a run."""
    base_url: str | None = None
    """Root of the server's OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    out: Folder | None = None
    """Folder of the evaluation, which goes on there if it was interrupted. Default:
    runs/api/MODEL-ENVIRONMENT."""
    environment: str | None = None
    """Name of an environment, path.py:function or module:function. Default: the configuration's."""
    environment_option: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """An option of the environment, as key=value; may be given several times."""
    config: Path | None = None
    """A YAML file, such as a run's or the evaluation.yaml of an evaluation to go on with, whose
    sections environment, agent, evaluation, whose seed, and what rollouts says of environments are
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
    environment_retries: Number | None = None
    """How often an episode whose environment raised may begin again. Default:
    rollouts.environment_retries, 0."""
    timeout: float = 300.0
    """Seconds for one answer, after which it is asked for again."""
    api_key_env: str | None = None
    """Environment variable with the key. Default: OPENAI_API_KEY, if it is set, and only over
    https or to this machine."""


NO_SEARCH = SearchOptions()
NO_API = ApiOptions()


@app.command(
    help_epilogue=examples(
        "evaluate runs/mine --split all --episodes 497 --pass-k 4",
        "evaluate runs/mine --search beam --width 4",
        "evaluate --api-model NAME --base-url URL --environment shop",
    )
)
def evaluate(
    run: Path | None = None,
    *,
    split: str | None = None,
    episodes: Number | None = None,
    pass_k: Number | None = None,
    trust_remote_code: TrustRemoteCode = False,
    search: SearchOptions = NO_SEARCH,
    api: ApiOptions = NO_API,
) -> None:
    """Play a split with the trained policy, the reference and the baselines.

    Writes RUN/evaluation/results.json and episodes.jsonl. With --api-model, a model behind an
    OpenAI-compatible API plays instead: docs/evaluating_models.md.

    Args:
        run: A run directory; leave it out with --api-model.
        split: Tasks to play: for the shop train, test or all. Default: the configuration's.
        episodes: Number of episodes, in the split's order. Default: evaluation.num_episodes.
        pass_k: Also sample each task this often and give pass@k.
        trust_remote_code: Run Python code that the run names: its model's, an environment's
            and an algorithm's (path.py:name).
        search: The options of a search over turns.
        api: The options of a model behind an API.
    """
    if run is None:
        if pass_k is not None:
            raise ConfigError(
                "--pass-k goes with a run; a model behind an API plays each task once"
            )
        if search != NO_SEARCH:
            raise ConfigError(
                "--search and its options go with a run; a model behind an API plays each task once"
            )
        if trust_remote_code:
            raise ConfigError(
                "--trust-remote-code goes with a run; what --config and --environment name for a "
                "model behind an API is trusted without it"
            )
        _evaluate_model_of_api(api, split=split, episodes=episodes)
        return
    if given := [field.name for field in fields(api) if getattr(api, field.name) != field.default]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{options}: for a model behind an API, which --api-model names; a run is "
            "evaluated with its own configuration"
        )
    from ragen_apo.api import open_run

    opened = open_run(run, trust_remote_code=trust_remote_code)
    if search != NO_SEARCH and not (search.search or opened.config.evaluation.search):
        raise ConfigError(
            "--width, --candidates, --rank-by and --search-tokens are options of a search; add "
            "--search beam or --search best-of-n"
        )
    evaluate_run(opened, split=split, episodes=episodes, pass_k=pass_k, search=search.section())


def evaluate_run(run: Run, **asked: Any) -> None:
    """Evaluates and prints the tables; `asked` as `ragen_apo.evaluate` takes it."""
    from ragen_apo import api

    results = api.evaluate(run, **asked)
    policy, whose = f"{run.config.algorithm.traits.label} (trained)", "trained policy"
    if run.config.training.max_steps == 0:
        # Without a success to imitate nothing was distilled.
        made = "distilled" if read_json_lines(run.files.distillation) else "not trained"
        policy, whose = f"policy ({made})", "policy"
    print_evaluation(results, policy=policy, whose=whose)
    if (search := results.get("search")) is not None:
        _print_search(search, without=results["baselines"]["without search"]["avg_tokens"])


def _evaluate_model_of_api(api: ApiOptions, *, split: str | None, episodes: int | None) -> None:
    from ragen_apo.api import evaluate_api, read_config
    from ragen_apo.report.api_model import cost_in_words

    if api == NO_API:
        raise ConfigError("give a run directory to evaluate, or --api-model and --base-url")
    if not api.api_model or not api.base_url:
        missing = "--base-url" if api.api_model else "--api-model"
        raise ConfigError(
            f"{missing} is missing: --api-model NAME and --base-url URL together say which model "
            "plays, such as --api-model smollm2 --base-url http://127.0.0.1:8000/v1"
        )
    config = read_config(
        {} if api.config is None else _settings(api.config),
        environment=_environment(api),
        agent=_given(response_format=api.response_format),
        evaluation=_given(split=split, num_episodes=episodes, temperature=api.temperature),
        rollouts=_given(
            num_environment_workers=api.environment_workers,
            environment_retries=api.environment_retries,
        ),
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
    print_evaluation(results, policy=f"{results['policy']} (API)", whose="model")
    usage = results["api"]
    say(
        f"{cost_in_words(usage)}; {usage['format_errors']:,} without a readable action, "
        f"{usage['impossible_actions']:,} with an impossible one"
    )
    say(f"evaluation: {out}")


def _given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def default_folder(model: str, environment: str) -> Path:
    """A folder named after model and environment, without characters that a path gives a sense.

    Of an environment of one's own the name of its file counts, not where that is.
    """
    if (file := file_of(environment)) is not None:
        environment = f"{file.stem}-{environment.rpartition('.py')[2]}"
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
    from ragen_apo.config.overrides import parse_options

    for token in api.environment_option:
        if "=" not in token:
            raise ConfigError(
                f"--environment-option takes key=value, such as max_turns=5, got {token[:40]!r}"
            )
    options = parse_options([f"--{token.removeprefix('--')}" for token in api.environment_option])
    return {**options, **_given(max_turns=api.max_turns, name=api.environment)} or None


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


def print_evaluation(results: Mapping[str, Any], *, policy: str, whose: str) -> None:
    """The table of an evaluation's results.json, and the interval of whose success it is."""
    from ragen_apo.report.coverage import in_order_of_k
    from ragen_apo.report.style import measured

    search = results.get("search")
    searched = policy if search is None else f"{policy}, {search['label']}"
    policies = {searched: results, **results["baselines"]}
    print_policies(
        f"{counted(results['episodes'], 'episode')} of split {results['split']!r}",
        {
            name: (row["success_rate"], row["avg_reward"], row["avg_steps"])
            for name, row in policies.items()
        },
    )
    for name, row in policies.items():
        if row.get("metrics"):
            say(f"measured by the environment, {name}: {measured(row['metrics'])}")
    for name, row in policies.items():
        if num_cut := row.get("episodes_out_of_context"):
            say(f"cut off because the context was full, {name}: {num_cut} of {row['episodes']}")
    if pass_at := results.get("pass_at_k"):
        shares = [f"pass@{k} {share:.1%}" for k, share in in_order_of_k(pass_at)]
        without = "" if search is None else " without search"
        say(f"sampled, {policy}{without}: {', '.join(shares)}")
    low, high = results["success_ci95"]
    say(f"95% interval of the {whose}: {low:.1%} to {high:.1%}")


def _print_search(search: Mapping[str, Any], *, without: float) -> None:
    """What a search took, beside the tokens of an episode without it."""
    lines = [
        f"tokens sampled for an episode: {search['avg_tokens']:.0f}, without search {without:.0f}"
    ]
    if search["known_move_share"] is not None:
        known = f"moves that the value store knew: {search['known_move_share']:.1%}"
        told = ", by rewards of these very tasks, so success says nothing about new ones"
        lines.append(known + (told if search["known_move_share"] else ""))
    if search["max_tokens"] is not None:
        lines.append(
            f"episodes that had sampled {counted(search['max_tokens'], 'token')} and "
            f"went on greedily: {search['cut_share']:.1%}"
        )
    if search["uses_reward"]:
        lines.append("The reward chose: an upper bound, which no deployed agent can reach so.")
    for line in lines:
        say(line)
