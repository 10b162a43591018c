"""What Stage 2 reads from the value store: values under a reference, and which tasks to train on.

Reads only; `stages.values` fills the store. The first rank reads, and tells the others: the store
has to lie on a disk of its host.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from pydantic import TypeAdapter

from ragen_apo.config.values import ValuesConfig
from ragen_apo.errors import TrainingError
from ragen_apo.plural import counted
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session
from ragen_apo.stages.task_selection import select_stored_tasks
from ragen_apo.stages.value_regression import values_by_regression
from ragen_apo.task_order import missing_categories
from ragen_apo.types import Task, Trajectory
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.state_values import ReferenceValues, state_values
from ragen_apo.values.store import ValueStore

_REFERENCE_VALUES = TypeAdapter(ReferenceValues)


def reference_values(
    session: Session, reference: LanguageModel, tasks: Sequence[Task]
) -> ReferenceValues:
    """What the configured algorithm has to know of the reference: nothing, V* of tasks, of states.

    What Stage 2 subtracts is V*, or one of its ablations. Raises MissingValueError if the store
    lacks a task: a missing V* is never taken as 0.
    """
    config = session.config
    if not config.needs_values:
        return ReferenceValues()
    task_ids = [task.task_id for task in tasks]
    if config.values.baseline == "zero":
        return ReferenceValues(dict.fromkeys(task_ids, 0.0))
    beta = baseline_beta(config.values)
    min_visits = config.algorithm.min_state_visits
    conditions = session.conditions(reference)
    by_regression = config.values.estimator == "regression"

    def stored() -> ReferenceValues:
        with session.value_store() as store:
            # An error where a task has no sample, for a regression as well.
            values = store.values(conditions, task_ids, beta=beta)
            episodes = stored_trajectories(store, conditions, tasks)
            if by_regression:
                regression, values = values_by_regression(
                    reference,
                    list(episodes),
                    beta=beta,
                    micro_batch_size=config.training.micro_batch_size,
                )
                session.progress.say(regression.sentence())
                return ReferenceValues(values, regression=regression)
            if min_visits is None:
                return ReferenceValues(values)
            known = state_values(episodes, beta=beta, min_visits=min_visits)
            return ReferenceValues(values, known)

    # A regression reads what the whole reference makes of the episodes.
    with reference.whole() if by_regression else contextlib.nullcontext():
        return session.ranks.from_first(stored, "values of the store", _REFERENCE_VALUES)


def note_samples(
    session: Session,
    reference: LanguageModel,
    tasks: Sequence[Task],
    *,
    version: int,
    is_new: bool = False,
) -> None:
    """Notes how many samples of these tasks are read under reference `version` from now on.

    Says so where the run has read another number before, of a reference that is not `is_new`:
    `ragen-apo estimate-values` adds some. Values, chosen tasks and what is imitated come of all.
    """
    config = session.config
    reads_values = config.needs_values and config.values.baseline != "zero"
    chooses_tasks = config.needs_values and config.rollout_filter.strategy != "none"
    if not (reads_values or chooses_tasks or config.distillation.enabled):
        return
    conditions = session.conditions(reference)

    def stored() -> int:
        with session.value_store() as store:
            returns = store.returns_by_task(conditions)
        return sum(len(returns.get(task.task_id, ())) for task in tasks)

    num_samples = session.ranks.from_first(stored, "number of samples")
    if not session.ranks.is_first:
        return
    noted = session.run.read_status().get("samples_of_references", {})
    before = noted.get(str(version))
    if before == num_samples:
        return
    if before is not None and not is_new:
        session.progress.say(
            f"Stage 1 of reference {version} has {counted(num_samples, 'sample')} now, and had "
            f"{before} when this run read it before. All are used from here on, so the run will "
            "not end like one that had the same samples throughout"
        )
    session.run.note(samples_of_references={**noted, str(version): num_samples})


def selected_tasks(
    session: Session, reference: LanguageModel, tasks: Sequence[Task], *, version: int = 0
) -> Sequence[Task]:
    """The tasks that Stage 2 trains on under this reference: all without `rollout_filter`.

    All for algorithms without a Stage 1 as well, which filter the rollouts of each step. Empty
    where a trained reference (`version` above 0) always solves most tasks, and of the others none
    has samples that differ. Raises TrainingError if no task is left for other reasons and
    MissingValueError if the store lacks one.
    """
    config = session.config
    if not config.needs_values or config.rollout_filter.strategy == "none":
        return tasks

    conditions = session.conditions(reference)

    def selected() -> list[str]:
        chosen = _selected_by_store(session, conditions, tasks, version=version)
        return [task.task_id for task in chosen]

    ids = set(session.ranks.from_first(selected, "tasks of the store"))
    return [task for task in tasks if task.task_id in ids]


def _selected_by_store(
    session: Session, conditions: SamplingConditions, tasks: Sequence[Task], *, version: int
) -> Sequence[Task]:
    config = session.config
    with session.value_store() as store:
        # A task without samples is an error, as it is for the values.
        store.values(conditions, [task.task_id for task in tasks], beta=config.values.beta1)
        selection = select_stored_tasks(store, conditions, tasks, config.rollout_filter)
    session.progress.say(selection.counts.sentence())
    solved = selection.counts.always_solved
    if not selection.tasks and version > 0 and 2 * solved >= len(tasks):
        return ()
    if not selection.tasks:
        raise TrainingError(
            f"{selection.counts.sentence()} There is nothing to train on. In a new run: where most "
            "are never solved, sample them more often (values.num_samples, values.adaptive), "
            "warm-start longer or use a shaped reward; where most are always solved, use harder "
            "tasks; or set rollout_filter.zero_variance to keep. "
            + _how_to_go_on(session, version=version)
        )
    weights = session.environments.properties.category_weights
    if missing := ", ".join(missing_categories(selection.tasks, weights)):
        if version == 0:
            raise TrainingError(
                f"{selection.counts.sentence()} None is of {missing}, which should come up by its "
                "weight. In a new run: keep more tasks (rollout_filter.value), sample more often, "
                "or leave it out. " + _how_to_go_on(session, version=version)
            )
        session.progress.say(f"None is of {missing}; its share goes to the others by their weights")
    return selection.tasks


def _how_to_go_on(session: Session, *, version: int) -> str:
    path = session.config.values.store
    whose = "its store" if path is None else f"{path} (RUN is the run that it belongs to)"
    run = session.run.path if path is None else "RUN"
    return (
        f"To go on with this run, add samples to {whose}: `ragen-apo estimate-values {run} "
        f"--samples N --reference {version}`, with N above the samples that each task has now, "
        "then --resume."
    )


def baseline_beta(settings: ValuesConfig) -> float:
    """The temperature of the value that is subtracted; infinite for the mean."""
    return math.inf if settings.baseline == "mean" else settings.beta1


def stored_trajectories(
    store: ValueStore, conditions: SamplingConditions, tasks: Sequence[Task]
) -> Iterator[Trajectory]:
    """All samples of the tasks, one task after another."""
    for task in tasks:
        yield from store.trajectories(conditions, task.task_id)
