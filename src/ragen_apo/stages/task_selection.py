"""Which tasks Stage 2 of A*-PO trains on, chosen by what Stage 1 saw of them (StarPO-S).

    Stage 1's returns of each task -> `rollout_filter` -> tasks of Stage 2

Other algorithms play each task several times a step, and `rollout_filter` chooses among the tasks
of the step. A*-PO plays a task once. So it applies the same filter to the reference's rollouts of
Stage 1, once for every reference. A task that the reference always or never solves there teaches
little: its residual is 0 except in the few episodes that end differently.

The choice is a function of the value store and the configuration, so a resumed run makes it again.
It does not depend on the trained episodes. `values.adaptive` comes first: a task without a success
has been sampled `values.max_samples` times before it can be left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from ragen_apo.config.training import RolloutFilterConfig
from ragen_apo.objectives.filters import filter_groups
from ragen_apo.plural import counted
from ragen_apo.types import Task
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.store import ValueStore


@dataclass(frozen=True)
class SelectionCounts:
    """How many tasks were chosen, and why the others were not."""

    kept: int
    never_solved: int = 0
    """Left out: all returns are equal, no sample is a success."""
    always_solved: int = 0
    """Left out: all returns are equal, every sample is a success."""
    equal_returns: int = 0
    """Left out: all returns are equal, and some samples are successes."""
    low_score: int = 0
    """Left out by the strategy."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def sentence(self) -> str:
        reasons = [
            f"{number} {name.replace('_', ' ')}"
            for name, number in asdict(self).items()
            if name != "kept" and number
        ]
        text = f"rollout_filter: Stage 2 trains on {self.kept} of {counted(self.total, 'task')}"
        return f"{text}; left out: {', '.join(reasons)}." if reasons else f"{text}."


@dataclass(frozen=True)
class TaskSelection:
    """The tasks of Stage 2 in the order in which they were given, possibly none."""

    tasks: tuple[Task, ...]
    counts: SelectionCounts
    verdicts: Mapping[str, str]
    """By task id: `kept`, or the field of `SelectionCounts` that says why not."""


def select_stored_tasks(
    store: ValueStore,
    conditions: SamplingConditions,
    tasks: Sequence[Task],
    settings: RolloutFilterConfig,
) -> TaskSelection:
    """Applies the filter to all samples that the store has of the tasks, at least one of each."""
    return select_tasks(
        tasks,
        returns=store.returns_by_task(conditions),
        successes=store.successes_by_task(conditions),
        settings=settings,
    )


def select_tasks(
    tasks: Sequence[Task],
    *,
    returns: Mapping[str, Sequence[float]],
    successes: Mapping[str, Sequence[bool]],
    settings: RolloutFilterConfig,
) -> TaskSelection:
    """The tasks that the filter keeps, by task id in the mappings; every task has a sample."""
    task_ids = list(dict.fromkeys(task.task_id for task in tasks))
    group_B, returns_B = [], []
    for index, task_id in enumerate(task_ids):
        group_B += [index] * len(returns[task_id])
        returns_B += returns[task_id]
    # In float32, as Stage 2 computes: sums of the same rewards in another order are equal there.
    result = filter_groups(
        torch.tensor(returns_B, dtype=torch.float32),
        group_B=torch.tensor(group_B),
        settings=settings,
    )
    verdicts = {}
    groups = zip(task_ids, result.keep_G.tolist(), result.constant_G.tolist(), strict=True)
    for task_id, keep, constant in groups:
        if keep:
            verdicts[task_id] = "kept"
        elif constant and settings.zero_variance == "drop":
            verdicts[task_id] = _reason(successes[task_id])
        else:
            verdicts[task_id] = "low_score"
    return TaskSelection(
        tasks=tuple(task for task in tasks if verdicts[task.task_id] == "kept"),
        counts=SelectionCounts(**{"kept": 0, **Counter(verdicts.values())}),
        verdicts=verdicts,
    )


def _reason(successes: Sequence[bool]) -> str:
    """Which field of `SelectionCounts` a task without variance belongs to."""
    if not any(successes):
        return "never_solved"
    return "always_solved" if all(successes) else "equal_returns"
