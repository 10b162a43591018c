"""Two slides about a run: the system with this run's numbers, and the results.

Consumes `RunData`; produces the bytes of a `.pptx` file. The diagram is made of shapes, so that it
can be edited; only the plots are pictures.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ragen_apo.report import plots
from ragen_apo.report.algorithm import algorithm_of, rollouts_per_task, settings_of
from ragen_apo.report.api_model import api_model
from ragen_apo.report.drawing import png_bytes
from ragen_apo.report.findings import evaluated, headline, key_sentences, total_seconds
from ragen_apo.report.load import RunData, finite, mapping, series
from ragen_apo.report.shapes import (
    HEIGHT,
    MARGIN,
    WIDTH,
    Box,
    Line,
    add_arrow,
    add_box,
    add_picture,
    add_table,
    add_text,
    fitting,
    presentation,
    set_title,
)
from ragen_apo.report.style import (
    ACCENT,
    ACCENT_SOFT,
    GROUND,
    INK,
    LINE,
    MUTED,
    compact,
    counted,
    duration,
    interval,
    one_line,
    percent,
)
from ragen_apo.report.tables import method_rows

MAX_TABLE_ROWS = 6
MAX_SLIDE_CATEGORIES = 9
BASELINE_STATION = 4
"""The station with the baseline of a return, by which algorithms differ most."""


@dataclass(frozen=True)
class Ablation:
    """The two stations of A*-PO without V*."""

    station: str
    subtracted: str
    advantage: str


ABLATIONS = {
    "mean": Ablation(
        "Mean  (Stage 1)",
        "The reference’s mean return\n{samples}",
        "R − the reference’s mean return (an ablation: no V*)",
    ),
    "zero": Ablation("No baseline", "Nothing is subtracted from R", "R alone (an ablation: no V*)"),
}
"""By `values.baseline`."""


def slides(run: RunData) -> bytes:
    """The presentation: system overview, results; of a model behind an API the results alone."""
    drawn = [_overview, _results] if api_model(run) is None else [_results]
    return presentation(f"ragen-apo: {run.name}", [partial(draw, run=run) for draw in drawn])


def _overview(slide: Any, run: RunData) -> None:
    """The pipeline as a snake of eight boxes, and below it the numbers of this run."""
    _heading(slide, run, algorithm_of(run).sentence)
    width, height, gap = 2.72, 1.45, 0.42
    tops = (1.65, 3.85)
    columns = [MARGIN + column * (width + gap) for column in range(4)]
    corners = [(x, tops[0]) for x in columns] + [(x, tops[1]) for x in reversed(columns)]
    boxes = [Box(x, y, width, height) for x, y in corners]
    for number, (box, (name, text)) in enumerate(zip(boxes, pipeline(run), strict=True), 1):
        is_baseline = number == BASELINE_STATION
        lines = [Line(f"{number}  {name}", size=16, bold=True, space_after=3)]
        lines += [Line(part, size=14, color=MUTED) for part in text.split("\n")]
        fill, border = (ACCENT_SOFT, ACCENT) if is_baseline else (GROUND, LINE)
        add_box(slide, box, lines, fill=fill, border=border)
    for start, end in itertools.pairwise(boxes):
        add_arrow(slide, _path(start, end))
    rollout, loss = boxes[1], boxes[5]
    middle = (rollout.bottom + loss.top) / 2
    x_loss, x_rollout = loss.left + loss.width / 2, rollout.left + rollout.width / 2
    loop = [(x_loss, loss.top), (x_loss, middle), (x_rollout, middle), (x_rollout, rollout.bottom)]
    add_arrow(slide, loop, color=ACCENT, width=2.25)
    label = Box(x_rollout + 0.15, middle - 0.3, x_loss - x_rollout, 0.25)
    add_text(slide, label, [Line("one step, then the next rollout", size=13, color=ACCENT)])
    _tiles(slide, run, Box(MARGIN, 5.95, WIDTH - 2 * MARGIN, 1.1))


def _path(start: Box, end: Box) -> list[tuple[float, float]]:
    """From the edge of one box to the facing edge of the next, in a row or from row to row."""
    middle_start, middle_end = start.top + start.height / 2, end.top + end.height / 2
    if start.left < end.left:
        return [(start.right, middle_start), (end.left, middle_end)]
    if start.left > end.left:
        return [(start.left, middle_start), (end.right, middle_end)]
    x = start.left + start.width / 2
    return [(x, start.bottom), (x, end.top)]


def pipeline(run: RunData) -> list[tuple[str, str]]:
    """The eight stations with their text; numbers of this run where they are known."""
    traits, training = algorithm_of(run), mapping(run.config.get("training"))
    environment = run.option("environment", "name") or "the environment"
    num_tasks, steps = finite(run.value_report.get("num_tasks")), len(run.metrics)
    ablation = _ablation(run)
    has_v_star = traits.has_values and ablation is None
    known = f"; {compact(num_tasks)} with known V*" if has_v_star and num_tasks else ""
    a_step, repeats = counted(training.get("tasks_per_step"), "task"), rollouts_per_task(run)
    often = "once each" if repeats == 1 else f"{compact(repeats)} times each"
    best_of = finite(training.get("best_of")) or 1
    if best_of > 1:
        often += f", the best of {compact(best_of)} episodes"
    resume = f"{counted(steps, 'step')}; holds all that an exact resume needs"
    success = percent(run.results.get("success_rate"))
    return [
        ("Task", f"A goal in {environment}, in words{known}"),
        ("Rollout", f"The policy plays {a_step} a step, {often}"),
        ("Trajectory", "Turns of observation, response and reward, with the sampled tokens"),
        _baseline(run),
        ("Advantage", traits.advantage if ablation is None else ablation.advantage),
        ("Loss", settings.formula() if (settings := settings_of(run)) else ""),
        ("Checkpoint", resume if steps else _without_rows(run)),
        ("Evaluation", f"{evaluated(run)}: {success} success"),
    ]


def _without_rows(run: RunData) -> str:
    if run.trained:
        return "Its steps are not known: metrics.jsonl is lost"
    return "Distilled only, no step" if run.distilled else "Not trained in this run"


def _baseline(run: RunData) -> tuple[str, str]:
    """Name and text of the station that a return is compared with."""
    traits, values = algorithm_of(run), mapping(run.config.get("values"))
    if (ablation := _ablation(run)) is not None:
        return ablation.station, ablation.subtracted.format(samples=_samples(values))
    if traits.has_values:
        beta1 = finite(values.get("beta1"))
        beta = "" if beta1 is None else f"\nβ₁ = {compact(beta1)}"
        by_regression = values.get("estimator") == "regression"
        value = "β₁ log f, fitted to exp(R/β₁)" if by_regression else "β₁ log mean exp(R/β₁)"
        return "V*  (Stage 1)", f"{value}\n{_samples(values)}{beta}"
    if traits.has_critic:
        return "Critic", "A copy of the policy learns to predict what is still to be earned"
    if traits.compares_groups:
        return "Group", f"The {compact(rollouts_per_task(run))} rollouts of a task are compared"
    return "Batch", "The episodes of a step are compared with each other"


def _ablation(run: RunData) -> Ablation | None:
    """What takes the place of V*, if something does."""
    chosen = str(run.option("values", "baseline"))
    return ABLATIONS.get(chosen) if algorithm_of(run).has_values else None


def _samples(values: Mapping[str, Any]) -> str:
    """The number of reference episodes that a task has in Stage 1."""
    if values.get("store"):
        return "reference episodes of another run"
    samples, most = finite(values.get("num_samples")), finite(values.get("max_samples"))
    if values.get("adaptive") and samples is not None and most is not None:
        return f"{compact(samples)} to {compact(most)} reference episodes a task"
    return f"{counted(samples, 'reference episode')} a task"


def _tiles(slide: Any, run: RunData, area: Box) -> None:
    """Up to five numbers side by side."""
    reference = mapping(mapping(run.results.get("baselines")).get("reference"))
    _, trained_episodes = series(run.metrics, "num_episodes_total")
    seconds, bounds = total_seconds(run), interval(run.results.get("success_ci95"))
    tiles = [
        (percent(run.results.get("success_rate")), f"success (95%: {bounds})"),
        (percent(reference.get("success_rate")), "success of the reference") if reference else None,
        (f"{len(run.metrics):,}", "training steps") if run.metrics else None,
        (compact(trained_episodes[-1]), "training episodes") if trained_episodes else None,
        (duration(seconds), "for the whole run") if seconds is not None else None,
    ]
    shown = [tile for tile in tiles if tile is not None]
    width = area.width / len(shown)
    for index, (number, label) in enumerate(shown):
        box = Box(area.left + index * width, area.top, width - 0.2, area.height)
        color = ACCENT if index == 0 else INK
        lines = [Line(number, size=24, bold=True, color=color), Line(label, size=13, color=MUTED)]
        add_text(slide, box, lines)


def _results(slide: Any, run: RunData) -> None:
    """Table and sentences on the left, pictures on the right."""
    _heading(slide, run, headline(run))
    left, right = Box(MARGIN, 1.6, 6.0, 0), Box(7.0, 1.5, WIDTH - MARGIN - 7.0, 2.6)
    rows = [["Method", "Success", "95% interval", "Reward", "Steps"]]
    for row in method_rows(run)[: MAX_TABLE_ROWS - 1]:
        _, *cells = row.cells.values()  # without the number of episodes
        rows.append([row.label, *cells])
    table = Box(left.left, left.top, left.width, 0.4 * len(rows))
    add_table(slide, table, rows, widths=(1.8, 0.95, 1.5, 0.95, 0.8), strong_row=1)
    sentences = [Line(text, size=13, space_after=7) for text in key_sentences(run)]
    area = Box(left.left, table.bottom + 0.4, left.width, HEIGHT - 0.5 - table.bottom - 0.4)
    add_text(slide, area, fitting(sentences, area))
    if run.metrics:
        picture = plots.success_curve(run, size=(right.width, right.height))
        description = "Success rate over the training steps"
    else:
        picture = png_bytes(plots.failures(run, size=(right.width, right.height)))
        description = "Failed episodes by pattern"
    add_picture(slide, io.BytesIO(picture), right, description=description)
    below = Box(right.left, right.bottom + 0.15, right.width, HEIGHT - 0.35 - right.bottom - 0.15)
    categories = plots.by_category(
        run, size=(below.width, below.height), limit=MAX_SLIDE_CATEGORIES
    )
    add_picture(
        slide, io.BytesIO(png_bytes(categories)), below, description="Success rate by category"
    )


def _heading(slide: Any, run: RunData, title: str) -> None:
    # One line also in the wide font that viewers without ours take.
    size = 26 if len(title) <= 50 else 21 if len(title) <= 64 else 17
    set_title(slide, Box(MARGIN, 0.42, WIDTH - 2 * MARGIN, 0.55), Line(title, size=size, bold=True))
    asked = api_model(run)
    about = [f"{'run' if asked is None else 'evaluation'} {one_line(run.name, 60)}"]
    if run.results.get("split"):  # the policy's path may have been that of another machine
        about.append(f"split {one_line(run.results['split'], 40)}")
    if asked is not None:
        about.append(f"API of {asked.server}")
    box = Box(MARGIN, 0.98, WIDTH - 2 * MARGIN, 0.35)
    add_text(slide, box, [Line("   ·   ".join(about), size=13, color=MUTED)])
