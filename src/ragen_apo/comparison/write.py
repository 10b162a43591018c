"""What people get of a comparison: its table in three formats, two pictures, page and slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from ragen_apo.comparison.measure import Measurement, Point
from ragen_apo.comparison.plan import ComparisonConfig
from ragen_apo.comparison.slides import comparison_slides
from ragen_apo.files import csv_text, write_bytes_atomically
from ragen_apo.plural import counted
from ragen_apo.report.drawing import legend_below, png_bytes, style_axes
from ragen_apo.report.html import data_uri, render
from ragen_apo.report.latex import latex_table
from ragen_apo.report.pdf import pdf_of_page
from ragen_apo.report.style import (
    ABSENT,
    ACCENT,
    FAINT,
    MUTED,
    PAPER,
    RED,
    WARM,
    compact,
    duration,
    interval,
    percent,
)

COLORS = (ACCENT, WARM, RED, "#3d5a98", "#7a4f9a", "#6b7a1f", "#a14d77", MUTED, FAINT)
_COSTS = ("time", "tokens")
AXES = ("seconds", "tokens")
_LAPS = (("-", "o"), ("--", "s"), (":", "^"))
"""Line style and marker of the runs that get their colour the first, second and third time."""


def write_comparison(
    measurements: Sequence[Measurement],
    out: Path,
    *,
    settings: ComparisonConfig,
    with_pdf: bool = False,
) -> list[Path]:
    """Writes the files and returns their paths.

    Raises ConfigError if a PDF is asked for and cannot be made.
    """
    header, *rows = rows_of_algorithms(measurements, settings=settings)
    pictures = {axis: curves(measurements, axis=axis) for axis in AXES}
    about = explanation(measurements, settings=settings)
    presentation = comparison_slides(header, rows, pictures, about=about)
    page = render(
        "comparison.html",
        header=header,
        rows=rows,
        pictures=[(f"Success against {axis}", data_uri(png)) for axis, png in pictures.items()],
        about=about,
        runs=_rows_of_runs(measurements, settings=settings),
    )
    contents: dict[str, bytes] = {
        "comparison.md": markdown(header, rows, about=about).encode(),
        "comparison.csv": table(measurements, settings=settings).encode(),
        "comparison.tex": latex_table(header, rows).encode(),
        **{f"success_by_{axis}.png": picture for axis, picture in pictures.items()},
        "comparison.pptx": presentation,
        "comparison.html": page.encode(),
        **({"comparison.pdf": pdf_of_page(page)} if with_pdf else {}),
    }
    for name, content in contents.items():
        write_bytes_atomically(out / name, content)
    return [out / name for name in contents]


def table(measurements: Sequence[Measurement], *, settings: ComparisonConfig) -> str:
    """One CSV row a run."""
    names = [each.name for each in fields(Measurement) if each.name != "points"]
    common, shortest = _common(measurements)
    goals = {_goal(target): target for target in settings.target} | {"common": common}
    rows: list[dict[str, object]] = []
    for run in measurements:
        row = {name: getattr(run, name) for name in names}
        row["success_within_budget"] = run.success_within_budget
        row["mean_success"] = run.mean_success(shortest)
        for goal, success in goals.items():
            for unit in ("seconds", "tokens"):
                row[f"{unit}_to_{goal}"] = getattr(run.first_at(success), unit, None)
        rows.append(row)
    return csv_text(rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, about: Sequence[str]) -> str:
    """One row an algorithm: means over the seeds."""
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in (header, *rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in escaped]
    lines.insert(1, f"|{'---|' * len(header)}")
    pictures = [f"![success by {axis}](success_by_{axis}.png)" for axis in AXES]
    return "\n".join(["# Comparison", "", " ".join(about), "", *lines, "", *pictures]) + "\n"


def explanation(measurements: Sequence[Measurement], *, settings: ComparisonConfig) -> list[str]:
    """What the numbers of the table mean, in sentences."""
    common, shortest = _common(measurements)
    budget, costs, whole = settings.budget, "", []
    within = " within the budget" if budget.is_set else ""
    is_without_curve = any(run.points[-1].tokens == 0 for run in measurements)
    shortest_run = f"shortest run{' with an evaluation' + within if is_without_curve else ''}"
    if settings.share_values:
        costs = (
            " Of the runs of a seed whose Stage 1 is the same, only the first paid for it, and"
            " those that had sampled before they shared it: the costs of the others lack its"
            " samples."
        )
    if budget.is_set:
        limits = [duration(budget.seconds)] if budget.seconds is not None else []
        limits += [counted(budget.tokens, "token")] if budget.tokens is not None else []
        costs += f" Budget of a run: {', '.join(limits)}."
        whole = [
            "Success within the budget: of the last evaluation during training that it allows."
            " Success after training, pass@k, updates, KL, entropy and memory are of the whole run."
        ]
    seeds = ", ".join(map(str, settings.seeds))
    return [
        f"Means over seeds {seeds}." if len(settings.seeds) > 1 else f"One seed, {seeds}.",
        "Seconds and generated tokens include Stage 1 and distillation, not the warm start and the"
        " evaluations." + costs,
        _of_all(measurements, common, within=within),
        "Mean success: area under the curve of success against tokens, up to"
        f" {counted(shortest, 'token')}, where the curve of the {shortest_run} ends."
        + _without_evaluation(measurements, shortest),
        "Costs of a target are those of the first evaluation that reaches it, in the seeds that"
        " do.",
        "The 95% interval is that of one run, for the number of tasks that it was evaluated on: its"
        " bounds are means over the seeds. Updates are those of the distillations and of Stage 2."
        " KL and entropy are those of the last step, the KL to the newest reference of the run: a"
        " run that made new ones shows less, and a few tokens that the reference finds far likelier"
        " make it large. Peak memory is that of the seed that needed most.",
        *whole,
        *_undecided(measurements),
    ]


def _without_evaluation(measurements: Sequence[Measurement], tokens: int) -> str:
    """Which runs are not yet evaluated in training where mean success ends."""
    late = [
        run.name
        for run in measurements
        if not any(0 < point.tokens <= tokens for point in run.points)
    ]
    if not late:
        return ""
    return (
        f" Up to there {' and '.join(dict.fromkeys(late))} had no evaluation after the first, for"
        " example because Stage 1 was sampled: their mean success says little."
    )


def _undecided(measurements: Sequence[Measurement]) -> list[str]:
    """Says so where no run is better than another by more than chance."""
    names = dict.fromkeys(run.name for run in measurements)
    bounds = [_mean_bounds([run for run in measurements if run.name == n]) for n in names]
    if len(bounds) < 2 or max(low for low, _ in bounds) > min(high for _, high in bounds):
        return []
    return [
        "All intervals overlap: success after training does not tell these runs apart. With more"
        " evaluated tasks (evaluation.num_episodes) they are narrower."
    ]


def _mean_bounds(runs: Sequence[Measurement]) -> tuple[float, float]:
    """Of the 95% interval, over the seeds."""
    return fmean(run.success_low for run in runs), fmean(run.success_high for run in runs)


def rows_of_algorithms(
    measurements: Sequence[Measurement], *, settings: ComparisonConfig
) -> list[list[str]]:
    """The header, then one row an algorithm, as text."""
    common, shortest = _common(measurements)
    targets = [_goal(target) for target in settings.target]
    pass_k = max((run.pass_k for run in measurements if run.pass_k is not None), default=None)
    # What all runs have before they begin says nothing.
    shared = [common] if _is_reached_later(measurements, common) else []
    goals = [*map(percent, shared), *targets]
    costs = [f"{what} to {goal}" for goal in goals for what in _COSTS]
    header = ["run", *costs, "mean success"]
    header += ["success within the budget (range)"] if settings.budget.is_set else []
    header += ["success after training (range)", "95% interval of a run"]
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
        cells.append(percent(fmean(run.mean_success(shortest) for run in runs)))
        if settings.budget.is_set:
            cells.append(_range([run.success_within_budget for run in runs]))
        cells.append(_range([run.success for run in runs]))
        cells.append(interval(_mean_bounds(runs)))
        if pass_k is not None:
            cells.append(percent(fmean(passes)) if passes else ABSENT)
        cells += [
            compact(round(fmean(updates)) if updates else None),
            compact(fmean(kl) if kl else None),
            f"{fmean(entropy):.3f}" if entropy else ABSENT,
            f"{max(memory) / 2**20:,.0f} MiB" if memory else ABSENT,
        ]
        rows.append(cells)
    return rows


def _rows_of_runs(
    measurements: Sequence[Measurement], *, settings: ComparisonConfig
) -> list[dict[str, str]]:
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


def _goal(target: float) -> str:
    """A target with the digits that it has: `98%`, `97.5%`."""
    return f"{100 * target:.6g}%"


def _common(measurements: Sequence[Measurement]) -> tuple[float, int]:
    """The success that every run reaches, and the tokens that every run has used."""
    best = min(run.best for run in measurements)
    used = [run.points[-1].tokens for run in measurements]
    # A run whose first evaluation lies outside of the budget has no curve to compare.
    return best, min((tokens for tokens in used if tokens > 0), default=1)


def _is_reached_later(measurements: Sequence[Measurement], common: float) -> bool:
    """Whether a run has to train for what all of them reach."""
    firsts = [run.first_at(common) for run in measurements]
    return any(first is not None and first.tokens > 0 for first in firsts)


def _of_all(measurements: Sequence[Measurement], common: float, *, within: str) -> str:
    if not common:
        return f"A run had no success at all{within}."
    if _is_reached_later(measurements, common):
        return f"Every run reached {percent(common)}{within}."
    return (
        f"Every run reached {percent(common)}{within}. All had that before they were trained, and "
        "one of them never rose above it."
    )


def _costs(points: Sequence[Point | None]) -> tuple[str, str]:
    """Mean seconds and tokens of the seeds that reached the success, and their number."""
    reached = [point for point in points if point is not None]
    if not reached:
        return ABSENT, ABSENT
    some = "" if len(reached) == len(points) else f" ({len(reached)} of {len(points)})"
    seconds = fmean(point.seconds for point in reached)
    tokens = fmean(point.tokens for point in reached)
    return f"{duration(seconds)}{some}", f"{compact(round(tokens))}{some}"


def _range(shares: Sequence[float]) -> str:
    return f"{percent(fmean(shares))} ({percent(min(shares))} to {percent(max(shares))})"


def mean_line(lines: Sequence[Mapping[int, tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean cost and success of the evaluations that every seed has, by their moment."""
    common = set(lines[0]).intersection(*lines[1:])
    return [
        (fmean(line[moment][0] for line in lines), fmean(line[moment][1] for line in lines))
        for moment in sorted(common)
    ]


def curves(measurements: Sequence[Measurement], *, axis: str) -> bytes:
    """Success of evaluations during training against seconds or tokens, as PNG.

    A thick line through the means over seeds, of the evaluations that all seeds have; a faint one
    for each seed.
    Where there are more runs than colours, those that repeat one are dashed, with other markers.
    """
    figure = Figure(figsize=(8.0, 5.0), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    style_axes(axes, f"Success against {axis}")
    names = list(dict.fromkeys(run.name for run in measurements))
    means: dict[str, Line2D] = {}
    for index, name in enumerate(names):
        lap, color_index = divmod(index, len(COLORS))
        color, (line_style, marker) = COLORS[color_index], _LAPS[lap % len(_LAPS)]
        lines = [
            {point.moment: (float(getattr(point, axis)), point.success) for point in run.points}
            for run in measurements
            if run.name == name
        ]
        for line in lines if len(lines) > 1 else []:
            axes.plot(*zip(*line.values(), strict=True), color=color, linewidth=0.8, alpha=0.3)
        (means[name],) = axes.plot(
            *zip(*mean_line(lines), strict=True),
            color=color,
            linestyle=line_style,
            marker=marker,
            markersize=3,
            linewidth=1.8,
        )
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("generated tokens" if axis == "tokens" else "seconds", color=MUTED)
    legend_below(figure, axes, num_columns=3, named=means)
    return png_bytes(figure)
