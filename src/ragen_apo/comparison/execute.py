"""Plays the runs of a comparison, each in a process of its own; runs that are done are reused.

OUT/seed-0/reference/   the warm start, made once a seed
OUT/seed-0/<run>/       a run directory like any other

Runs that play at the same time are dealt out to the GPUs that there are.
"""

from __future__ import annotations

import functools
import os
import queue
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import BaseModel, TypeAdapter

from ragen_apo.comparison.lifeline import Lifeline
from ragen_apo.comparison.plan import REFERENCE, Comparison, folder_name
from ragen_apo.config import RunConfig, load_config, resolved_yaml
from ragen_apo.config.load import read_values
from ragen_apo.config.moved import value_at
from ragen_apo.config.overrides import Change, changes_in_words, differences
from ragen_apo.config.references import asks_for_trust
from ragen_apo.config.training import EvaluationConfig
from ragen_apo.environments.base import opened_environment
from ragen_apo.errors import ConfigError, RagenApoError, RunDirectoryError
from ragen_apo.files import read_json, write_text_atomically
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages.disk import more_than_fits
from ragen_apo.stages.inputs import check_run_inputs
from ragen_apo.stages.more_steps import MAX_STEPS, has_steps_left
from ragen_apo.stages.origin import edited_files

_Job = tuple[RunDirectory, RunConfig, Literal["warm-start", "train"]]
"""A run, its configuration, and how far it goes: to its reference, or to its evaluation."""
STORE = "values.store"
_PATHS = ("policy.path", STORE)
"""Keys with absolute paths of what lies beside a run."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def play_comparison(
    comparison: Comparison,
    out: Path,
    *,
    say: Callable[[str], None],
    parallel: int = 1,
    quiet: bool = False,
) -> dict[tuple[str, int], RunDirectory]:
    """Brings every run to its end, `parallel` at a time, and returns them by (name, seed).

    What the runs print goes to a file beside each if there are several at a time, or if `quiet`.
    Raises RunDirectoryError where a run in `out` was started with another configuration, and
    RagenApoError where one fails; the runs in progress are ended first.
    """
    if RunDirectory(out).config.exists():
        raise RunDirectoryError(
            f"{out} is a run, and a comparison has a folder of its own; give another --out"
        )
    firsts: list[_Job] = []
    samplers: list[_Job] = []
    others: list[_Job] = []
    whose_values = set(comparison.values_of.values())
    runs: dict[tuple[str, int], RunDirectory] = {}
    for seed in comparison.settings.seeds:
        first = RunDirectory(out / f"seed-{seed}" / REFERENCE)
        for name in comparison.settings.runs:
            # Relative paths would name another folder from another working directory.
            reference = first.reference(0).resolve()
            sampler = comparison.values_of.get(name)
            store = runs[sampler, seed].values.resolve() if sampler else None
            config = comparison.run(name, seed, reference=reference, store=store)
            runs[name, seed] = RunDirectory(first.path.parent / folder_name(name))
            jobs = samplers if name in whose_values else others
            jobs.append((runs[name, seed], config, "train"))
        # One that was removed is not missed where all runs have ended.
        ended = all(runs[name, seed].policy.exists() for name in comparison.settings.runs)
        if first.config.exists() or not ended:
            firsts.append((first, comparison.reference(seed), "warm-start"))
    _check_inputs([*firsts, *samplers, *others])
    play = functools.partial(finish_run, say=say, quiet=quiet or parallel > 1)
    _finish(firsts, parallel, play)
    left = {run.path: config for run, config, _ in (*samplers, *others) if not run.policy.exists()}
    if left and (problem := more_than_fits(left, reference=firsts[0][0].reference(0))):
        say(problem)
    for stage in (samplers, others):
        _finish(stage, parallel, play)
    return runs


def _check_inputs(jobs: Sequence[_Job]) -> None:
    """Raises ConfigError where an environment refuses a run that has not begun, before any does."""
    by_world: dict[str, list[tuple[RunDirectory, RunConfig]]] = {}
    for run, config, _ in jobs:
        if not run.config.exists():
            by_world.setdefault(repr(config.environment), []).append((run, config))
    for waiting in by_world.values():
        world = waiting[0][1].environment
        with opened_environment(world.name, world.options) as environment:
            for run, config in waiting:
                try:
                    check_run_inputs(config, environment)
                except ConfigError as error:
                    raise ConfigError(f"{run.path.name}: {error}") from error


def _finish(jobs: Sequence[_Job], parallel: int, play: Callable[..., None]) -> None:
    """Plays all; after a failure nothing new is begun, and the failure is raised.

    An interruption ends the runs in progress as well, and so does the end of this process.
    """
    failed = threading.Event()
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in _gpus(jobs, parallel):
        free.put(gpu)

    def one(job: _Job) -> None:
        if failed.is_set():
            return
        gpu = free.get()
        try:
            play(*job, lifeline=lifeline, gpu=gpu)
        except BaseException:
            failed.set()
            raise
        finally:
            free.put(gpu)

    # Each thread waits for a process.
    with Lifeline() as lifeline, ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(one, job) for job in jobs]
        try:
            wait(futures)
        except BaseException:
            failed.set()
            lifeline.cut()
            raise
        for future in futures:
            future.result()


def _gpus(jobs: Sequence[_Job], parallel: int) -> list[str | None]:
    """A GPU for each of the runs that play at the same time; None leaves the choice to the run."""
    if parallel == 1 or all(config.machine.device == "cpu" for _, config, _ in jobs):
        return [None] * parallel
    import torch  # takes seconds

    num_gpus = torch.cuda.device_count()  # starts CUDA in no process
    chosen = os.environ.get(_VISIBLE)
    names = map(str, range(num_gpus)) if chosen is None else chosen.split(",")[:num_gpus]
    found = [name.strip() for name in names]
    return [found[slot % len(found)] if len(found) > 1 else None for slot in range(parallel)]


def finish_run(
    run: RunDirectory,
    config: RunConfig,
    verb: Literal["warm-start", "train"],
    *,
    lifeline: Lifeline,
    say: Callable[[str], None],
    quiet: bool = False,
    gpu: str | None = None,
) -> None:
    """Starts, continues or reuses a run, in processes that end with the lifeline.

    A run that has ended after fewer steps goes on. One that was evaluated otherwise since, such as
    on another split, is evaluated again. `quiet` writes the output of the processes to a file
    beside the run. `gpu` is the only one that they see, by number or UUID.
    """
    call = functools.partial(_call, lifeline, variables={} if gpu is None else {_VISIBLE: gpu})
    where = "" if gpu is None else f" on GPU {gpu}"
    if run.config.exists():
        _require_same_configuration(run, config)
        if run.policy.exists():  # what goes on says so itself
            for sentence in edited_files(config, run.read_status()):
                say(f"{run.path}: {sentence}")
    log = run.path.with_name(f"{run.path.name}.log") if quiet else None
    trust = ["--trust-remote-code"] if asks_for_trust(config.model_dump(by_alias=True)) else []
    goal, doing = {
        "warm-start": (run.reference(0), "warm start"),
        "train": (run.policy, "training"),
    }[verb]
    num_steps = config.training.max_steps
    # Its config.yaml may have the number already, if a kill came before it went on.
    if not goal.exists() or (verb == "train" and has_steps_left(run, max_steps=num_steps)):
        say(f"{run.path}: {doing}{where}")
        started = run.config.exists()
        text = run.path.with_name(f"{run.path.name}.yaml")
        write_text_atomically(text, resolved_yaml(config))
        longer = ["--resume", *trust, f"--{MAX_STEPS}", str(num_steps)]
        how = longer if started else ["--config", str(text)]
        alone = ["--no-evaluate"] if verb == "train" else []
        call(verb, "--run-dir", str(run.path), *how, *alone, log=log)
    if verb == "train" and _played(run) != config.evaluation:
        say(f"{run.path}: evaluation{where}")
        pass_k = config.evaluation.pass_k
        asked = [] if pass_k is None else ["--pass-k", str(pass_k)]
        call("evaluate", str(run.path), *asked, *trust, log=log)


def _require_same_configuration(run: RunDirectory, config: RunConfig) -> None:
    """Raises RunDirectoryError where the run was started with another configuration.

    The absolute paths of what lies beside it may be others: the comparison was moved, then. There
    may be more steps, unless the learning rate falls until the last one. And pass@k, which changes
    no training, may be asked for later. And a run that has sampled its own Stage 1 keeps it where
    another one's would do.
    """
    name = value_at(read_values(run.config)[0], "algorithm.name")
    if name != config.algorithm.name:  # code that only the run names is not imported
        _refuse(run, [Change("algorithm.name", name, config.algorithm.name)])
    began = load_config(run.config, may_import=False)
    before, now = (each.model_dump(by_alias=True) for each in (began, config))
    seed_folder = run.path.parent.resolve()
    has_constant_rate = config.optimizer.schedule == "constant"
    changes = [
        each
        for each in differences(before, now)
        if not (each.key in _PATHS and _has_moved(str(each.before), str(each.after), seed_folder))
        and not (each.key == "evaluation.pass_k" and each.after is not None)
        and not (each.key == STORE and _samples_its_own(each, seed_folder))
        and not (each.key == MAX_STEPS and each.after > each.before and has_constant_rate)
    ]
    if changes:
        _refuse(run, changes)


def _refuse(run: RunDirectory, changes: Sequence[Change]) -> NoReturn:
    raise RunDirectoryError(
        f"{run.path} was started with another configuration than this comparison has now: "
        f"{changes_in_words(changes)}. Put that back, remove the run, or give another --out"
    )


def _samples_its_own(store: Change, seed_folder: Path) -> bool:
    """Whether a run that has a Stage 1 of its own would take that of another run now."""
    return store.before is None and _is_in(str(store.after), seed_folder)


def _is_in(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder)


def _has_moved(old: str, new: str, seed_folder: Path) -> bool:
    """Whether both name the same place in the folder of a seed, which has moved since."""
    if not _is_in(new, seed_folder):
        return False
    parts = Path(new).relative_to(seed_folder.parent).parts
    return Path(old).parts[-len(parts) :] == parts


class _Results(BaseModel):
    evaluation: EvaluationConfig | None = None
    """None in results of versions that did not write it."""


def _played(run: RunDirectory) -> EvaluationConfig | None:
    """The evaluation whose results the run has; None where they do not say."""
    if not run.results.exists():
        return None
    advice = f"Evaluate the run again: `ragen-apo evaluate {shlex.quote(str(run.path))}`"
    return read_json(run.results, TypeAdapter(_Results), advice=advice).evaluation


def _call(
    lifeline: Lifeline, *arguments: str, log: Path | None, variables: Mapping[str, str]
) -> None:
    # A process of its own, so that the peak memory is that of one run.
    play = functools.partial(lifeline.call, "ragen_apo.cli", arguments, variables=variables)
    if log is None:
        status, where = play(), "above"
    else:
        with log.open("ab") as stream:
            status = play(log=stream)
        where = f"at the end of {log}"
    if status:
        how = f"ended with status {status}; see its message {where}"
        if status < 0:
            how = f"was killed (signal {-status}), perhaps for want of memory"
        command = shlex.join(("ragen-apo", *arguments))
        raise RagenApoError(f"`{command}` {how}. Give the same compare command again to go on.")
