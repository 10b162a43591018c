"""A picture of WebShop runs: success of their policies against the episodes that were played.

    python -m benchmarks.webshop_policies RUN FOLDER ... > FILE
    python -m benchmarks.webshop_curve FILE [FILE ...] --out benchmarks/results/NAME.png

The success is that under the `upstream` reward. Episodes of Stage 1 count. `--rule 80.2` draws the
success of a rule beside it, here that of `careful` (benchmarks/results/webshop_reinforce.md).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from ragen_apo.comparison.write import COLORS
from ragen_apo.config import load_run_config
from ragen_apo.files import read_json_lines
from ragen_apo.report.drawing import legend_below, png_bytes, style_axes
from ragen_apo.report.style import MUTED, PAPER
from ragen_apo.run_directory import RunDirectory, open_run

Line = list[tuple[int, float]]


def episodes_before(run: RunDirectory, folder: Path) -> int:
    """The episodes that the run had played when it wrote this model folder."""
    steps = read_json_lines(run.metrics)
    if folder == run.policy:
        num_references = 1 + max(row.get("reference_version", 0) for row in steps)
    elif folder == run.distilled:
        num_references, steps = 1, []
    else:
        num_references = int(folder.name)
    reports = [run.value_report_of(version) for version in range(num_references)]
    stage_one = [json.loads(each.read_text("utf-8")) for each in reports if each.exists()]
    before = [row for row in steps if row.get("reference_version", 0) < num_references]
    return sum(report["num_samples"] for report in stage_one) + sum(
        row["num_episodes"] for row in before
    )


def lines_of(files: list[Path]) -> dict[str, list[Line]]:
    """For each algorithm a line of points (episodes, success in percent) a run."""
    runs: dict[Path, Line] = defaultdict(list)
    for row in [row for file in files for row in read_json_lines(file)]:
        folder = Path(row["policy"])
        run = open_run(next(path for path in folder.parents if (path / "config.yaml").exists()))
        runs[run.path].append((episodes_before(run, folder), row["upstream"]["success"]))
    found = defaultdict(list)
    for path, points in runs.items():
        algorithm = load_run_config(path / "config.yaml").algorithm
        found[algorithm.traits.label].append(sorted(points))
    return found


def picture(lines: dict[str, list[Line]], *, rule: float | None) -> bytes:
    """A thick line through the means over runs, a faint one for each run."""
    figure = Figure(figsize=(8.0, 5.0), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    style_axes(axes, "WebShop: success on test goals against episodes, Stage 1 included")
    for color, (title, runs) in zip(COLORS, lines.items(), strict=False):
        for points in runs if len(runs) > 1 else []:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.4)
        mean = [tuple(map(fmean, zip(*points, strict=True))) for points in zip(*runs, strict=True)]
        label = f"{title}, {len(runs)} seeds" if len(runs) > 1 else f"{title}, one seed"
        axes.plot(
            *zip(*mean, strict=True),
            color=color,
            marker="o",
            markersize=4,
            linewidth=1.8,
            label=label,
        )
    if rule is not None:
        axes.axhline(rule, color=MUTED, linewidth=1.0, linestyle="--", label="a rule")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(100, decimals=0))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("episodes", color=MUTED)
    legend_below(figure, axes, num_columns=3)
    return png_bytes(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rule", type=float, help="success of a rule, in percent")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.write_bytes(picture(lines_of(given.files), rule=given.rule))


if __name__ == "__main__":
    main()
