"""Table and curves of a comparison: comparison.md, comparison.csv and two pictures."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ragen_apo.comparison.measure import Measurement
from ragen_apo.comparison.plan import ComparisonConfig
from ragen_apo.files import write_bytes_atomically, write_text_atomically
from ragen_apo.report.style import (
    ACCENT,
    FAINT,
    INK,
    LINE,
    MUTED,
    PAPER,
    RED,
    WARM,
    compact,
    duration,
    percent,
)

COLORS = (ACCENT, WARM, RED, "#3d5a98", "#7a4f9a", "#6b7a1f", "#a14d77", MUTED, FAINT)
DOTS_PER_INCH = 150


def write_comparison(
    measurements: Sequence[Measurement], out: Path, *, settings: ComparisonConfig
) -> list[Path]:
    """Writes the four files and returns their paths."""
    paths = [out / "comparison.md", out / "comparison.csv"]
    write_text_atomically(paths[0], markdown(measurements, settings=settings))
    write_text_atomically(paths[1], table(measurements))
    for axis in ("seconds", "tokens"):
        path = out / f"success_by_{axis}.png"
        write_bytes_atomically(path, curves(measurements, axis=axis))
        paths.append(path)
    return paths


def table(measurements: Sequence[Measurement]) -> str:
    """One CSV row a run."""
    names = [each.name for each in fields(Measurement) if each.name != "points"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*names, "success_within_budget"])
    for run in measurements:
        writer.writerow([*(getattr(run, name) for name in names), run.success_within_budget])
    return stream.getvalue()


def markdown(measurements: Sequence[Measurement], *, settings: ComparisonConfig) -> str:
    """One row an algorithm: means over the seeds, and over how many of them a target was met."""
    target = percent(settings.target, 0)
    lines = [
        "# Comparison",
        "",
        f"Means over seeds {', '.join(map(str, settings.seeds))}. Seconds and generated tokens"
        " include Stage 1, not the warm start and the evaluations. Budget of a run:"
        f" {duration(settings.budget.seconds)}, {compact(settings.budget.tokens)} tokens.",
        "",
        f"| run | seeds at {target} | time to {target} | tokens to {target} "
        "| success within budget | success after training (range) | KL | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in settings.runs:
        runs = [run for run in measurements if run.name == name]
        reached = [run for run in runs if run.seconds_to_target is not None]
        successes = [run.success for run in runs]
        kl = [run.kl_per_sequence for run in runs if run.kl_per_sequence is not None]
        memory = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
        cells = [
            name,
            f"{len(reached)} of {len(runs)}",
            duration(_mean([run.seconds_to_target for run in reached])),
            compact(_mean([run.tokens_to_target for run in reached])),
            percent(_mean([run.success_within_budget for run in runs])),
            f"{percent(_mean(successes))} ({percent(min(successes))} to {percent(max(successes))})",
            compact(_mean(kl)),
            f"{max(memory) / 2**20:,.0f} MiB" if memory else compact(None),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    pictures = [f"![success by {axis}](success_by_{axis}.png)" for axis in ("seconds", "tokens")]
    return "\n".join([*lines, "", *pictures]) + "\n"


def curves(measurements: Sequence[Measurement], *, axis: str) -> bytes:
    """Success of evaluations during training against seconds or tokens: a line a run, as PNG."""
    figure = Figure(figsize=(8.0, 4.6), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Success against {axis}, Stage 1 included", loc="left", color=INK, pad=9)
    axes.grid(visible=True, color=LINE, linewidth=0.8)
    axes.tick_params(colors=MUTED, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
    names = list(dict.fromkeys(run.name for run in measurements))
    for run in measurements:
        first = run is next(other for other in measurements if other.name == run.name)
        axes.plot(
            [getattr(point, axis) for point in run.points],
            [point.success for point in run.points],
            color=COLORS[names.index(run.name) % len(COLORS)],
            marker="o",
            markersize=3,
            linewidth=1.6,
            label=run.name if first else None,
        )
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("generated tokens" if axis == "tokens" else "seconds", color=MUTED)
    axes.legend(frameon=False, labelcolor=MUTED)
    buffer = io.BytesIO()
    figure.set_dpi(DOTS_PER_INCH)
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": "ragen-apo"})
    return buffer.getvalue()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
