"""Cost and success of a finished run, Stage 1 and distillation included.

Seconds are those of Stage 1, distillation, rollouts and updates: not the warm start, which all runs
share, and not the evaluations. What a reference costs is counted before its first step.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, TypeAdapter

from ragen_apo.comparison.plan import BudgetConfig
from ragen_apo.config import load_config
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import read_json, read_records
from ragen_apo.plural import counted
from ragen_apo.run_directory import RunDirectory
from ragen_apo.values.store import ValueStore


class _Rate(BaseModel):
    success_rate: float


class _Baselines(BaseModel):
    reference: _Rate


class _Results(_Rate):
    """The part of results.json that a comparison reads."""

    success_ci95: tuple[float, float]
    baselines: _Baselines
    pass_at_k: dict[int, float] = {}


class _Step(BaseModel):
    """The part of each row of metrics.jsonl that it reads; None for what a row does not have."""

    rollout_seconds: float
    training_seconds: float
    num_generated_tokens: int
    step: int
    num_updates: int | None = None
    reference_version: int = 0
    eval_success_rate: float | None = None
    kl_per_sequence: float | None = None
    entropy: float | None = None


class _Distilled(BaseModel):
    """The part of each row of distillation.jsonl that it reads; one of an update has seconds."""

    reference_version: int
    seconds: float | None = None
    eval_success_rate: float | None = None


REFERENCE, STAGE_ONE, DISTILLED = -2, -1, 0


@dataclass(frozen=True)
class _Part:
    """What a part of a run costs, and the evaluation that follows it, if one does."""

    seconds: float
    tokens: int
    success: float | None = None
    moment: int = REFERENCE
    """Of the evaluation, as `Point.moment`."""


@dataclass(frozen=True)
class _Reference:
    """What a reference costs before its first step."""

    sampling_seconds: float
    distillation_seconds: float
    tokens: int

    @property
    def whole(self) -> _Part:
        return _Part(self.sampling_seconds + self.distillation_seconds, self.tokens)


@dataclass(frozen=True)
class Point:
    """One evaluation during training."""

    seconds: float
    tokens: int
    success: float
    moment: int
    """The steps of Stage 2 before it; `REFERENCE`, `STAGE_ONE` or `DISTILLED` before the first."""

    @property
    def is_start(self) -> bool:
        """Whether it is the reference's, before the run has done anything."""
        return self.moment == REFERENCE


@dataclass(frozen=True)
class Measurement:
    """One run; numbers that it has not recorded are None."""

    name: str
    seed: int
    points: Sequence[Point]
    """Within the budget, in the order of training; the first is the reference at cost 0."""
    seconds: float
    tokens: int
    updates: int | None
    """Of the policy, of the whole run: those of every distillation and of Stage 2."""
    success: float
    """Of the trained policy, in the evaluation after training."""
    success_low: float
    success_high: float
    kl_per_sequence: float | None
    entropy: float | None
    """Of the last step's tokens, in nats."""
    pass_at_most: float | None
    """pass@k at the largest k, where the evaluation measured it (`evaluation.pass_k`)."""
    pass_k: int | None
    """That k."""
    peak_memory_bytes: int | None
    attempts: int | None = None
    """How often the run was started; what a kill loses is in no cost."""
    crowded_cores: bool | None = None
    """Whether other processes used the cores at a start, where that was measured."""

    @property
    def best(self) -> float:
        """The highest success of an evaluation within the budget."""
        return max(point.success for point in self.points)

    @property
    def success_within_budget(self) -> float:
        """Of the last evaluation that the budget allows."""
        return self.points[-1].success

    def first_at(self, success: float) -> Point | None:
        """The first evaluation with at least this success; None where there is none."""
        return next((point for point in self.points if point.success >= success), None)

    def mean_success(self, tokens: int) -> float:
        """The mean of success over the first `tokens` tokens: the area under the curve.

        Straight lines between evaluations, constant after the last one. Distillation costs no
        tokens: there the curve rises straight up.
        """
        within = [(point.tokens, point.success) for point in self.points if point.tokens < tokens]
        last_end, last = within[-1]
        after = next((point for point in self.points if point.tokens >= tokens), None)
        height = last
        if after is not None:
            share = (tokens - last_end) / (after.tokens - last_end)
            height += share * (after.success - last)
        ends, heights = zip(*within, (tokens, height), strict=True)
        return float(np.trapezoid(heights, ends) / tokens)


def measure(run: RunDirectory, *, name: str, seed: int, budget: BudgetConfig) -> Measurement:
    """Reads a finished run. Raises RunDirectoryError where rows of its steps are lost."""
    status = run.read_status()
    rows = _steps(run, early_stop=status.get("early_stop"))
    distilled = read_records(run.distillation, TypeAdapter(_Distilled))
    advice = f"Evaluate the run again: `ragen-apo evaluate {shlex.quote(str(run.path))}`"
    results = read_json(run.results, TypeAdapter(_Results), advice=advice)
    phases = {name: phase["seconds"] for name, phase in status.get("phases", {}).items()}
    references = _references(phases, stage_one_tokens(run), rows, distilled)
    success = results.baselines.reference.success_rate
    points, seconds, tokens = list[Point](), 0.0, 0
    for part in _parts(references, distilled, rows, reference_success=success):
        seconds += part.seconds
        tokens += part.tokens
        if part.success is not None and _within(budget, seconds, tokens):
            points.append(Point(seconds, tokens, part.success, part.moment))
    updated = [row for row in rows if row.kl_per_sequence is not None]
    updates = [row.num_updates for row in rows if row.num_updates is not None]
    distilling = sum(row.seconds is not None for row in distilled)
    low, high = results.success_ci95
    pass_k = max(results.pass_at_k, default=None)
    return Measurement(
        name=name,
        seed=seed,
        points=points,
        seconds=seconds,
        tokens=tokens,
        updates=distilling + sum(updates) if len(updates) == len(rows) else None,
        success=results.success_rate,
        success_low=low,
        success_high=high,
        kl_per_sequence=updated[-1].kl_per_sequence if updated else None,
        entropy=updated[-1].entropy if updated else None,
        pass_at_most=results.pass_at_k[pass_k] if pass_k is not None else None,
        pass_k=pass_k,
        peak_memory_bytes=status.get("peak_memory_bytes"),
        attempts=status.get("attempts"),
        crowded_cores=status.get("crowded_cores"),
    )


def _steps(run: RunDirectory, *, early_stop: Mapping[str, Any] | None) -> list[_Step]:
    """The rows of Stage 2: without one of them a run would look cheaper than it was."""
    rows = read_records(run.metrics, TypeAdapter(_Step))
    if early_stop:
        made = early_stop["step"]
    else:
        made = load_config(run.config, may_import=False).training.max_steps
    if [row.step for row in rows] != list(range(1, made + 1)):
        raise RunDirectoryError(
            f"{run.metrics} has {counted(len(rows), 'row')} and the run made "
            f"{counted(made, 'step')}: its costs and its curve are not known without the others. "
            f"Put an undamaged copy in its place, or remove {run.path} and give the same compare "
            "command again"
        )
    return rows


def _parts(
    references: Sequence[_Reference],
    distilled: Sequence[_Distilled],
    rows: Sequence[_Step],
    *,
    reference_success: float,
) -> Iterator[_Part]:
    """What a run did, in the order of training."""
    first, *later = references
    yield _Part(0.0, 0, reference_success, REFERENCE)
    # After Stage 1 the policy is still the reference.
    success = reference_success if first.tokens > 0 else None
    yield _Part(first.sampling_seconds, first.tokens, success, STAGE_ONE)
    yield _Part(first.distillation_seconds, 0)
    for update in distilled:
        if update.reference_version == 0:
            yield _Part(0.0, 0, update.eval_success_rate, DISTILLED)
    version = 0
    for row in rows:
        yield from (each.whole for each in later[version : row.reference_version])
        version = row.reference_version
        seconds = row.rollout_seconds + row.training_seconds
        yield _Part(seconds, row.num_generated_tokens, row.eval_success_rate, row.step)
    yield from (each.whole for each in later[version:])  # no step came after them


def _references(
    seconds: Mapping[str, float],
    tokens: list[int],
    rows: Sequence[_Step],
    distilled: Sequence[_Distilled],
) -> list[_Reference]:
    """What each reference of a run costs; `seconds` by phase, `tokens` of each Stage 1.

    run.json has the seconds of all later references in one number, and of all distillations in
    another. The references share them by their tokens, and by the seconds of their updates.
    """
    versions = {row.reference_version for row in (*rows, *distilled)}
    num_references = max(1, len(tokens), *(version + 1 for version in versions))
    tokens = [*tokens, *[0] * (num_references - len(tokens))]
    updating = [
        sum(update.seconds or 0.0 for update in distilled if update.reference_version == version)
        for version in range(num_references)
    ]
    refreshing = _shared(seconds.get("reference refresh", 0.0), by=tokens[1:])
    sampling = [seconds.get("stage 1", 0.0), *refreshing]
    distilling = _shared(seconds.get("distillation", 0.0), by=updating)
    return [_Reference(*costs) for costs in zip(sampling, distilling, tokens, strict=True)]


def _shared(seconds: float, *, by: Sequence[float]) -> list[float]:
    """The seconds in proportion to these numbers, or in equal parts if all of them are 0."""
    whole = sum(by)
    return [seconds * part / whole if whole > 0 else seconds / len(by) for part in by]


def stage_one_tokens(run: RunDirectory) -> list[int]:
    """Generated tokens of Stage 1 under each reference of a run, as they were when training ended.

    Of a run that noted none, those of the training tasks' trajectories in its value store.
    """
    noted = run.read_status().get("stage_one_tokens")
    if noted is not None or not run.values.exists():
        return noted or []
    with ValueStore(run.values, create=False) as store:
        return store.num_response_tokens(split="train")


def _within(budget: BudgetConfig, seconds: float, tokens: int) -> bool:
    return (budget.seconds is None or seconds <= budget.seconds) and (
        budget.tokens is None or tokens <= budget.tokens
    )
