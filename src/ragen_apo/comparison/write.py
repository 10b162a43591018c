"""What people get of a comparison: its table in three formats, two pictures, page and slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from ragen_apo.comparison.explain import (
    explanation,
    how_success_is_measured,
    lines_of_the_curves,
)
from ragen_apo.comparison.measure import Measurement
from ragen_apo.comparison.plan import Comparison
from ragen_apo.comparison.slides import comparison_slides
from ragen_apo.comparison.table import rows_of_algorithms, rows_of_runs, table
from ragen_apo.config.yaml_text import dump_yaml
from ragen_apo.files import write_bytes_atomically
from ragen_apo.report.drawing import legend_below, png_bytes, style_axes
from ragen_apo.report.html import data_uri, render
from ragen_apo.report.latex import latex_table
from ragen_apo.report.pdf import pdf_of_page
from ragen_apo.report.style import ACCENT, FAINT, MUTED, PAPER, RED, WARM

COLORS = (ACCENT, WARM, RED, "#3d5a98", "#7a4f9a", "#6b7a1f", "#a14d77", MUTED, FAINT)
AXES = {
    "seconds": "seconds, with Stage 1 and distillation, without evaluations",
    "tokens": "generated tokens, with Stage 1, without evaluations",
}
"""What stands at the horizontal axis of each picture."""
COPY, BASE = "comparison.yaml", "comparison_base.yaml"
"""The comparison and its base, with which it can be repeated."""
_LAPS = (("-", "o"), ("--", "s"), (":", "^"))
"""Line style and marker of the runs that get their colour the first, second and third time."""


def write_comparison(
    measurements: Sequence[Measurement],
    out: Path,
    *,
    comparison: Comparison,
    with_pdf: bool = False,
) -> list[Path]:
    """Writes the files and returns their paths.

    Raises ConfigError if a PDF is asked for and cannot be made.
    """
    settings = comparison.settings
    header, *rows = rows_of_algorithms(measurements, settings=settings)
    measured = how_success_is_measured(next(iter(comparison.configs().values())))
    pictures = {axis: curves(measurements, axis=axis, measured=measured) for axis in AXES}
    about = explanation(measurements, comparison=comparison)
    lines = lines_of_the_curves(settings)
    presentation = comparison_slides(header, rows, pictures, about=about, lines=lines)
    page = render(
        "comparison.html",
        header=header,
        rows=rows,
        pictures=[(f"Success against {axis}", data_uri(png)) for axis, png in pictures.items()],
        lines=lines,
        about=about,
        runs=rows_of_runs(measurements, settings=settings),
    )
    contents: dict[str, bytes] = {
        "comparison.md": markdown(header, rows, about=about, lines=lines).encode(),
        "comparison.csv": table(measurements, settings=settings).encode(),
        "comparison.tex": latex_table(header, rows).encode(),
        **{f"success_by_{axis}.png": picture for axis, picture in pictures.items()},
        "comparison.pptx": presentation,
        **_copies(comparison, out),
        "comparison.html": page.encode(),
        **({"comparison.pdf": pdf_of_page(page)} if with_pdf else {}),
    }
    for name, content in contents.items():
        write_bytes_atomically(out / name, content)
    return [out / name for name in contents]


def _copies(comparison: Comparison, out: Path) -> dict[str, bytes]:
    """The comparison's own files; none where they are what was read."""
    if comparison.file.resolve() == (out / COPY).resolve():
        return {}
    given = comparison.given.model_copy(update={"base": BASE})
    return {
        COPY: dump_yaml(given.model_dump(mode="json")).encode(),
        BASE: dump_yaml(dict(comparison.base)).encode(),
    }


def markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, about: Sequence[str], lines: str
) -> str:
    """One row an algorithm: means over the seeds."""
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in (header, *rows)]
    table_lines = [f"| {' | '.join(cells)} |" for cells in escaped]
    table_lines.insert(1, f"|{'---|' * len(header)}")
    pictures = [f"![success by {axis}](success_by_{axis}.png)" for axis in AXES]
    said = [f"- {sentence}" for sentence in about]
    return "\n".join(["# Comparison", "", *said, "", *table_lines, "", *pictures, "", lines]) + "\n"


def mean_line(lines: Sequence[Mapping[int, tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean cost and success of the evaluations that every seed has, by their moment."""
    common = set(lines[0]).intersection(*lines[1:])
    return [
        (fmean(line[moment][0] for line in lines), fmean(line[moment][1] for line in lines))
        for moment in sorted(common)
    ]


def curves(measurements: Sequence[Measurement], *, axis: str, measured: str = "success") -> bytes:
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
    axes.set_ylabel(measured, color=MUTED)
    axes.set_xlabel(AXES[axis], color=MUTED)
    legend_below(figure, axes, num_columns=3, named=means)
    return png_bytes(figure)
