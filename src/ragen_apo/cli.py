"""The command `ragen-apo`. Each verb parses, calls one function of the library, and prints.

What this package raises on purpose is shown as one message without a traceback, exit status 2. An
interrupted run (Ctrl-C, exit status 130) keeps its last checkpoint.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

import ragen_apo
from ragen_apo.console import PrintableConsole
from ragen_apo.errors import ConfigError, EnvironmentFaultError, RagenApoError, RunDirectoryError
from ragen_apo.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cyclopts import Token

    from ragen_apo.config import RunConfig
    from ragen_apo.environments.human.recordings import Recording
    from ragen_apo.run_directory import RunDirectory


def _examples(*commands: str) -> str:
    """The end of a help page: commands to copy, one a line (an indented block of Markdown)."""
    return "Examples:\n\n" + "\n".join(f"    ragen-apo {command}" for command in commands)


app = App(
    name="ragen-apo",
    help_epilogue=_examples(
        "train --config configs/smoke.yaml --run-dir runs/smoke", "play shop", "train --help"
    ),
    help="Train language-model agents on multi-turn tasks with A*-PO, PPO, GRPO and others.",
    version=ragen_apo.__version__,
    suppress_keyboard_interrupt=False,  # `main` says what an interrupted run keeps
)
console = PrintableConsole(markup=False)
PLAY_SEED = 0
"""Seeds the environment's draws in an episode that a person plays."""


def _whole_number(least: int, most: int = 1_000_000) -> Parameter:
    """An argument that is a whole number within bounds; 1e3 is one, as in a configuration."""

    def convert(_: type, tokens: Sequence[Token]) -> int:
        text = tokens[0].value
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value.is_integer() and least <= value <= most):
            got = repr(text[:40]) if math.isnan(value) else f"{value:g}"
            raise ConfigError(
                f"{tokens[0].keyword}: got {got}, expected a whole number at least {least} and at "
                f"most {most:,}"
            )
        return int(value)

    return Parameter(converter=convert)


Number = Annotated[int, _whole_number(1)]
NumberOrZero = Annotated[int, _whole_number(0, 1_000_000_000)]
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""Any number of `--key value`, whose names are checked later."""
TrustRemoteCode = Annotated[bool, Parameter(negative=())]
"""Trust is said on the command line: a run directory may come from somebody else."""


@app.command(
    help_epilogue=_examples(
        "train --config configs/shop.yaml --run-dir runs/mine --algorithm.beta2 0.1",
        "train --run-dir runs/mine --resume",
    )
)
def train(
    *overrides: Overrides,
    run_dir: Path,
    config: Path | None = None,
    resume: bool = False,
    evaluate: bool = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a policy: warm start, Stage 1, Stage 2; then evaluate it and write the report.

    Parameters
    ----------
    overrides
        Configuration keys to change, such as `--algorithm grpo --training.max_steps 20`;
        docs/configuration.md has all of them.
    run_dir
        Where everything goes; must not exist yet, except with --resume.
    config
        A YAML file; see configs/. Not needed with --resume.
    resume
        Continue the run in --run-dir where it stopped, with its own configuration.
    evaluate
        Also evaluate the trained policy and write the report.
    trust_remote_code
        With --resume: run Python code that the run names: its model's, and an environment's
        (path.py:function). What the run's own configuration says of trust does not count.
    """
    from ragen_apo.console import ConsoleProgress
    from ragen_apo.run_directory import clear_failed_start
    from ragen_apo.stages.pipeline import train as train_run

    existed = run_dir.exists()
    run, settings = _run_to_train(
        run_dir, config, list(overrides), resume=resume, trust_remote_code=trust_remote_code
    )
    console.print(f"{settings.algorithm.traits.sentence}.", highlight=False, soft_wrap=True)
    try:
        with ConsoleProgress(console) as progress:
            train_run(settings, run, progress=progress)
    except (Exception, SystemExit):
        if not resume:
            clear_failed_start(run, keep_directory=existed)
        raise
    console.print(f"trained policy: {run.policy}", highlight=False, soft_wrap=True)
    if evaluate:
        section = settings.evaluation
        _evaluate(
            run,
            settings,
            split=section.split,
            episodes=section.num_episodes,
            pass_k=section.pass_k,
        )
        report(run_dir)


@app.command(help_epilogue=_examples("estimate-values runs/mine --samples 16"))
def estimate_values(
    run: Path,
    *,
    samples: Number | None = None,
    reference: NumberOrZero = 0,
    split: str = "train",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Sample the frozen reference of a run (Stage 1) and report what its values cover.

    Parameters
    ----------
    run
        A run directory with a reference.
    samples
        Trajectories per task; more than before adds to what is stored. Default: as configured.
    reference
        Version of the reference; 0 is the warm-started one.
    split
        Tasks to sample.
    trust_remote_code
        Run Python code that the run names: its model's, and an environment's (path.py:function).
    """
    import json

    from ragen_apo.console import ConsoleProgress
    from ragen_apo.stages.values import estimate_run_values

    directory, settings = _existing_run(run, trust_remote_code=trust_remote_code)
    if samples is not None:
        changed = settings.values.model_copy(update={"num_samples": samples, "adaptive": False})
        settings = settings.model_copy(update={"values": changed})
    with ConsoleProgress(console) as progress:
        coverage = estimate_run_values(
            settings, directory, version=reference, split=split, progress=progress
        )
    console.print_json(json.dumps(coverage))


@app.command(
    help_epilogue=_examples(
        "evaluate runs/mine --split all --episodes 497",
        "evaluate runs/mine --pass-k 4",
    )
)
def evaluate(
    run: Path,
    *,
    split: str | None = None,
    episodes: Number | None = None,
    pass_k: Number | None = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Play a split with the trained policy, the reference and the baselines.

    Writes RUN/evaluation/results.json and episodes.jsonl.

    Parameters
    ----------
    run
        A run directory.
    split
        Tasks to play: for the shop train, test or all. Default: the configuration's.
    episodes
        How many, in the split's order; see evaluation.num_episodes, which is the default.
    pass_k
        Also sample each task this often and give pass@k.
    trust_remote_code
        Run Python code that the run names: its model's, and an environment's (path.py:function).
    """
    directory, settings = _existing_run(run, trust_remote_code=trust_remote_code)
    section = settings.evaluation
    _evaluate(
        directory,
        settings,
        split=split or section.split,
        episodes=section.num_episodes if episodes is None else episodes,
        pass_k=section.pass_k if pass_k is None else pass_k,
    )


@app.command(help_epilogue=_examples("report runs/mine"))
def report(run: Path) -> None:
    """Write summary.csv, plots, failure_analysis.md, slides.pptx and report.html of a run.

    Parameters
    ----------
    run
        A run directory with an evaluation.
    """
    from ragen_apo.report import write_report
    from ragen_apo.run_directory import open_run

    open_run(run)
    paths = write_report(run)
    page = run / "report" / "report.html"
    console.print(f"report: {page} ({len(paths)} files)", highlight=False, soft_wrap=True)


@app.command(
    help_epilogue=_examples("compare --config configs/compare_shop.yaml --out runs/compare")
)
def compare(*, config: Path, out: Path = Path("runs/compare"), parallel: Number = 1) -> None:
    """Train several algorithms from the same reference with the same seeds, and compare them.

    Writes OUT/comparison.md, comparison.csv and curves. Runs in OUT that are done are reused, and
    an interrupted comparison goes on when the command is given again.

    Parameters
    ----------
    config
        A comparison; see configs/compare_shop.yaml.
    out
        Where the runs and the results go.
    parallel
        Runs that train at the same time. Their seconds can only be compared if each has cores of
        its own: set run.num_threads to the cores over this number.
    """
    from ragen_apo.comparison.execute import play_comparison
    from ragen_apo.comparison.measure import measure
    from ragen_apo.comparison.plan import load_comparison
    from ragen_apo.comparison.write import write_comparison

    comparison = load_comparison(config)
    settings = comparison.settings
    runs = play_comparison(
        comparison,
        out,
        parallel=parallel,
        say=lambda text: console.print(text, highlight=False),
    )
    measurements = [
        measure(run, name=name, seed=seed, budget=settings.budget)
        for (name, seed), run in runs.items()
    ]
    paths = write_comparison(measurements, out, settings=settings)
    console.print(f"comparison: {paths[0]}", highlight=False, soft_wrap=True)


@app.command(
    help_epilogue=_examples(
        "play shop --max_turns 6 --task 7",
        "play frozen_lake --record mine.jsonl",
    )
)
def play(
    environment: str = "shop",
    *options: Overrides,
    split: str = "train",
    task: NumberOrZero = 0,
    record: Path | None = None,
) -> None:
    """Play an environment yourself in the terminal.

    Parameters
    ----------
    environment
        Name of an environment, path.py:function or module:function.
    options
        Options of the environment, such as `--max_turns 5`; docs/environments.md has all of them.
    split
        Where the task is from.
    task
        Which task of the split, counted from 0.
    record
        A .jsonl file to which the episode is added if it comes to its end; the key
        warm_start.demonstrations.recordings takes it as a demonstration.
    """
    from ragen_apo.config.overrides import parse_options
    from ragen_apo.environments.base import make_environment, splits_with_tasks
    from ragen_apo.environments.human.play import play as play_episode
    from ragen_apo.environments.human.recordings import SUFFIX, Recording, require_recordable

    world = make_environment(environment, parse_options(options))
    tasks = world.tasks(split)
    if not tasks:
        filled = " or ".join(splits_with_tasks(world))
        raise ConfigError(f"the split {split!r} has no tasks; take --split {filled}")
    if not 0 <= task < len(tasks):
        raise ConfigError(f"--task must be from 0 to {len(tasks) - 1} in {split!r}, got {task}")
    if record is not None and record.suffix != SUFFIX:
        raise ConfigError(f"--record takes a file whose name ends in {SUFFIX}, got {record}")
    if record is not None:
        require_recordable(record)
    episode = play_episode(world, tasks[task], seed=PLAY_SEED)
    if record is not None:
        if episode.terminated or episode.truncated:
            _record(record, Recording(world.properties.version, PLAY_SEED, episode))
        else:
            console.print("not recorded: the episode did not come to its end")


def _record(path: Path, recording: Recording) -> None:
    """Adds a played episode to a file, or shows it where the file cannot be written any more."""
    from ragen_apo.environments.human.recordings import append_recording

    try:
        append_recording(path, recording)
    except OSError as error:
        print(recording.to_line())
        raise ConfigError(
            f"--record {path}: the episode could not be recorded ({error.strerror or error}). The "
            "line above is all of it: save it as a line of a .jsonl file"
        ) from error
    console.print(f"recorded in {path}", highlight=False, soft_wrap=True)


@app.command(help_epilogue=_examples("check frozen_lake --size 8"))
def check(environment: str, *options: Overrides, num_tasks: Number = 50) -> int:
    """Check an environment: does it keep what every environment promises?

    Also plays its scripted policies on training tasks. Exit status 1 if something is found.

    Parameters
    ----------
    environment
        Name of an environment, built-in or from an installed package; path.py:function or
        module:function for one of your own.
    options
        Options of the environment, such as `--max_turns 5`.
    num_tasks
        Training tasks that each scripted policy plays for the table.
    """
    from functools import partial

    from ragen_apo.config.overrides import parse_options
    from ragen_apo.environments.base import make_environment
    from ragen_apo.environments.contract import ContractError, check_environment, policy_table

    make = partial(make_environment, environment, parse_options(options))
    found = check_environment(make)
    table = {}
    if not any(found.values()):
        try:
            table = policy_table(make(), num_tasks=num_tasks)
        except ContractError as error:
            found["scripted policies play the first training tasks"] = str(error)
    for promise, problem in found.items():
        console.print(f"{'ok  ' if problem is None else 'NOT '} {promise}", highlight=False)
        if problem is not None:
            indented = problem.replace("\n", "\n       ")
            console.print(f"       {indented}", highlight=False, soft_wrap=True)
    if any(found.values()):
        return 1
    _print_policies("scripted policies on training tasks", table)
    return 0


data = App(
    name="data",
    help="Get the data that an environment needs.",
    help_epilogue=_examples("data webshop"),
)
app.command(data)


@data.command(
    name="webshop",
    help_epilogue=_examples("data webshop", "data webshop --from downloads/webshop"),
)
def data_webshop(
    *,
    size: Literal["small", "full"] = "small",
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    force: bool = False,
    generated: Annotated[int, _whole_number(1, 10_000_000)] | None = None,
) -> None:
    """Fetch WebShop's data and prepare it, so that `webshop` starts quickly.

    The files go to $RAGEN_APO_DATA/webshop (~/.local/share/ragen-apo/webshop). An interrupted
    download continues when the command is given again.

    Parameters
    ----------
    size
        The 1,000 products that most people use, or all 1.18 million (several GB).
    source
        A folder that has the files already; nothing is downloaded.
    force
        Replace what is there.
    generated
        Prepare a generated catalogue of so many products instead; nothing is downloaded.
    """
    from ragen_apo.console import ConsoleProgress
    from ragen_apo.environments.webshop.download import download_data
    from ragen_apo.environments.webshop.store import open_catalog

    beside = source is not None or force or size != "small"
    if generated is not None and beside:
        raise ConfigError("--generated goes with none of --size, --from and --force")
    with ConsoleProgress(console) as progress:
        chosen = f"generated:{generated}"
        if generated is None:
            chosen = str(download_data(size, source=source, force=force, progress=progress))
        catalog = open_catalog(chosen, progress=progress)
    console.print(
        f"webshop: {catalog.num_products:,} products of {chosen}, prepared in {catalog.folder}",
        highlight=False,
        soft_wrap=True,
    )


def _run_to_train(
    run_dir: Path,
    config: Path | None,
    overrides: list[str],
    *,
    resume: bool,
    trust_remote_code: bool,
) -> tuple[RunDirectory, RunConfig]:
    from ragen_apo.config import load_config, load_run_config, resolved_yaml
    from ragen_apo.config.references import code_named_by
    from ragen_apo.run_directory import create_run, open_run
    from ragen_apo.stages.inputs import check_start

    if not resume:
        if trust_remote_code:
            raise ConfigError(
                "--trust-remote-code goes with --resume; a new run takes it from its "
                "configuration: --policy.trust_remote_code true"
            )
        if config is None:
            raise ConfigError("--config is missing; give a YAML file such as configs/shop.yaml")
        settings = load_config(config, overrides)
        check_start(settings)
        return create_run(run_dir, config_yaml=resolved_yaml(settings)), settings
    if overrides and config is None:
        raise ConfigError(
            "--resume continues with the run's own configuration; overrides are not possible. "
            "Start another run with --config and another --run-dir."
        )
    if config is not None:
        given = load_config(config, overrides)
        if given != load_run_config(open_run(run_dir).config):
            raise RunDirectoryError(
                f"{run_dir} was started with another configuration than {config} gives. Leave "
                "--config out to continue it as it is (see config.yaml in it), or choose another "
                "--run-dir."
            )
        # A configuration that the caller gives is the caller's word.
        section = given.environment
        names_code = bool(code_named_by(section.name, section.options))
        trust_remote_code |= given.policy.trust_remote_code or names_code
    return _existing_run(run_dir, trust_remote_code=trust_remote_code)


def _existing_run(path: Path, *, trust_remote_code: bool) -> tuple[RunDirectory, RunConfig]:
    """A run and its configuration, but for its word on whose code may run."""
    from ragen_apo.config import load_run_config
    from ragen_apo.config.references import code_named_by
    from ragen_apo.run_directory import open_run

    run = open_run(path)
    settings = load_run_config(run.config)
    named = code_named_by(settings.environment.name, settings.environment.options)
    if named and not trust_remote_code:
        raise ConfigError(
            f"environment.name: the run {path} names Python code, {', '.join(named)}, and a run "
            "may come from somebody else. Read it; if you trust it, give --trust-remote-code"
        )
    policy = settings.policy.model_copy(update={"trust_remote_code": trust_remote_code})
    return run, settings.model_copy(update={"policy": policy})


def _evaluate(
    run: RunDirectory, settings: RunConfig, *, split: str, episodes: int, pass_k: int | None
) -> None:
    from ragen_apo.console import ConsoleProgress
    from ragen_apo.evaluation.evaluate import EvaluationPlan
    from ragen_apo.stages.evaluation import evaluate_run

    plan = EvaluationPlan(
        split=split,
        num_episodes=episodes,
        temperature=settings.evaluation.temperature,
        seed=settings.seed,
    )
    with ConsoleProgress(console) as progress:
        results = evaluate_run(settings, run, plan=plan, pass_k=pass_k, progress=progress)
    _print_results(results, method=f"{settings.algorithm.traits.label} (trained)")


def _print_results(results: dict, *, method: str) -> None:
    low, high = results["success_ci95"]
    _print_policies(
        f"{results['episodes']} episodes of split {results['split']!r}",
        {
            name: (row["success_rate"], row["avg_reward"], row["avg_steps"])
            for name, row in {method: results, **results["baselines"]}.items()
        },
    )
    console.print(f"95% interval of the trained policy: {low:.1%} to {high:.1%}", highlight=False)


def _print_policies(title: str, rows: Mapping[str, tuple[float, float, float]]) -> None:
    """A table of success rate, reward and steps by the name of a policy."""
    from rich.table import Table

    table = Table(title=title)
    for heading in ("policy", "success", "average reward", "average steps"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, (success, reward, steps) in rows.items():
        table.add_row(printable(name), f"{success:.1%}", f"{reward:.3f}", f"{steps:.2f}")
    console.print(table)


def main() -> None:
    """The entry point: turns expected errors into messages and exit statuses."""
    try:
        command, arguments, _ = app.parse_args()
        status = _without_exits(command, *arguments.args, **arguments.kwargs)
    except RagenApoError as error:
        _fail(str(error), status=2)
    except KeyboardInterrupt:
        _fail(
            "interrupted. Nothing that was saved is lost; train continues with --resume.",
            status=130,
        )
    except BrokenPipeError:
        # Who read the output is gone, as `head` when it has seen enough: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(_problem_of_a_file(error), status=2)
    else:
        if isinstance(status, int):
            sys.exit(status)


def _without_exits(command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the command returns; code of others must not end it as if all had gone well."""
    try:
        return command(*arguments, **options)
    except SystemExit as error:
        raise EnvironmentFaultError(
            f"code that is not ragen-apo's tried to end the process ({error!r:.80}), most likely "
            "that of the environment; run `ragen-apo check` on it"
        ) from error


def _problem_of_a_file(error: OSError) -> str:
    """Path, reason and what to do, for what the operating system refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {error}. What was saved is whole; free space and --resume."
    if error.filename is None:
        return f"the system refused: {error}."
    return (
        f"{error.filename}: {error.strerror}. Expected a path that can be read and written; mend "
        "it or give another one. What was saved before is whole."
    )


def _fail(message: str, *, status: int) -> None:
    # No wrapping by us: it would break paths and commands that people copy.
    PrintableConsole(stderr=True).print(
        f"error: {message}", style="red", highlight=False, markup=False, soft_wrap=True
    )
    sys.exit(status)


if __name__ == "__main__":
    main()
