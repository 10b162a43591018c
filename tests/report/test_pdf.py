"""The report on paper: examples in place of the reader, and nothing from outside."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.errors import ConfigError
from ragen_apo.report.load import load_run
from ragen_apo.report.page import page
from ragen_apo.report.pdf import pdf_of_page
from ragen_apo.report.write import write_report
from tests.report.printing import NEEDS_PDF


@NEEDS_PDF
@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_report_has_a_pdf_when_it_is_asked_for_and_never_an_old_one(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run()
    written = write_report(directory, with_pdf=True)
    pdf = directory / "report" / "report.pdf"
    assert pdf in written
    assert pdf.read_bytes().startswith(b"%PDF-")
    write_report(directory)
    assert not pdf.exists()


def test_on_paper_a_success_and_each_failure_are_told_turn_by_turn(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    printed = page(run, curves=[], printed=True)
    assert "<script" not in printed
    assert "<nav" not in printed
    titles = re.findall(r"<h3>(Episode \d+: [^<]+)</h3><pre>[^<]*--- turn 1", printed)
    occurred = [name for name, each in run.results["failures"].items() if each["count"]]
    assert titles[0].endswith(": solved")
    assert len(titles) == 1 + len(occurred)


@pytest.mark.slow
@NEEDS_PDF
def test_a_page_that_asks_for_something_outside_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG")
    from weasyprint.urls import FatalURLFetchingError

    with pytest.raises(FatalURLFetchingError, match=r"secret\.png"):
        pdf_of_page(f'<img src="{secret.as_uri()}">')


def test_without_weasyprint_a_pdf_is_refused_before_anything_is_written(
    build_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build_run()
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    with pytest.raises(ConfigError, match=r"pip install 'ragen-apo\[pdf\]'"):
        write_report(directory, with_pdf=True)
    assert not (directory / "report").exists()
