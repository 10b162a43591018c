"""The pictures of a report; `FIGURES` has those that become a file of the report's folder.

Consumes `RunData`; draws with matplotlib's object interface and the Agg backend, so nothing depends
on a display or on global state. Labels from a run are never read as mathematical markup. Points
that are absent or not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ragen_apo.report.drawing import legend_below, png_bytes, style_axes
from ragen_apo.report.load import RunData, finite, mapping, series
from ragen_apo.report.panels import TRAINING_PANELS, Panel, Rows, first_distillation, panels
from ragen_apo.report.style import (
    ACCENT,
    ACCENT_SOFT,
    FAINT,
    INK,
    MUTED,
    PAPER,
    RED,
    WARM,
    one_line,
    percent,
)
from ragen_apo.report.tables import category_rows, failure_rows, num_failures

MAX_CATEGORIES = 30
"""Rows of the category picture, the lowest if there are more; the page's table has all of them."""
PHONE_WIDTH = 5.4
"""Inches: text of 9.5 points is still read where a picture this wide is shown on 420 pixels."""
CURVE_SIZE = (3.9, 3.0)
MIN_POINTS_TO_SMOOTH = 10


def learning_curves(run: RunData) -> Figure | None:
    """All curves in one picture, two in a row; None for a run without rows of Stage 2."""
    if not run.metrics:
        return None
    curves = panels(run)
    num_rows = math.ceil(len(curves) / 2)
    spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    size = (PHONE_WIDTH, 2.1 * num_rows + 0.5)
    figure = Figure(figsize=size, facecolor=PAPER, layout=spacing)
    grid = figure.subplots(num_rows, 2, squeeze=False)
    for axes, (panel, rows) in zip(grid.flat, curves, strict=False):
        _draw_panel(axes, panel, rows, run)
    for axes in grid.flat[len(curves) :]:
        axes.set_axis_off()
    legend_below(figure, grid.flat[0], num_columns=4)
    return figure


def curve_pictures(run: RunData) -> list[tuple[str, bytes]]:
    """Each curve by its title as a picture of its own, which a page can set side by side or below
    each other.
    """
    return [(panel.title, _curve(run, panel, rows, size=CURVE_SIZE)) for panel, rows in panels(run)]


def success_curve(run: RunData, *, size: tuple[float, float]) -> bytes:
    """Only the success rate over training, with its legend: the picture of a slide."""
    return _curve(run, TRAINING_PANELS[0], run.metrics, size=size)


def _curve(run: RunData, panel: Panel, rows: Rows, *, size: tuple[float, float]) -> bytes:
    figure = Figure(figsize=size, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    _draw_panel(axes, panel, rows, run)
    legend_below(figure, axes, num_columns=4 if size[0] >= PHONE_WIDTH else 2)
    return png_bytes(figure)


def by_category(
    run: RunData, *, size: tuple[float, float] | None = None, limit: int = MAX_CATEGORIES
) -> Figure:
    """The success rate of each category with its Wilson interval and its number of episodes."""
    all_rows = category_rows(run)
    rows = all_rows[-limit:]
    title = "Success by category, with 95% intervals"
    if len(all_rows) > limit:
        title = f"Success, lowest {limit} of {len(all_rows)} categories"
    figure, axes = _rows_figure(title, size or (PHONE_WIDTH, 1.1 + 0.38 * max(1, len(rows))))
    if not rows:
        return _say(figure, axes, "No categories were evaluated.")
    for row, category in enumerate(rows):
        rate, bounds = category.success_rate, category.bounds
        axes.barh(row, rate or 0.0, height=0.62, color=ACCENT_SOFT)
        if bounds is not None:
            axes.plot(bounds, (row, row), color=ACCENT, linewidth=2, solid_capstyle="butt")
        if rate is not None:
            axes.plot(rate, row, marker="o", markersize=6, color=ACCENT, clip_on=False)
        for points, text, color in (
            (54, percent(rate), INK),
            (108, f"n = {category.cells['episodes']}", MUTED),
        ):
            axes.annotate(
                text, (1.0, row), xytext=(points, 0), textcoords="offset points",
                va="center", ha="right", fontsize=9.5, color=color,
            )  # fmt: skip
    _name_rows(axes, [category.label for category in rows])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def failures(run: RunData, *, size: tuple[float, float] | None = None) -> Figure:
    """The number of failed episodes of each pattern."""
    rows = failure_rows(run)
    title = f"Failed episodes by pattern: {num_failures(run)} of {run.num_episodes}"
    figure, axes = _rows_figure(title, size or (PHONE_WIDTH, 0.9 + 0.38 * max(1, len(rows))))
    if not rows:
        return _say(figure, axes, "No failures were recorded.")
    longest = max(rows[0].count, 1)
    for row, failure in enumerate(rows):
        count = failure.count
        axes.barh(row, count, height=0.62, color=RED)
        label = f"{count}   ({percent(failure.share)})" if count else "0"
        x = count + 0.015 * longest
        axes.text(x, row, label, va="center", fontsize=9.5, color=INK if count else FAINT)
    _name_rows(axes, [failure.words.name for failure in rows])
    axes.set_xlim(0, longest * 1.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("episodes", color=MUTED, fontsize=9.5)
    return figure


def _rows_figure(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure for horizontal bars, whose names leave the axes little room: the title is above."""
    figure = Figure(figsize=size, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11, fontweight="bold")
    style_axes(axes, "")
    axes.grid(visible=False, axis="y")
    return figure, axes


def _draw_panel(axes: Axes, panel: Panel, rows: Rows, run: RunData) -> None:
    """The values, evaluations as points; many values faintly, with their running mean over them.

    What was distilled is the evaluation of step 0.
    """
    style_axes(axes, panel.title)
    axes.set_xlabel("step", color=MUTED, fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
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
    elif (smooth := smoothed(values)) is None:
        axes.plot(
            steps, values, color=ACCENT, linewidth=2.0, marker="o", markersize=4, label="each step"
        )
    else:
        axes.plot(steps, values, color=ACCENT, alpha=0.25, linewidth=1.2, label="each step")
        axes.plot(steps, smooth, color=ACCENT, linewidth=2.0, label="running mean")
    if panel.evaluation_key is not None:
        distilled = [{**row, "step": 0} for row in first_distillation(run)]
        evaluations = series([*distilled, *rows], panel.evaluation_key)
        if evaluations[0]:
            style = {"color": WARM, "markersize": 5, "linewidth": 1.0}
            axes.plot(*evaluations, "o--", label="evaluation", clip_on=False, **style)
    if panel.key == "success_rate" and _is_evaluated_as_while_training(run):
        baselines = mapping(run.results.get("baselines"))
        rate = finite(mapping(baselines.get("reference")).get("success_rate"))
        if rate is not None:
            axes.axhline(rate, color=MUTED, linewidth=1.2, linestyle=":", label="reference")


def _is_evaluated_as_while_training(run: RunData) -> bool:
    """Whether the results are of the split and temperature of the evaluations during training."""
    after = {**mapping(run.config.get("evaluation")), **mapping(run.results.get("evaluation"))}
    split = run.option("training", "eval_split") or run.option("evaluation", "split")
    temperature = run.option("evaluation", "temperature")
    return (after.get("split"), after.get("temperature")) == (split, temperature)


def smoothed(values: Sequence[float]) -> list[float] | None:
    """The running mean, or None for fewer than `MIN_POINTS_TO_SMOOTH` values."""
    if len(values) < MIN_POINTS_TO_SMOOTH:
        return None
    return running_mean(values, window=max(1, len(values) // 12))


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """The mean of up to `window` values on either side of each value and of itself."""
    return [
        fmean(values[max(0, index - window) : index + window + 1]) for index in range(len(values))
    ]


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names for horizontal bars, the first on top."""
    labels = [one_line(name, 28) for name in names]
    axes.set_yticks(range(len(names)), labels, parse_math=False, color=INK, fontsize=10)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _say(figure: Figure, axes: Axes, sentence: str) -> Figure:
    axes.set_axis_off()
    axes.text(0.0, 0.5, sentence, transform=axes.transAxes, color=MUTED, fontsize=11)
    return figure


@dataclass(frozen=True)
class ReportFigure:
    """A picture that is a file of the report's folder."""

    draw: Callable[[RunData], Figure | None]
    """None where the run has nothing to draw: there is no file then."""
    title: str | None = None
    """What the page says it shows; None for what the page shows in its own way."""


FIGURES: dict[str, ReportFigure] = {
    "learning_curves": ReportFigure(learning_curves),
    "by_category": ReportFigure(by_category),
    "failures": ReportFigure(failures),
}
"""By the name of the file; docs/adding_a_figure.md adds one."""
