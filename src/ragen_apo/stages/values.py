"""Stage 1 of a run: values of all training tasks under one reference, and what they cover."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ragen_apo.config import RunConfig
from ragen_apo.config.training import RolloutFilterConfig
from ragen_apo.config.values import ValuesConfig
from ragen_apo.environments.base import tasks_of
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.files import csv_text, write_json_atomically, write_text_atomically
from ragen_apo.phase_clock import SECONDS_NOTED_EVERY
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.printable import printable
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session, open_session
from ragen_apo.stages.collect_values import asked, collect_values
from ragen_apo.stages.origin import require_same_origin, require_same_tasks
from ragen_apo.stages.stored_values import stored_trajectories
from ragen_apo.stages.task_selection import select_stored_tasks
from ragen_apo.tracking.run_tracking import stage_one_row
from ragen_apo.types import StopReason, Task, Trajectory, TurnFlag
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.coverage import Faults, coverage_report, coverage_sentence, few_are_solved
from ragen_apo.values.estimator import SampleSchedule, soft_value
from ragen_apo.values.state_values import state_coverage
from ragen_apo.values.store import ValueStore


def sample_schedule(settings: ValuesConfig, *, num_samples: int | None = None) -> SampleSchedule:
    """A fixed number of samples a task, or doubling rounds for tasks that seldom succeed.

    `num_samples` takes the place of that of the settings.
    """
    first = settings.num_samples if num_samples is None else num_samples
    return SampleSchedule(first=first, cap=settings.max_samples if settings.adaptive else first)


def faults_of(trajectories: Iterable[Trajectory]) -> Faults:
    """What was wrong with the responses and the ends of these episodes."""
    turns: list[Sequence[str]] = []
    reasons: list[StopReason] = []
    for trajectory in trajectories:
        turns += (turn.flags for turn in trajectory.turns)
        reasons.append(trajectory.stop_reason)

    def share(flag: TurnFlag) -> float:
        return sum(flag.value in flags for flags in turns) / max(len(turns), 1)

    return Faults(
        unreadable=share(TurnFlag.FORMAT_ERROR),
        invalid=share(TurnFlag.INVALID_ACTION),
        cut=reasons.count(StopReason.CONTEXT_LIMIT) / max(len(reasons), 1),
    )


def estimate_run_values(
    config: RunConfig, run: RunDirectory, *, version: int, split: str, progress: Progress
) -> dict[str, Any]:
    """Stage 1 for an existing run's reference; returns the coverage report.

    Raises RunDirectoryError if the run has no such reference.
    """
    session = open_session(config, run, progress)
    free = ("values.num_samples", "values.adaptive", "reference.num_samples", "evaluation")
    require_same_origin(session, but_for=free)
    if split == "train":
        require_same_tasks(session)
    if config.values.store is not None:
        raise ConfigError(
            f"{run.path} takes V* from {config.values.store} (values.store), and would not read "
            "samples of its own; sample the run that this store belongs to, under the settings "
            "that both have"
        )
    if not run.reference(version).exists():
        raise RunDirectoryError(
            f"{run.path} has no reference {version}; `ragen-apo train` makes reference 0 by the "
            "warm start and later ones where the section reference asks for them"
        )
    tasks = session.training_tasks() if split == "train" else tasks_of(session.environments, split)
    with session.locked():
        if session.ranks.is_first:
            run.remove_leftovers()
        reference = session.load_model(run.reference(version))
        is_trained_on = split == "train"
        report = estimate_values(
            session, reference, tasks, version=version, is_trained_on=is_trained_on
        )
        if is_trained_on:
            note_values(session, report, version=version)
    return report


def note_values(session: Session, report: Mapping[str, Any], *, version: int) -> None:
    """Writes the coverage of the training tasks; trackers get it as step `version` of Stage 1."""
    if not session.ranks.is_first:
        return
    path = session.run.value_report_of(version)
    write_json_atomically(path, report)
    session.tracking.note(path, stage_one_row(report, version))


def note_stage_one_tokens(run: RunDirectory) -> None:
    """Writes down what Stage 1 of each reference cost, in generated tokens.

    For when training ends: what `ragen-apo estimate-values` adds later, no training has used.
    """
    with ValueStore(run.values, create=False) as store:
        run.note(stage_one_tokens=store.num_response_tokens(split="train"))


def estimate_values(
    session: Session,
    reference: LanguageModel,
    tasks: Sequence[Task],
    *,
    version: int = 0,
    is_trained_on: bool = True,
) -> dict[str, Any]:
    """Samples reference `version` until the run's store has what the schedule wants.

    Returns coverage, on all ranks. `is_trained_on`: whether these are the training tasks, for which
    its advice is, and the table of their values (`values.csv`).
    """
    config = session.config
    num_samples = config.reference.num_samples if version > 0 else None
    conditions = session.conditions(reference)
    schedule = sample_schedule(config.values, num_samples=num_samples)
    round_total = -1

    def on_progress(done: int, total: int) -> None:
        nonlocal round_total
        if done == 0 or total != round_total:
            session.progress.start("stage 1", total)
            round_total = total
        session.progress.update(done)
        session.clock.note(every=SECONDS_NOTED_EVERY)

    first = session.ranks.is_first
    with ValueStore(session.run.values) if first else contextlib.nullcontext() as store:
        collect_values(
            session.proxy(reference),
            store,
            tasks,
            conditions=conditions,
            schedule=schedule,
            seed=derive_seed(config.seed, conditions.reference_fingerprint),
            on_progress=on_progress,
        )
        report = asked(
            session.ranks,
            store,
            lambda store: _coverage(
                store,
                conditions,
                tasks,
                config,
                num_first=schedule.first,
                table=session.run.value_table_of(version) if is_trained_on else None,
            ),
        )
    session.progress.say(coverage_sentence(report))
    if is_trained_on and report["advice"]:
        session.progress.say(str(report["advice"]))
    return report


def _coverage(
    store: ValueStore,
    conditions: SamplingConditions,
    tasks: Sequence[Task],
    config: RunConfig,
    *,
    num_first: int,
    table: Path | None,
) -> dict[str, Any]:
    """What the stored samples of these tasks say about the reference; each task in `table`."""
    task_ids = [task.task_id for task in tasks]
    returns, successes = store.returns_by_task(conditions), store.successes_by_task(conditions)
    solved = {task_id: successes[task_id] for task_id in task_ids}
    faults = None
    if few_are_solved(solved):  # reading every response back takes a while
        faults = replace(
            faults_of(stored_trajectories(store, conditions, tasks)),
            form_is_told=config.agent.system_prompt == "rules_and_format",
        )
    report = coverage_report(
        {task_id: returns[task_id] for task_id in task_ids},
        solved,
        beta=config.values.beta1,
        faults=faults,
        num_first=num_first if config.values.adaptive else None,
    )
    min_visits = config.algorithm.min_state_visits
    # A regression values every state.
    if min_visits is not None and config.values.estimator == "samples":
        trajectories = stored_trajectories(store, conditions, tasks)
        report |= state_coverage(trajectories, min_visits=min_visits)
    # Without V* the filter chooses among the rollouts of each step, not among tasks.
    chosen = config.rollout_filter if config.needs_values else RolloutFilterConfig()
    selection = select_stored_tasks(store, conditions, tasks, chosen)
    if table is not None:
        beta = config.values.beta1
        text = _table(tasks, returns, successes, beta=beta, verdicts=selection.verdicts)
        write_text_atomically(table, text)
    return report | {"selection": asdict(selection.counts)}


def _table(
    tasks: Sequence[Task],
    returns: Mapping[str, Sequence[float]],
    successes: Mapping[str, Sequence[bool]],
    *,
    beta: float,
    verdicts: Mapping[str, str],
) -> str:
    """CSV, a row for each task: what its samples say, and whether Stage 2 plays it."""
    rows = []
    for task in {task.task_id: task for task in tasks}.values():
        earned = returns[task.task_id]
        row = {
            "task_id": task.task_id,
            "category": printable(task.category),
            "samples": len(earned),
            "successes": sum(successes[task.task_id]),
            "mean_return": f"{soft_value(earned, beta=math.inf):.6g}",
            "v_star": f"{soft_value(earned, beta=beta):.6g}",
            "stage_2": verdicts[task.task_id],
            "instruction": printable(task.instruction),
        }
        rows.append(row)
    return csv_text(rows)
