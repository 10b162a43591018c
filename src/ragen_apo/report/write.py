"""From a run directory to the files that people read, all under RUN/report/.

Every file is made in memory first, so a failure leaves the last report as it was; then each is
replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ragen_apo.files import write_bytes_atomically
from ragen_apo.report import plots
from ragen_apo.report.failure_analysis import failure_analysis
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.page import page
from ragen_apo.report.slides import slides
from ragen_apo.report.tables import summary_csv
from ragen_apo.run_directory import RunDirectory

LEARNING_CURVES = "learning_curves.png"


def write_report(run_directory: Path) -> list[Path]:
    """Writes the report of a run and returns its files, the page last.

    A run that was not trained has no learning curves, and its report says so. Raises
    RunDirectoryError if the directory is no run or was not evaluated.
    """
    run = load_run(run_directory)
    contents = report_files(run)
    directory = RunDirectory(run_directory).report
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        write_bytes_atomically(directory / name, content)
    if not run.trained:
        (directory / LEARNING_CURVES).unlink(missing_ok=True)
    return [directory / name for name in contents]


def report_files(run: RunData) -> Mapping[str, bytes]:
    """The content of each file by its name."""
    return {
        "summary.csv": _encoded(summary_csv(run)),
        **({LEARNING_CURVES: plots.learning_curves(run)} if run.trained else {}),
        "by_category.png": plots.by_category(run),
        "failures.png": plots.failures(run),
        "failure_analysis.md": _encoded(failure_analysis(run)),
        "slides.pptx": slides(run),
        "report.html": _encoded(page(run, curves=plots.curve_pictures(run) if run.trained else [])),
    }


def _encoded(text: str) -> bytes:
    """UTF-8, with a question mark for each character of a model that has no UTF-8."""
    return text.encode("utf-8", errors="replace")
