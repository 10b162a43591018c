"""The commands for runs: `train`, `warm-start`, `estimate-values`, `report`, `compare`; `configs`
for the configurations that there are, and `show-prompt` for what a run will read.

Each is a function of `ragen_apo.api` with its arguments checked and its result printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ragen_apo.choices import RunEnd
from ragen_apo.cli.common import (
    Folder,
    Number,
    NumberOrZero,
    Overrides,
    TrustRemoteCode,
    app,
    console,
    examples,
    say,
)
from ragen_apo.cli.evaluation import evaluate_run
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.errors import ConfigError
from ragen_apo.plural import counted
from ragen_apo.printable import printable

if TYPE_CHECKING:
    from ragen_apo.api import Run


@app.command(
    help_epilogue=examples(
        "train --config configs/shop.yaml --run-dir runs/mine --seed 1",
        "train --config configs/shop.yaml --run-dir runs/a --pretrained MODEL",
        "train --run-dir runs/mine --resume --training.max_steps 120",
    )
)
def train(
    *overrides: Overrides,
    run_dir: Folder | None = None,
    config: Path | None = None,
    pretrained: str | None = None,
    resume: bool = False,
    evaluate: bool = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a policy: warm start, Stage 1, Stage 2; then evaluate it and write the report.

    `torchrun --nproc-per-node N -m ragen_apo train ...` shares the work among N processes
    (docs/scaling.md).

    Args:
        overrides: Configuration keys to change, such as `--algorithm grpo --training.max_steps 20`;
            docs/configuration.md has all of them. With --resume some may change, such as
            --training.max_steps to train for longer (docs/troubleshooting.md).
        run_dir: Where everything goes. Required; must not exist yet, except with --resume.
        config: A YAML file, or the name of a configuration that comes with ragen-apo, such as shop
            (`ragen-apo configs` lists them). Not needed with --resume.
        pretrained: Folder or hub name of a model to train in place of the small one of --config.
            `ragen-apo configs pretrained` shows which settings come with it.
        resume: Continue the run in --run-dir where it stopped, with its own configuration. A run
            that is trained is evaluated and reported again, unless --no-evaluate is given.
        evaluate: Also evaluate the trained policy and write the report.
        trust_remote_code: With --resume: run Python code that the run names: its model's, an
            environment's and an algorithm's (path.py:name). What the run's own configuration
            says about trust is ignored.
    """
    run = _train(overrides, run_dir, config, pretrained, resume, trust_remote_code, until="policy")
    say(f"trained policy: {run.files.policy}")
    if evaluate:
        evaluate_run(run)
        if this_worker().rank == 0:
            report(run.files.path)


@app.command(
    help_epilogue=examples(
        "warm-start --config configs/shop.yaml --run-dir runs/mine",
        "train --run-dir runs/mine --resume",
    )
)
def warm_start(
    *overrides: Overrides,
    run_dir: Folder | None = None,
    config: Path | None = None,
    pretrained: str | None = None,
    resume: bool = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make the reference of a run and stop; `train --resume` continues from there.

    Args:
        overrides: Configuration keys to change, such as `--warm_start.demonstrations.num_steps
            400`.
        run_dir: Where everything goes. Required; must not exist yet, except with --resume.
        config: A YAML file, or the name of a configuration that comes with ragen-apo, such as shop
            (`ragen-apo configs` lists them). Not needed with --resume.
        pretrained: As for `train`.
        resume: Continue a warm start that was interrupted.
        trust_remote_code: With --resume: as for `train`.
    """
    run = _train(
        overrides, run_dir, config, pretrained, resume, trust_remote_code, until="reference"
    )
    say(f"reference: {run.files.reference(0)}")


def _train(
    overrides: tuple[str, ...],
    run_dir: Path | None,
    config: Path | None,
    pretrained: str | None,
    resume: bool,
    trust_remote_code: bool,
    *,
    until: RunEnd,
) -> Run:
    from ragen_apo import api
    from ragen_apo.config import load_config, load_run_config
    from ragen_apo.config.load import sections_of
    from ragen_apo.run_directory import RunDirectory

    if trust_remote_code and not resume:
        raise ConfigError(
            "--trust-remote-code goes with --resume; a new run takes it from its configuration: "
            "--policy.trust_remote_code true"
        )
    if config is None and not resume:
        first = overrides[0] if overrides else ""
        is_file = not first.startswith("-") and first.endswith((".yaml", ".yml"))
        way_out = (
            f"write --config {first}" if is_file else "give a YAML file such as configs/shop.yaml"
        )
        raise ConfigError(f"--config is missing; {way_out}")
    if run_dir is None:
        raise ConfigError("--run-dir is missing; say where the run is, such as --run-dir runs/mine")
    if config is None and (kept := RunDirectory(run_dir).config).is_file():
        load_run_config(kept, may_import=trust_remote_code)  # the options of its algorithm
    return api.train(
        None if config is None else load_config(config, overrides, pretrained=pretrained),
        run_dir,
        until=until,
        pretrained=None if config else pretrained,
        resume=resume,
        trust_remote_code=trust_remote_code,
        **({} if config else sections_of(overrides)),
    )


@app.command(help_epilogue=examples("estimate-values runs/mine --samples 16"))
def estimate_values(
    run: Path,
    *,
    samples: Number | None = None,
    reference: NumberOrZero = 0,
    split: str = "train",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Sample the frozen reference of a run (Stage 1) and report what its values cover.

    Args:
        run: A run directory with a reference.
        samples: Trajectories per task; a larger number than before adds to the stored ones.
            Default: as configured.
        reference: Version of the reference; 0 is the warm-started one.
        split: Tasks to sample.
        trust_remote_code: Run Python code that the run names: its model's, an environment's
            and an algorithm's (path.py:name).
    """
    from ragen_apo import api

    coverage = api.estimate_values(
        run, samples=samples, reference=reference, split=split, trust_remote_code=trust_remote_code
    )
    console.print_json(json.dumps(coverage))


@app.command(help_epilogue=examples("report runs/mine", "report runs/mine --pdf"))
def report(run: Path, *, pdf: bool = False) -> None:
    """Write tables, plots, failure_analysis.md, slides.pptx and report.html of a run.

    Args:
        run: A run directory with an evaluation, or the folder of a model behind an API.
        pdf: Also report.pdf, with an example of each failure. Needs the extra `pdf`.
    """
    from ragen_apo import api

    paths = api.write_report(run, pdf=pdf)
    say(f"report: {paths[-1]} ({len(paths)} files)")


@app.command(
    help_epilogue=examples("compare --config configs/compare_shop.yaml --out runs/compare")
)
def compare(
    *, config: Path, out: Folder = Path("runs/compare"), parallel: Number = 1, pdf: bool = False
) -> None:
    """Train several algorithms from the same reference with the same seeds, and compare them.

    Writes OUT/comparison.md, .csv, .tex, .pptx and .html, and curves. Finished runs in OUT are
    reused. An interrupted comparison continues when the command is given again.

    Args:
        config: A YAML file, or the name of a comparison that comes with ragen-apo, such as
            compare_shop (`ragen-apo configs` lists them).
        out: Where the runs and the results go.
        parallel: Number of runs that train at the same time. Their seconds can only be compared if
            each has its own cores: set machine.num_threads to the cores divided by this number.
            Where there are several GPUs, the runs are dealt out to them.
        pdf: Also comparison.pdf. Needs the extra `pdf`.
    """
    from ragen_apo import api

    api.compare(config, out, parallel=parallel, pdf=pdf)
    say(f"comparison: {out / 'comparison.md'}")


@app.command(help_epilogue=examples("configs", "configs shop > mine.yaml"))
def configs(name: str | None = None) -> None:
    """List the configurations that come with ragen-apo, or print one to change it.

    `--config NAME` takes them by these names. Those that begin with compare_ are comparisons, for
    `ragen-apo compare`.

    Args:
        name: Which one to print.
    """
    from rich.padding import Padding

    from ragen_apo.config.shipped import in_place_of, purpose_of, shipped_configurations

    shipped = shipped_configurations()
    if name is not None:
        if name not in shipped:
            raise ConfigError(f"there is no configuration {name}; {in_place_of(name)}")
        print(shipped[name].read_text("utf-8"), end="")
        return
    for each, path in shipped.items():
        say(each)
        console.print(Padding(purpose_of(path), (0, 0, 0, 4)))


@app.command(
    help_epilogue=examples(
        "show-prompt configs/shop.yaml",
        "show-prompt configs/webshop_qwen.yaml --policy.path FOLDER --task 3",
        "show-prompt configs/shop.yaml --run runs/mine",
    )
)
def show_prompt(
    config: Path | None = None,
    *overrides: Overrides,
    pretrained: str | None = None,
    run: Path | None = None,
    task: NumberOrZero = 0,
) -> None:
    """Print a scripted episode as the agent would read and write it, token by token.

    Each line is a token: its position, its id, `*` if it is trained, and its text. The episode is
    the teacher's; no weights are loaded.

    Args:
        config: A YAML file, such as RUN/config.yaml; its model may be untrained. Required.
        overrides: Configuration keys to change, such as `--policy.path FOLDER` or
            `--agent.system_prompt rules_and_format`.
        pretrained: As for `train`.
        run: A run directory whose tokenizer is used in place of the configuration's.
        task: Which training task, counted from 0.
    """
    from ragen_apo import api
    from ragen_apo.config import load_config

    if config is None:
        of_run = f", such as {run / 'config.yaml'}" if run else ""
        raise ConfigError(f"the configuration is missing: ragen-apo show-prompt FILE.yaml{of_run}")
    chosen = load_config(config, overrides, pretrained=pretrained)
    shown = api.show_prompt(chosen, run=run, task=task)
    played = shown.trajectory
    print(printable(f"task {played.task.task_id}: {played.task.instruction}"))
    if options := chosen.agent.template_options:
        print(printable(f"agent.template_options: {json.dumps(options)}"))
    print(
        f"{shown.policy}: {counted(len(played.turns), 'turn')}, return "
        f"{played.episode_return:+.2f}; {played.stop_reason.value}"
    )
    for number, (turns, tokens) in enumerate(zip(shown.turns, shown.contexts, strict=True), 1):
        num_trained = sum(token.is_trained for token in tokens)
        first, last = turns[0], turns[-1]
        print(
            f"\ncontext {number} of {len(shown.contexts)} "
            f"({f'turn {first}' if first == last else f'turns {first} to {last}'}): "
            f"{len(tokens)} tokens, {num_trained} of them trained (*)"
        )
        for position, token in enumerate(tokens):
            mark = "*" if token.is_trained else " "
            print(f"{position:5} {token.token_id:7} {mark} {printable(repr(token.text))}")
