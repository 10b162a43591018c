"""The pictures of a report, as PNG bytes.

Consumes `RunData`; draws with matplotlib's object interface and the Agg backend, so nothing depends
on a display or on global state. Labels from a run are never read as mathematical markup. Points
that are absent or not finite are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ragen_apo.report.drawing import legend_below, png_bytes, style_axes
from ragen_apo.report.load import RunData, finite, mapping, series
from ragen_apo.report.style import (
    ACCENT,
    ACCENT_SOFT,
    FAINT,
    INK,
    MUTED,
    PAPER,
    RED,
    WARM,
    compact,
    percent,
    printable,
    words,
)
from ragen_apo.report.tables import category_rows, failure_rows, interval_bounds, num_failures

MAX_CATEGORIES = 30
"""Rows of the category picture, the lowest if there are more; the page's table has all of them."""


@dataclass(frozen=True)
class Panel:
    """One curve over steps: which metric, and how it is drawn."""

    title: str
    key: str
    evaluation_key: str | None = None
    share: bool = False


TRAINING_PANELS = (
    Panel("Success rate", "success_rate", evaluation_key="eval_success_rate", share=True),
    Panel("Return per episode", "return_mean", evaluation_key="eval_avg_reward"),
    Panel("KL to the reference, per episode", "kl_per_sequence"),
    Panel("Variance of the residual", "residual_variance"),
)
WARM_START_PANELS = {
    "copy": Panel("Warm start: copy accuracy", "accuracy", share=True),
    "demonstrations": Panel("Warm start: supervised loss", "loss"),
}


def learning_curves(run: RunData) -> bytes:
    """Training success, return, KL and residual per step, then the warm start's two curves."""
    panels = [(panel, run.metrics) for panel in TRAINING_PANELS]
    for phase, panel in WARM_START_PANELS.items():
        rows = [row for row in run.warm_start if row.get("phase") == phase]
        if rows:
            panels.append((panel, rows))
    columns = 2 if len(panels) <= 4 else 3
    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(4.0 * columns, 6.2), facecolor=PAPER, layout=spacing)
    grid = figure.subplots(2, columns, squeeze=False)
    for axes, (panel, rows) in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, rows)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    _add_reference_line(grid.flat[0], run)
    legend_below(figure, grid.flat[0], num_columns=4)
    return png_bytes(figure)


def success_curve(run: RunData, *, size: tuple[float, float]) -> bytes:
    """Only the success rate over training, with its legend: the picture of a slide."""
    figure = Figure(figsize=size, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    _draw_panel(axes, TRAINING_PANELS[0], run.metrics)
    _add_reference_line(axes, run)
    legend_below(figure, axes, num_columns=4)
    return png_bytes(figure)


def by_category(
    run: RunData, *, size: tuple[float, float] | None = None, limit: int = MAX_CATEGORIES
) -> bytes:
    """The success rate of each category with its Wilson interval and its number of episodes."""
    all_rows = category_rows(run)
    rows = all_rows[-limit:]
    figure = Figure(
        figsize=size or (8.0, 1.1 + 0.38 * max(1, len(rows))),
        facecolor=PAPER,
        layout="constrained",
    )
    axes = figure.subplots()
    shortened = len(all_rows) > limit
    which = f"Success, lowest {limit} of {len(all_rows)} categories"
    style_axes(axes, which if shortened else "Success by category, with 95% intervals")
    axes.grid(visible=False, axis="y")
    if not rows:
        return png_bytes(_say(figure, axes, "No categories were evaluated."))
    for place, (_, summary) in enumerate(rows):
        rate, bounds = finite(summary.get("success_rate")), interval_bounds(summary)
        axes.barh(place, rate or 0.0, height=0.62, color=ACCENT_SOFT)
        if bounds is not None:
            axes.plot(bounds, (place, place), color=ACCENT, linewidth=2, solid_capstyle="butt")
        if rate is not None:
            axes.plot(rate, place, marker="o", markersize=6, color=ACCENT, clip_on=False)
        for points, text, color in (
            (54, percent(rate), INK),
            (108, f"n = {compact(summary.get('episodes'))}", MUTED),
        ):
            axes.annotate(
                text, (1.0, place), xytext=(points, 0), textcoords="offset points",
                va="center", ha="right", fontsize=9.5, color=color,
            )  # fmt: skip
    _name_rows(axes, [name for name, _ in rows])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return png_bytes(figure)


def failures(run: RunData, *, size: tuple[float, float] | None = None) -> bytes:
    """How many episodes failed by each pattern."""
    rows = failure_rows(run)
    figure = Figure(figsize=size or (8.0, 3.1), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    failed = num_failures(run)
    style_axes(axes, f"Failed episodes by pattern: {failed} of {run.num_episodes}")
    axes.grid(visible=False, axis="y")
    if not rows:
        return png_bytes(_say(figure, axes, "No failures were recorded."))
    counts = [finite(summary.get("count")) or 0.0 for _, summary in rows]
    longest = max([*counts, 1.0])
    for place, (count, (_, summary)) in enumerate(zip(counts, rows, strict=True)):
        axes.barh(place, count, height=0.62, color=RED)
        label = f"{count:.0f}   ({percent(summary.get('share'))})" if count else "0"
        x = count + 0.015 * longest
        axes.text(x, place, label, va="center", fontsize=9.5, color=INK if count else FAINT)
    _name_rows(axes, [words(name) for name, _ in rows])
    axes.set_xlim(0, longest * 1.18)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("episodes", color=MUTED, fontsize=9.5)
    return png_bytes(figure)


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    """The raw values faintly, their running mean over them, evaluations as points."""
    style_axes(axes, panel.title)
    axes.set_xlabel("step", color=MUTED, fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    steps, values = series(rows, panel.key)
    if panel.share:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if not steps:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set(xticks=[], yticks=[], xlabel="")
    elif len(steps) == 1:
        axes.plot(steps, values, "o", markersize=5, color=ACCENT, label="training")
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    else:
        axes.plot(steps, values, color=ACCENT, alpha=0.25, linewidth=1.2, label="each step")
        smooth = running_mean(values, window=max(1, len(values) // 12))
        axes.plot(steps, smooth, color=ACCENT, linewidth=2.0, label="running mean")
    if panel.evaluation_key is not None:
        eval_steps, eval_values = series(rows, panel.evaluation_key)
        if eval_steps:
            axes.plot(
                eval_steps, eval_values, "o--", color=WARM, markersize=5, linewidth=1.0,
                label="evaluation",
            )  # fmt: skip


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """The mean of up to `window` values on either side of each value and of itself."""
    return [
        fmean(values[max(0, place - window) : place + window + 1]) for place in range(len(values))
    ]


def _add_reference_line(axes: Axes, run: RunData) -> None:
    baselines = mapping(run.results.get("baselines"))
    rate = finite(mapping(baselines.get("reference")).get("success_rate"))
    if rate is not None:
        axes.axhline(rate, color=MUTED, linewidth=1.2, linestyle=":", label="reference")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names for horizontal bars, the first on top."""
    labels = [printable(name, 28) for name in names]
    axes.set_yticks(range(len(names)), labels, parse_math=False, color=INK, fontsize=10)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _say(figure: Figure, axes: Axes, sentence: str) -> Figure:
    axes.set_axis_off()
    axes.text(0.0, 0.5, sentence, transform=axes.transAxes, color=MUTED, fontsize=11)
    return figure
