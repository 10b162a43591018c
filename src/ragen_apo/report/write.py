"""From a run directory to the files that people read, all under RUN/report/.

Every file is made in memory first, so a failure leaves the last report as it was; then each is
replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ragen_apo.files import write_bytes_atomically
from ragen_apo.report.drawing import png_bytes
from ragen_apo.report.failure_analysis import failure_analysis
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.model_card import model_card
from ragen_apo.report.page import page
from ragen_apo.report.pdf import pdf_of_page, require_pdf
from ragen_apo.report.plots import FIGURES, curve_pictures
from ragen_apo.report.slides import slides
from ragen_apo.report.tables import summary_csv, summary_latex
from ragen_apo.run_directory import RunDirectory


def write_report(run_directory: Path, *, with_pdf: bool = False) -> list[Path]:
    """Writes the report of a run and returns its files, the page last.

    A figure that the run has nothing for, and a PDF that was not asked for, has no file, nor one
    of an earlier report. Raises
    RunDirectoryError if the directory is no run or was not evaluated, and ConfigError if a PDF is
    asked for and cannot be made.
    """
    if with_pdf:
        require_pdf()
    run = load_run(run_directory)
    contents = report_files(run, with_pdf=with_pdf)
    directory = RunDirectory(run_directory).report
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        write_bytes_atomically(directory / name, content)
    for name in ("report.pdf", *(f"{figure}.png" for figure in FIGURES)):
        if name not in contents:
            (directory / name).unlink(missing_ok=True)
    return [directory / name for name in contents]


def report_files(run: RunData, *, with_pdf: bool = False) -> Mapping[str, bytes]:
    """The content of each file by its name."""
    drawn = {name: row.draw(run) for name, row in FIGURES.items()}
    pictures = {name: png_bytes(figure) for name, figure in drawn.items() if figure is not None}
    curves = curve_pictures(run) if run.metrics else []
    figures = [(title, pictures[n]) for n in pictures if (title := FIGURES[n].title)]
    return {
        "summary.csv": _encoded(summary_csv(run)),
        "summary.tex": _encoded(summary_latex(run)),
        **{f"{name}.png": picture for name, picture in pictures.items()},
        "failure_analysis.md": _encoded(failure_analysis(run)),
        **({"model_card.md": _encoded(model_card(run))} if run.trained or run.distilled else {}),
        "slides.pptx": slides(run),
        **(
            {"report.pdf": pdf_of_page(page(run, curves=curves, figures=figures, printed=True))}
            if with_pdf
            else {}
        ),
        "report.html": _encoded(page(run, curves=curves, figures=figures)),
    }


def _encoded(text: str) -> bytes:
    """UTF-8, with a question mark for each character of a model that has no UTF-8."""
    return text.encode("utf-8", errors="replace")
