"""The table of a comparison: a row of text for each algorithm, and of CSV for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from statistics import fmean

from ragen_apo.comparison.measure import Measurement, Point
from ragen_apo.comparison.plan import ComparisonConfig
from ragen_apo.files import csv_text
from ragen_apo.report.style import ABSENT, compact, duration, interval, percent

AT_START = "at the start"
"""Stands for the cost of what the reference reached already."""
_COSTS = ("time", "tokens")


def table(measurements: Sequence[Measurement], *, settings: ComparisonConfig) -> str:
    """One CSV row a run.

    The cost of a target is empty where no evaluation reached it, and where the reference did: then
    `success_at_start` is no smaller than the target.
    """
    names = [each.name for each in fields(Measurement) if each.name != "points"]
    common, shortest = in_common(measurements)
    goals = {_goal(target): target for target in settings.target} | {"common": common}
    rows: list[dict[str, object]] = []
    for run in measurements:
        row = {name: getattr(run, name) for name in names}
        row["success_at_start"] = run.points[0].success
        row["success_within_budget"] = run.success_within_budget
        if not settings.share_values:
            row["mean_success"] = run.mean_success(shortest)
        for goal, success in goals.items():
            first = run.first_at(success)
            paid = None if first is None or first.is_start else first
            for unit in ("seconds", "tokens"):
                row[f"{unit}_to_{goal}"] = getattr(paid, unit, None)
        rows.append(row)
    return csv_text(rows)


def rows_of_algorithms(
    measurements: Sequence[Measurement], *, settings: ComparisonConfig
) -> list[list[str]]:
    """The header, then one row an algorithm, as text: means over the seeds, with their ranges."""
    common, shortest = in_common(measurements)
    targets = [_goal(target) for target in settings.target]
    pass_k = max((run.pass_k for run in measurements if run.pass_k is not None), default=None)
    # What all runs have before they begin says nothing.
    shared = [common] if is_reached_later(measurements, common) else []
    goals = [*map(percent, shared), *targets]
    header = ["run", *(f"{what} to {goal}" for goal in goals for what in _COSTS)]
    # A run that took V* from another's store has not paid for it.
    has_mean = not settings.share_values
    header += ["mean success"] if has_mean else []
    header += ["success within the budget"] if settings.budget.is_set else []
    header += ["success after training", "95% interval of a run"]
    header += [f"pass@{pass_k}"] if pass_k is not None else []
    header += ["updates", "KL", "entropy", "peak memory"]
    rows = [header]
    for name in settings.runs:
        runs = [run for run in measurements if run.name == name]
        measured = ("updates", "kl_per_sequence", "entropy", "pass_at_most", "peak_memory_bytes")
        updates, kl, entropy, passes, memory = (
            [value for run in runs if (value := getattr(run, field)) is not None]
            for field in measured
        )
        cells = [name]
        for goal in (*shared, *settings.target):
            cells += _costs([run.first_at(goal) for run in runs])
        if has_mean:
            cells.append(_mean([run.mean_success(shortest) for run in runs], percent))
        if settings.budget.is_set:
            cells.append(_mean([run.success_within_budget for run in runs], percent))
        cells.append(_mean([run.success for run in runs], percent))
        cells.append(interval(mean_bounds(runs)))
        if pass_k is not None:
            cells.append(_mean(passes, percent))
        cells += [
            _mean(updates, _whole),
            _mean(kl, compact),
            _mean(entropy, "{:.3f}".format),
            f"{max(memory) / 2**20:,.0f} MiB" if memory else ABSENT,
        ]
        rows.append(cells)
    return rows


def rows_of_runs(
    measurements: Sequence[Measurement], *, settings: ComparisonConfig
) -> list[dict[str, str]]:
    """One row a run, as text by column."""
    rows: list[dict[str, str]] = []
    for run in measurements:
        row = {"run": run.name, "seed": str(run.seed)}
        for goal in settings.target:
            row[f"time to {_goal(goal)}"] = _costs([run.first_at(goal)])[0]
        if settings.budget.is_set:
            row["success within the budget"] = percent(run.success_within_budget)
        row["success after training"] = percent(run.success)
        row["95% interval"] = interval((run.success_low, run.success_high))
        row["time"], row["tokens"] = duration(run.seconds), compact(run.tokens)
        rows.append(row)
    return rows


def mean_bounds(runs: Sequence[Measurement]) -> tuple[float, float]:
    """Of the 95% interval, over the seeds."""
    return fmean(run.success_low for run in runs), fmean(run.success_high for run in runs)


def in_common(measurements: Sequence[Measurement]) -> tuple[float, int]:
    """The success that every run reaches, and the tokens that every run has used."""
    best = min(run.best for run in measurements)
    used = [run.points[-1].tokens for run in measurements]
    # A run whose first evaluation lies outside of the budget has no curve to compare.
    return best, min((tokens for tokens in used if tokens > 0), default=1)


def is_reached_later(measurements: Sequence[Measurement], success: float) -> bool:
    """Whether a run has to train for what all of them reach."""
    firsts = [run.first_at(success) for run in measurements]
    return any(first is not None and not first.is_start for first in firsts)


def _goal(target: float) -> str:
    """A target with the digits that it has: `98%`, `97.5%`."""
    return f"{100 * target:.6g}%"


def _costs(points: Sequence[Point | None]) -> tuple[str, str]:
    """Seconds and tokens of the first evaluations with a success, one a seed; None: never.

    A mean over a part of the seeds would make a run faster by every seed that fails. So there is
    one only if all of them paid for the success.
    """
    reached = [point for point in points if point is not None]
    paid = [point for point in reached if not point.is_start]
    num_started = len(reached) - len(paid)

    def cell(costs: Sequence[float], form: Callable[[float], str]) -> str:
        if len(costs) == len(points):
            return _mean(costs, form)
        if num_started == len(points):
            return AT_START
        if not costs:
            return f"{num_started} of {len(points)} {AT_START}" if num_started else ABSENT
        started = f", {num_started} {AT_START}" if num_started else ""
        return f"{len(costs)} of {len(points)} ({_span(costs, form)}){started}"

    return (
        cell([point.seconds for point in paid], duration),
        cell([point.tokens for point in paid], _whole),
    )


def _mean(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The mean, with the range if there are several: `20 s (8.0 to 31 s)`."""
    if not values:
        return ABSENT
    spread = f" ({_span(values, form)})" if len(values) > 1 else ""
    return form(fmean(values)) + spread


def _span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """From the smallest to the largest: `16 to 19 s`; one value alone."""
    low, high = form(min(values)), form(max(values))
    if len(values) == 1:
        return low
    both_in_seconds = low.endswith(" s") and high.endswith(" s") and "min" not in high
    return f"{low.removesuffix(' s') if both_in_seconds else low} to {high}"


def _whole(number: float) -> str:
    return compact(round(number))
