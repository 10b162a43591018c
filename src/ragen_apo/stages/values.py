"""Stage 1 of a run: values of all training tasks under one reference, and what they cover."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen_apo.agent.assembly import build_proxy, sampling_conditions
from ragen_apo.config import RunConfig
from ragen_apo.config.algorithms import ApoConfig
from ragen_apo.errors import MissingValueError, RunDirectoryError, TrainingError
from ragen_apo.files import write_json_atomically
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session, open_session
from ragen_apo.stages.collect_values import collect_values
from ragen_apo.stages.origin import require_same_origin
from ragen_apo.stages.task_selection import select_stored_tasks
from ragen_apo.task_order import missing_categories
from ragen_apo.types import Task, Trajectory, TurnFlag
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.coverage import coverage_report, coverage_sentence, few_are_solved
from ragen_apo.values.estimator import SampleSchedule
from ragen_apo.values.reference_values import ReferenceValues
from ragen_apo.values.state_values import state_coverage, state_values
from ragen_apo.values.store import ValueStore

SECONDS_NOTED_EVERY = 10.0
"""What of its time Stage 1 may lose in a kill; its samples are all kept."""


def sample_schedule(apo: ApoConfig) -> SampleSchedule:
    """A fixed number of samples a task, or doubling rounds for tasks that seldom succeed."""
    first = apo.num_value_samples
    return SampleSchedule(first=first, cap=apo.max_value_samples if apo.adaptive_vstar else first)


def reference_values(
    session: Session, reference: LanguageModel, tasks: Sequence[Task]
) -> ReferenceValues:
    """What the configured algorithm has to know of the reference: nothing, V* of tasks, of states.

    What Stage 2 subtracts is V*, or one of its ablations. Raises MissingValueError if the store
    lacks a task (a missing V* is never taken as 0), or has too few of its returns for a spread.
    """
    config = session.config
    if not config.needs_values:
        return ReferenceValues()
    task_ids = [task.task_id for task in tasks]
    is_zero = config.apo.value_baseline == "zero"
    by_task = dict.fromkeys(task_ids, 0.0)
    if is_zero and not config.monitors.gradient_buckets:
        return ReferenceValues(by_task)
    beta = baseline_beta(config.apo)
    by_state, return_std = {}, None
    conditions = sampling_conditions(config, reference, session.environments)
    with ValueStore(store_path(session), create=False) as store:
        if not is_zero:
            by_task = store.values(conditions, task_ids, beta=beta)
        if config.monitors.gradient_buckets:
            return_std = _sampled_return_std(store, conditions, task_ids)
        if config.algorithm == "apo_turn" and not is_zero:
            by_state = state_values(
                _trajectories(store, conditions, tasks),
                beta=beta,
                min_visits=config.turn_level.min_visits,
            )
    return ReferenceValues(by_task, by_state, return_std)


def selected_tasks(
    session: Session, reference: LanguageModel, tasks: Sequence[Task], *, version: int = 0
) -> Sequence[Task]:
    """The tasks that Stage 2 trains on under this reference: all without `rollout_filter`.

    All for algorithms without a Stage 1 as well, which filter the rollouts of each step. Empty
    where a trained reference (`version` above 0) always solves every one. Raises TrainingError if
    no task is left for other reasons and MissingValueError if the store lacks one.
    """
    config = session.config
    if not config.needs_values or config.rollout_filter.strategy == "none":
        return tasks
    conditions = sampling_conditions(config, reference, session.environments)
    with ValueStore(store_path(session), create=False) as store:
        # A task without samples is an error, as it is for the values.
        store.values(conditions, [task.task_id for task in tasks], beta=config.apo.beta1)
        selection = select_stored_tasks(store, conditions, tasks, config.rollout_filter)
    session.progress.say(selection.counts.sentence())
    if version > 0 and selection.counts.always_solved == len(tasks):
        return ()
    if not selection.tasks:
        raise TrainingError(
            f"{selection.counts.sentence()} There is nothing to train on. Where most are never "
            "solved, sample them more often (apo.num_value_samples, apo.adaptive_vstar), "
            "warm-start longer or use a shaped reward; where most are always solved, use harder "
            "tasks; or set rollout_filter.zero_variance to keep. To go on with this run, add "
            f"samples to its store: `ragen-apo estimate-values {session.run.path} --samples N "
            "--reference VERSION`, then --resume. The policy so far is the newest folder in "
            f"{session.run.reference(0).parent}."
        )
    weights = session.environments.properties.category_weights
    if missing := missing_categories(selection.tasks, weights):
        raise TrainingError(
            f"{selection.counts.sentence()} None is of {', '.join(missing)}, which should "
            "come up by its weight; keep more tasks (rollout_filter.value), or sample more often"
        )
    return selection.tasks


def _trajectories(
    store: ValueStore, conditions: SamplingConditions, tasks: Sequence[Task]
) -> Iterator[Trajectory]:
    for task in tasks:
        yield from store.trajectories(conditions, task.task_id)


def unreadable_share(trajectories: Iterable[Trajectory]) -> float:
    """The share of turns whose response held no thought and action that could be read."""
    turns = [turn.flags for trajectory in trajectories for turn in trajectory.turns]
    return sum(TurnFlag.FORMAT_ERROR.value in flags for flags in turns) / max(len(turns), 1)


def baseline_beta(apo: ApoConfig) -> float:
    """The temperature of the value that is subtracted; infinite for the mean."""
    return math.inf if apo.value_baseline == "mean" else apo.beta1


def _sampled_return_std(
    store: ValueStore, conditions: SamplingConditions, task_ids: Sequence[str]
) -> dict[str, float]:
    """Standard deviation of each task's stored returns (divided by their number), by task id."""
    returns = store.returns_by_task(conditions)
    missing = [task_id for task_id in task_ids if len(returns.get(task_id, ())) < 2]
    if missing:
        raise MissingValueError(
            f"monitors.gradient_buckets compares the Stage 1 returns of a task, and {len(missing)} "
            f"of {len(task_ids)} tasks have fewer than 2 in {store.path}, such as "
            f"{missing[0]}. Sample more (apo.num_value_samples) or turn gradient_buckets off."
        )
    return {task_id: statistics.pstdev(returns[task_id]) for task_id in task_ids}


def store_path(session: Session) -> Path:
    """The run's own value store, or the one that the configuration names."""
    configured = session.config.apo.value_store
    return Path(configured) if configured else session.run.values


def estimate_run_values(
    config: RunConfig, run: RunDirectory, *, version: int, split: str, progress: Progress
) -> dict[str, Any]:
    """Stage 1 for an existing run's reference; returns the coverage report.

    Raises RunDirectoryError if the run has no such reference.
    """
    session = open_session(config, run, progress)
    require_same_origin(
        session, but_for=("apo.num_value_samples", "apo.adaptive_vstar", "evaluation")
    )
    if not run.reference(version).exists():
        raise RunDirectoryError(
            f"{run.path} has no reference {version}; `ragen-apo train` makes reference 0 by the "
            "warm start and later ones where apo.reference_refresh asks for them"
        )
    tasks = session.training_tasks() if split == "train" else session.environments.tasks(split)
    with run.locked():
        report = estimate_values(session, session.load_model(run.reference(version)), tasks)
        if split == "train":
            write_json_atomically(run.value_report_of(version), report)
    return report


def estimate_values(
    session: Session, reference: LanguageModel, tasks: Sequence[Task]
) -> dict[str, Any]:
    """Samples the reference until the run's store has what the schedule wants; returns coverage."""
    config = session.config
    conditions = sampling_conditions(config, reference, session.environments)
    proxy = build_proxy(config, reference, session.environments)
    round_total = -1

    def on_progress(done: int, total: int) -> None:
        nonlocal round_total
        if done == 0 or total != round_total:
            session.progress.start("stage 1", total)
            round_total = total
        session.progress.update(done)
        session.note_seconds(every=SECONDS_NOTED_EVERY)

    with ValueStore(session.run.values) as store:
        collect_values(
            proxy,
            store,
            tasks,
            conditions=conditions,
            schedule=sample_schedule(config.apo),
            seed=derive_seed(config.seed, conditions.reference_fingerprint),
            on_progress=on_progress,
        )
        task_ids = [task.task_id for task in tasks]
        returns, successes = store.returns_by_task(conditions), store.successes_by_task(conditions)
        solved = {task_id: successes[task_id] for task_id in task_ids}
        unreadable = None
        if few_are_solved(solved):  # reading every response back takes a while
            unreadable = unreadable_share(_trajectories(store, conditions, tasks))
        report = coverage_report(
            {task_id: returns[task_id] for task_id in task_ids},
            solved,
            beta=config.apo.beta1,
            unreadable_share=unreadable,
        )
        if config.algorithm == "apo_turn":
            report |= asdict(
                state_coverage(
                    _trajectories(store, conditions, tasks),
                    min_visits=config.turn_level.min_visits,
                )
            )
        selection = select_stored_tasks(store, conditions, tasks, config.rollout_filter)
    report["selection"] = asdict(selection.counts)
    session.progress.say(coverage_sentence(report))
    if report["advice"]:
        session.progress.say(str(report["advice"]))
    return report
