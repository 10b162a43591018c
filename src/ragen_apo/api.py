"""The package from Python: what scripts, notebooks and the command `ragen-apo` call.

    run = ragen_apo.train("configs/shop.yaml", "runs/mine", training={"max_steps": 20})
    print(ragen_apo.evaluate(run)["success_rate"])
    print(ragen_apo.episodes(run)[0])

If a new run has a fault that can be known at the start, it is refused before it has a directory. A
start that fails leaves no directory behind. A run directory may come from another person, so code
that it names is run only if the caller trusts it. A configuration or an environment that the caller
passes is trusted. Under torchrun `train`, `evaluate` and `estimate_values` share the work
(docs/scaling.md). Everything raised on purpose is a RagenApoError. Heavy libraries are imported
when they are needed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ragen_apo.choices import RunEnd
from ragen_apo.config import RunConfig, load_run_config, resolved_yaml
from ragen_apo.config.algorithms import AlgorithmConfig, provide_algorithm
from ragen_apo.config.load import config_of, read_values
from ragen_apo.config.named_code import (
    ENVIRONMENT,
    file_being_imported,
    is_provided,
    provide,
    reference_to,
)
from ragen_apo.config.overrides import changes_in_words, differences, merge
from ragen_apo.config.pretrained import with_pretrained
from ragen_apo.config.references import (
    TRUST,
    code_named_by,
    is_reference,
    sends_key,
    with_absolute_paths,
)
from ragen_apo.config.search import SearchConfig
from ragen_apo.config.section import LARGEST, as_section
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.printable import shortened
from ragen_apo.progress import Progress, SilentProgress
from ragen_apo.run_directory import RunDirectory, clear_failed_start, create_run, open_evaluated
from ragen_apo.run_directory import open_run as open_directory

if TYPE_CHECKING:
    from ragen_apo.comparison.measure import Measurement
    from ragen_apo.report.episodes import Episode
    from ragen_apo.stages.shown_prompt import ShownPrompt

_TRAINING = threading.Lock()
"""Held by the training of this process."""
Factory = Callable[..., Any]
"""A function or class that takes the options of an environment and makes one."""
Configuration = RunConfig | Mapping[str, Any] | Path | str
"""A configuration, its sections, or the path of a YAML file."""
Environment = Factory | Mapping[str, Any] | str
"""What makes an environment, the keys of the section, or a name."""


@dataclass(frozen=True)
class Run:
    """A run that this process has started or opened."""

    files: RunDirectory
    """Where everything is: `run.files.policy`, `run.files.metrics`, ..."""
    config: RunConfig = field(hash=False)
    """Its configuration, where the caller's word on trust stands in place of the directory's."""

    def __fspath__(self) -> str:
        """Its directory, so that `Path(run) / "metrics.jsonl"` and `open` find its files."""
        return str(self.files.path)

    __str__ = __fspath__


def train(
    config: Configuration | None = None,
    run_dir: Path | str | None = None,
    *,
    until: RunEnd = "policy",
    environment: Environment | None = None,
    pretrained: Path | str | None = None,
    resume: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
    **sections: Any,
) -> Run:
    """Trains a policy: warm start, Stage 1, Stage 2.

    Args:
        config: what to train; None only with `resume`.
        run_dir: where everything goes. Required; must not exist yet, except with `resume`.
        until: `reference` stops after the warm start; the same call with `resume` continues.
        environment: a name, or your own function or class, in place of the configured environment
            and its options. Or keys of the section, whose `name` may also be a function or class.
            The run records where it is defined. With `config` None: the function or class that
            the run was started with.
        pretrained: the folder or hub name of a model, in place of the small one of `config`, with
            the settings that it needs (docs/models.md).
        resume: continue the run in `run_dir` where it stopped, with its own configuration. Some
            keys may change: `training={"max_steps": 120}` trains a finished run for longer
            (docs/troubleshooting.md).
        trust_remote_code: with `resume`, run Python code that the run names.
        progress: show progress on the console.
        **sections: keys of the configuration to change, by section: `algorithm={"beta2": 0.1}`.
            The name of an algorithm may also be your own class: `algorithm=MyAlgorithm`, or
            `algorithm={"name": MyAlgorithm, "beta2": 0.1}`. With `resume`, give it again.

    Raises:
        ConfigError: the configuration or the environment cannot be used.
        RunDirectoryError: `run_dir` is in use, or its run cannot be continued.
        RagenApoError: anything else prevents the run.
    """
    from ragen_apo.distributed.start import has_begun, join_ranks, note_begun
    from ragen_apo.stages.inputs import check_start
    from ragen_apo.stages.pipeline import train as play

    if until not in get_args(RunEnd):
        raise ConfigError(f"until: got {until!r}, expected {' or '.join(get_args(RunEnd))}")
    _refuse_during_an_import("a run")
    path = _path(run_dir, "run_dir")
    existed = path.exists()
    # `torchrun --max-restarts` starts a run again, whose first attempt may have begun.
    resume = resume or (RunDirectory(path).config.is_file() and has_begun(path))
    changed_yaml = None
    if resume:
        run, changed_yaml = _continued(
            config, path, environment, pretrained, sections, trust_remote_code
        )
        ranks = join_ranks(run.config.machine)
    elif config is None:
        raise ConfigError(
            "config is None, expected the path of a YAML file such as configs/shop.yaml, a mapping "
            "or a RunConfig; to continue the run in run_dir, give resume=True"
        )
    else:
        given = read_config(config, environment=environment, pretrained=pretrained, **sections)
        check_start(given)
        ranks = join_ranks(given.machine)
        run = Run(RunDirectory(path), given)
        text = resolved_yaml(given)
        ranks.from_first(lambda: create_run(path, config_yaml=text).path.name, "making the run")
        if ranks.is_first:
            note_begun(path)
    try:
        with _console(progress) as shown, _only_training():
            name = run.config.environment.name
            shown.say(f"Environment {name}. {run.config.algorithm.traits.sentence}.")
            play(run.config, run.files, progress=shown, until=until, config_yaml=changed_yaml)
    except (Exception, SystemExit):
        if not resume and ranks.is_first:
            clear_failed_start(run.files, keep_directory=existed)
        raise
    return run


@contextmanager
def _only_training() -> Iterator[None]:
    """Refuses a second training in another thread: models are not loaded side by side."""
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            "another thread of this process trains a run, and a process trains one at a time; wait "
            "for it, or start another process"
        )
    try:
        yield
    finally:
        _TRAINING.release()


def _refuse_during_an_import(what: str) -> None:
    """A script that defines an environment and trains on it is imported when a run needs that."""
    if (file := file_being_imported()) is not None:
        raise ConfigError(
            f"{file} is being imported for what it defines, and would start {what} meanwhile; put "
            'that call, there or in a file that it imports, under `if __name__ == "__main__":`'
        )


def _require_one_process(work: str) -> None:
    if (size := this_worker().size) > 1:
        raise ConfigError(
            f"torchrun has started {size} processes, and {work} is for one: start it without "
            "torchrun"
        )


def _continued(
    config: Configuration | None,
    path: Path,
    environment: Environment | None,
    pretrained: Path | str | None,
    sections: Mapping[str, Any],
    trust_remote_code: bool,
) -> tuple[Run, str | None]:
    """The run, and its configuration as YAML if some keys are changed."""
    from ragen_apo.stages.origin import MAY_CHANGE, may_change

    files = open_directory(path)
    given = None
    if config is not None:
        given = read_config(config, environment=environment, pretrained=pretrained, **sections)
    elif pretrained is not None:
        raise ConfigError("pretrained: a run goes on with its own model; leave pretrained out")
    sections = _with_named_algorithm(sections, of_run=files)
    began = load_run_config(files.config, may_import=trust_remote_code)
    if given is None:
        if isinstance(environment, str):
            environment = {"name": environment}
        if isinstance(environment, Mapping):
            own = began.environment.model_dump(by_alias=True)
            if merge(own, with_absolute_paths(environment)) != own:
                raise ConfigError(
                    "a run goes on with its own environment; leave environment out, or start "
                    "another run with a configuration and another --run-dir"
                )
            environment = None
        _provide(files, began, environment)
        given = read_config(began, **sections)
        names_key = "api_key_env" in (sections.get("rollouts") or {})
        _require_trust(files, given, trust_remote_code, names_key=names_key)
        trusted = trust_remote_code
    else:
        trusted = trust_remote_code or given.policy.trust_remote_code
    changes = list(differences(began.model_dump(by_alias=True), given.model_dump(by_alias=True)))
    if fixed := [each for each in changes if not may_change(each.key)]:
        raise RunDirectoryError(
            f"{path} was started with another configuration than the one given: "
            f"{changes_in_words(fixed)}. Leave that out to continue the run as it is, or choose "
            f"another run directory. What may change is {', '.join(MAY_CHANGE)}."
        )
    return Run(files, _trusting(given, trusted)), resolved_yaml(given) if changes else None


def open_run(
    run: Run | Path | str,
    *,
    environment: Factory | None = None,
    algorithm: type[AlgorithmConfig] | None = None,
    trust_remote_code: bool = False,
) -> Run:
    """A run to work on: its configuration, except for what it says about trusted code.

    Args:
        run: a run directory; a Run stays as it is.
        environment: the function or class that makes its environment, if it was started with
            one. Without it, the file that the run names is imported, which must be trusted.
        algorithm: the class of its algorithm, likewise.
        trust_remote_code: run Python code that the run names, its model's, an environment's and an
            algorithm's, and send the key that it names to the servers that it names.

    Raises:
        RunDirectoryError: there is no run.
        ConfigError: its configuration is damaged, or names code or a key and is not trusted.
    """
    opened = isinstance(run, Run)
    files = open_directory(_path(run, "run"))
    if algorithm is not None:
        _with_named_algorithm({"algorithm": algorithm}, of_run=files)
    config = run.config if opened else load_run_config(files.config, may_import=trust_remote_code)
    _provide(files, config, environment)
    if opened:
        return run
    _require_trust(files, config, trust_remote_code)
    return Run(files, _trusting(config, trust_remote_code))


def _provide(files: RunDirectory, config: RunConfig, environment: Factory | None) -> None:
    """Makes a caller's function or class the environment of a run that names one."""
    if environment is None:
        return
    section = config.environment
    if not is_reference(section.name):
        raise ConfigError(
            f"environment: {files.path} plays {section.name!r} and no function or class that "
            "somebody gave; leave environment out"
        )
    provide(section.name, environment)


def _require_trust(
    files: RunDirectory, config: RunConfig, trusted: bool, *, names_key: bool = False
) -> None:
    """Refuses what a run may only do if the caller trusts whoever made it; `names_key`: the caller
    has said which key servers get.
    """
    if trusted:
        return
    named = code_named_by(config.environment.name, config.environment.options)
    if strange := [name for name in named if not is_provided(name)]:
        raise ConfigError(
            f"environment.name: the run {files.path} names Python code, {', '.join(strange)}, and "
            f"{TRUST}"
        )
    rollouts = config.rollouts
    if sends_key(rollouts.model_dump()) and not names_key:
        raise ConfigError(
            f"rollouts.api_key_env: the run {files.path} sends the value of "
            f"{rollouts.api_key_env} to {', '.join(rollouts.base_url)}, and {TRUST}"
        )


def evaluate(
    run: Run | Path | str,
    *,
    split: str | None = None,
    episodes: int | None = None,
    pass_k: int | None = None,
    search: Mapping[str, Any] | None = None,
    environment: Factory | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Plays a split with the trained policy, the reference and the baselines.

    Writes evaluation/results.json and episodes.jsonl of the run and returns the results
    (docs/metrics.md). `split`, `episodes`, `pass_k` and `search` replace the keys of the section
    `evaluation`, for example `search={"method": "beam", "width": 4}` (docs/search.md). `open_run`
    explains the other arguments.

    Raises:
        RunDirectoryError: the run has no trained policy yet.
        ConfigError: there is no such split, a number is out of range, or the environment cannot be
            searched.
    """
    from ragen_apo.stages.evaluation import evaluate_run

    opened = open_run(run, environment=environment, trust_remote_code=trust_remote_code)
    asked = {"split": split, "num_episodes": episodes, "pass_k": pass_k, "search": search}
    changes: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    configured = opened.config.evaluation.search
    if search and configured and search.get("method", configured.method) != configured.method:
        # Options of the other method would be refused.
        changes["search"] = SearchConfig().model_dump() | dict(search)
    config = read_config(opened.config, evaluation=changes)
    with _console(progress) as shown:
        return evaluate_run(config, opened.files, progress=shown)


def evaluate_api(  # noqa: PLR0913 (the options of a server)
    model: str,
    out: Path | str,
    *,
    base_url: str,
    config: Configuration | None = None,
    environment: Environment | None = None,
    max_tokens: int = 512,
    extra_body: Mapping[str, Any] | None = None,
    concurrency: int = 8,
    timeout_seconds: float = 300.0,
    api_key_env: str | None = None,
    progress: bool = True,
    **sections: Any,
) -> dict[str, Any]:
    """Plays the episodes of an evaluation with a model behind an OpenAI-compatible API.

    Writes results, episodes and every answer to `out`, and returns the results; `episodes` and
    `write_report` read the folder. After an interruption the same call continues, and does not
    repeat requests that were answered (docs/evaluating_models.md).

    Args:
        model: the name under which the server knows it.
        out: a new folder, or that of the same evaluation.
        base_url: the root of the API, such as http://127.0.0.1:8000/v1; without keys.
        config: a configuration; without it the defaults. Its sections environment, agent and
            evaluation, its seed, and what its section rollouts says of environments are used.
        environment: as for `train`.
        max_tokens: largest number of tokens of an answer.
        extra_body: further keys of every request, such as `{"reasoning_effort": "low"}`; they are
            written to `out`.
        concurrency: episodes that are played at a time; changes no result.
        timeout_seconds: how long one answer may take.
        api_key_env: the environment variable with the key. Without it OPENAI_API_KEY is used if it
            is set, but only over https or to this machine.
        progress: show progress on the console.
        **sections: keys to change, by section: `evaluation={"num_episodes": 20}`.

    Raises:
        ConfigError: a setting, the address or the key cannot be used.
        RunDirectoryError: `out` has something else in it.
        ApiError: the server cannot be reached, or refuses.
    """
    from ragen_apo.config.api_model import api_model_config
    from ragen_apo.policy.chat_api.address import key_for, read_address
    from ragen_apo.policy.chat_api.client import ChatClient, Sampling
    from ragen_apo.stages.api_evaluation import evaluate_api_model

    _require_one_process("an evaluation of a model behind an API")
    given = read_config({} if config is None else config, environment=environment, **sections)
    _require_text("base_url", base_url)
    address = read_address(base_url)
    key = key_for(address, variable=api_key_env)
    _require_text("model", model)
    if not model.strip():
        raise ConfigError("model is empty; expected the name under which the server knows it")
    if not isinstance(extra_body, Mapping | None):
        raise ConfigError(f"extra_body: got {shortened(repr(extra_body), 80)}, expected a mapping")
    _require_range("max_tokens", max_tokens, least=1, most=1_000_000)
    _require_range("concurrency", concurrency, least=1, most=1000)
    _require_range("timeout_seconds", timeout_seconds, least=0.01, most=86_400)
    more = extra_body or {}
    chosen = api_model_config(
        given, model=model, base_url=address.base_url, max_tokens=max_tokens, extra_body=more
    )
    sampling = Sampling(model, chosen.evaluation.temperature, max_tokens, more)
    client = ChatClient(address, sampling, key=key, timeout_seconds=timeout_seconds)
    with client, _console(progress) as shown:
        if key is not None and not address.is_private:
            shown.say(f"The key travels unencrypted to {address.server}; https would hide it.")
        if given.agent.template_options and "chat_template_kwargs" not in more:
            options = json.dumps({"chat_template_kwargs": given.agent.template_options})
            shown.say(
                "agent.template_options are not sent, as the server writes the prompts. If it "
                f"takes them, as vLLM does, give --extra-body '{options}'."
            )
        return evaluate_api_model(
            chosen,
            _path(out, "out"),
            client,
            concurrency=concurrency,
            rollouts=given.rollouts,
            progress=shown,
        )


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name}: got {shortened(repr(value), 80)}, expected text")


def _require_range(name: str, value: float, *, least: float, most: float) -> None:
    kind, words = (Integral, "a whole number") if isinstance(least, int) else (Real, "a number")
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ConfigError(
            f"{name} must be {words} of at least {least:g} and at most {most:,}, got {value!r}"
        )


def estimate_values(
    run: Run | Path | str,
    *,
    samples: int | None = None,
    reference: int = 0,
    split: str = "train",
    environment: Factory | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Samples a reference of the run (Stage 1) and returns what its values cover.

    `samples` is the number of trajectories per task; a larger number than before adds to the stored
    ones. `reference` is the version of the reference, 0 for the warm-started one. `split` is the
    split of the tasks. `open_run` explains the other arguments.

    Raises:
        RunDirectoryError: the run has no such reference.
        ConfigError: there is no such split, or a number is out of range.
    """
    from ragen_apo.stages.values import estimate_run_values

    _require_range("reference", reference, least=0, most=LARGEST)
    opened = open_run(run, environment=environment, trust_remote_code=trust_remote_code)
    changes: dict[str, Any] = {}
    if samples is not None:
        values = {"num_samples": samples, "adaptive": False}
        changes = {"values": values, "reference": {"num_samples": None}}
    config = read_config(opened.config, **changes)
    with _console(progress) as shown:
        return estimate_run_values(
            config, opened.files, version=reference, split=split, progress=shown
        )


def show_prompt(
    config: Configuration,
    *,
    run: Run | Path | str | None = None,
    task: int = 0,
    environment: Environment | None = None,
    pretrained: Path | str | None = None,
    **sections: Any,
) -> ShownPrompt:
    """A scripted episode as the agent would read and write it, token by token.

    Args:
        config: a configuration. Its model may be untrained, and its weights are not loaded.
        run: a run whose tokenizer is used in place of the configuration's.
        task: which training task, counted from 0.
        environment: as for `train`.
        pretrained: as for `train`.
        **sections: keys of the configuration to change, by section.

    Raises:
        ConfigError: there is no such task or no scripted policy to play it.
        ModelError: the model has no tokenizer or no chat template that can be used.
        RunDirectoryError: there is no run, or it has no model yet.
    """
    from ragen_apo.stages.shown_prompt import show_prompt as show

    _require_range("task", task, least=0, most=LARGEST)
    given = read_config(config, environment=environment, pretrained=pretrained, **sections)
    tokenizer_of = None if run is None else open_directory(_path(run, "run"))
    return show(given, run=tokenizer_of, task=task)


def episodes(run: Run | Path | str) -> list[Episode]:
    """The episodes of the last evaluation; `print(episodes[0])` shows one turn by turn.

    Raises RunDirectoryError if there is none.
    """
    from ragen_apo.report.episodes import read_episodes

    return read_episodes(_files(run))


def write_report(run: Run | Path | str, *, pdf: bool = False) -> list[Path]:
    """Writes the report of an evaluated run and returns its files, report.html last.

    `pdf` writes report.pdf as well, which needs the extra `pdf`.

    Raises:
        RunDirectoryError: there is no evaluation.
        ConfigError: the PDF cannot be made here.
    """
    from ragen_apo.report.write import write_report as write

    return write(_files(run).path, with_pdf=pdf)


def push_to_hub(
    run: Run | Path | str, repository: str, *, private: bool = True, license_id: str | None = None
) -> str:
    """Uploads the policy of an evaluated run with a model card; returns the commit's address.

    Adapters are uploaded too, in the folder `adapter`. `repository` is `owner/name` on the Hugging
    Face hub, and is created if it does not exist. The token is that of `hf auth login` or HF_TOKEN.
    `license_id` is one of the hub's, such as `apache-2.0`; without it the card names no license.

    Raises:
        RunDirectoryError: there is no trained and evaluated policy, or it is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    from ragen_apo.report.publish import push_to_hub as push

    _require_text("repository", repository)
    if not repository.strip():
        raise ConfigError("repository is empty; expected owner/name")
    return push(_files(run).path, repository, private=private, license_id=license_id)


def compare(
    config: Path | str,
    out: Path | str,
    *,
    parallel: int = 1,
    pdf: bool = False,
    progress: bool = True,
) -> list[Measurement]:
    """Trains several algorithms from the same reference with the same seeds, and compares them.

    Writes comparison.md, .csv, .tex, .pptx and .html and curves to `out`, and comparison.yaml, with
    which it can be repeated. Returns what each run cost and reached. Finished runs in `out` are
    reused.

    Args:
        config: a comparison, such as configs/compare_shop.yaml.
        out: where the runs and the results go.
        parallel: number of runs that train at the same time, each in its own process, dealt out to
            the GPUs that there are.
        pdf: also writes comparison.pdf, which needs the extra `pdf`.
        progress: show on the console what the runs print; otherwise it goes to a file beside each.

    Raises:
        ConfigError: the comparison cannot be used.
        RunDirectoryError: a run in `out` was started with another configuration.
        RagenApoError: a run fails.
    """
    from ragen_apo.comparison.execute import play_comparison
    from ragen_apo.comparison.measure import measure
    from ragen_apo.comparison.plan import load_comparison
    from ragen_apo.comparison.write import write_comparison
    from ragen_apo.report.pdf import require_pdf

    _refuse_during_an_import("a comparison")
    _require_one_process("a comparison, which starts processes of its own,")
    _require_range("parallel", parallel, least=1, most=1000)
    if pdf:
        require_pdf()
    folder = _path(out, "out")
    comparison = load_comparison(_path(config, "config"))
    settings = comparison.settings
    with _console(progress) as shown:
        runs = play_comparison(
            comparison, folder, parallel=parallel, say=shown.say, quiet=not progress
        )
    measurements = [
        measure(run, name=name, seed=seed, budget=settings.budget)
        for (name, seed), run in runs.items()
    ]
    write_comparison(measurements, folder, comparison=comparison, with_pdf=pdf)
    return measurements


def read_config(
    config: Configuration,
    *,
    environment: Environment | None = None,
    pretrained: Path | str | None = None,
    **sections: Any,
) -> RunConfig:
    """The configuration with the changes; `train` says what they may be. None changes nothing.

    Raises ConfigError with everything that is wrong.
    """
    source = "the configuration"
    problems: list[str] = []
    if isinstance(config, RunConfig):
        values: Mapping[str, Any] = config.model_dump(by_alias=True)
    elif isinstance(config, Mapping):
        values = config
    elif isinstance(config, str | os.PathLike):
        source = str(config)
        values, problems = read_values(config)
    else:
        raise ConfigError(
            f"config: got {shortened(repr(config), 80)}, expected the path of a YAML file such as "
            "configs/shop.yaml, a mapping of its sections or a RunConfig"
        )
    if environment is not None:
        section = dict(environment) if isinstance(environment, Mapping) else {"name": environment}
        if not isinstance(factory := section.get("name", ""), str):
            section["name"] = reference_to(factory, ENVIRONMENT)
            provide(section["name"], factory)
        if "name" in section:
            # The options so far are those of another environment.
            values = {key: value for key, value in values.items() if key != "environment"}
        sections["environment"] = section
    sections = {name: section for name, section in sections.items() if section is not None}
    layers = [*with_pretrained(_plain(values), _plain(pretrained)), _plain(sections)]
    return config_of(
        list(map(_with_named_algorithm, layers)), source=source, problems=problems, may_import=True
    )


def _with_named_algorithm(
    sections: Mapping[str, Any], *, of_run: RunDirectory | None = None
) -> Mapping[str, Any]:
    """The sections with the name of an algorithm where a caller gave its class, or an object.

    A run that exists keeps the name under which it was started, wherever the class is now.
    """
    given = sections.get("algorithm")
    if isinstance(given, AlgorithmConfig):
        given = given.model_dump(by_alias=True) | {"name": type(given)}
    section = dict(given) if isinstance(given, Mapping) else {"name": given}
    if isinstance(own := section.get("name"), str | None):
        return sections
    name = None
    if of_run is not None:
        kept = as_section(read_values(of_run.config)[0].get("algorithm"))
        name = kept.get("name") if isinstance(kept, Mapping) else None
    section["name"] = provide_algorithm(own, reference=name)
    return {**sections, "algorithm": section}


def _plain(value: Any) -> Any:
    """Values of a script as YAML has them: paths as text, tuples as lists, NumPy's numbers as
    Python's.
    """
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    numpy = sys.modules.get("numpy")  # slow to import, and there if one of its numbers is
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _trusting(config: RunConfig, trust_remote_code: bool) -> RunConfig:
    policy = config.policy.model_copy(update={"trust_remote_code": trust_remote_code})
    return config.model_copy(update={"policy": policy})


def _path(given: Run | Path | str | None, name: str) -> Path:
    if isinstance(given, Run):
        return given.files.path
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{name}: got {shortened(repr(given), 80)}, expected a path")
    if not os.fspath(given):
        raise ConfigError(f"{name}: got an empty path, expected where it is")
    return Path(os.path.expanduser(given))


def _files(run: Run | Path | str) -> RunDirectory:
    return open_evaluated(_path(run, "run"))


def _console(progress: bool) -> AbstractContextManager[Progress]:
    if not progress:
        return nullcontext(SilentProgress())
    from ragen_apo.console import ConsoleProgress, PrintableConsole, WarningsOfRank

    worker = this_worker()
    if worker.rank > 0:
        return nullcontext(WarningsOfRank(worker.name))
    return ConsoleProgress(PrintableConsole(markup=False))
