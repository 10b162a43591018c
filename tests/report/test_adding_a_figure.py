"""docs/adding_a_figure.md: its figure, added to a report as the page says."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.report import plots
from ragen_apo.report.write import write_report

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding_a_figure.md"


@pytest.fixture
def documented_figure(monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the page's block on a copy of the registry; returns the title that it gives."""
    monkeypatch.setattr(plots, "FIGURES", dict(plots.FIGURES))
    monkeypatch.setattr("ragen_apo.report.write.FIGURES", plots.FIGURES)
    block = re.search(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S)
    assert block
    exec(compile(block[1], str(DOCUMENT), "exec"), {})
    (added,) = [row for row in plots.FIGURES.values() if row.title]
    return str(added.title)


@pytest.mark.slow
def test_one_function_and_one_row_are_a_file_and_a_picture_on_the_page(
    documented_figure: str, build_run: Callable[..., Path]
) -> None:
    report = build_run() / "report"
    written = [path.name for path in write_report(report.parent)]
    assert "turns.png" in written
    picture = base64.b64encode((report / "turns.png").read_bytes()).decode()
    page = (report / "report.html").read_text("utf-8")
    assert f'src="data:image/png;base64,{picture}" alt="{documented_figure}"' in page
    assert '<a href="#figures">' in page and '<section id="figures">' in page
    # The row that the page gives for plots.py is the row that the test has added.
    assert f'"turns": ReportFigure(turns, title="{documented_figure}")' in DOCUMENT.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_with_nothing_to_draw_has_no_such_file_not_even_an_old_one(
    documented_figure: str, build_run: Callable[..., Path]
) -> None:
    run = build_run()
    write_report(run)
    (run / "evaluation" / "episodes.jsonl").write_text("")
    results = json.loads((run / "evaluation" / "results.json").read_text())
    (run / "evaluation" / "results.json").write_text(json.dumps(results | {"episodes": 0}))
    assert "turns.png" not in [path.name for path in write_report(run)]
    assert not (run / "report" / "turns.png").exists()
    assert documented_figure not in (run / "report" / "report.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_without_such_a_row_the_page_has_no_section_for_figures(
    build_run: Callable[..., Path],
) -> None:
    run = build_run()
    write_report(run)
    assert "#figures" not in (run / "report" / "report.html").read_text("utf-8")
