"""A whole report, from directory to files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo import files
from ragen_apo.errors import RunDirectoryError
from ragen_apo.report import write
from ragen_apo.report.write import write_report

pytestmark = pytest.mark.usefixtures("undrawn")

FILES = [
    "summary.csv", "summary.tex", "learning_curves.png", "by_category.png", "failures.png",
    "failure_analysis.md", "model_card.md", "slides.pptx", "report.html",
]  # fmt: skip
OF_TRAINING = ("learning_curves.png", "model_card.md")


def test_a_report_is_nine_files_and_nothing_is_left_beside_them(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run()
    written = write_report(directory)
    assert [path.name for path in written] == FILES
    assert sorted(directory.joinpath("report").iterdir()) == sorted(written)
    assert all(path.stat().st_size > 0 for path in written)


def test_an_untrained_run_has_no_learning_curves_not_even_old_ones(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run(trained=False)
    (directory / "report").mkdir()
    (directory / "report" / "learning_curves.png").write_bytes(b"of another day")
    written = write_report(directory)
    assert [path.name for path in written] == [n for n in FILES if n not in OF_TRAINING]
    assert not (directory / "report" / "learning_curves.png").exists()
    assert "This run was not trained" in (directory / "report" / "report.html").read_text("utf-8")


def test_a_run_without_evaluation_is_refused_and_nothing_is_written(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run()
    (directory / "evaluation" / "results.json").unlink()
    (directory / "policy").mkdir()
    with pytest.raises(RunDirectoryError, match="Run `ragen-apo evaluate"):
        write_report(directory)
    assert not (directory / "report").exists()


def test_a_failure_while_making_a_report_leaves_the_old_one_whole(
    build_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build_run()
    (directory / "report").mkdir()
    (directory / "report" / "summary.csv").write_bytes(b"the last report")

    def no_slides(run: object) -> bytes:
        raise OSError("No space left on device")

    monkeypatch.setattr(write, "slides", no_slides)
    with pytest.raises(OSError, match="No space left"):
        write_report(directory)
    (only_file,) = (directory / "report").iterdir()
    assert only_file.read_bytes() == b"the last report"


def test_a_failure_while_writing_a_file_leaves_no_partial_file(
    build_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(write, "report_files", lambda run, with_pdf: {"summary.csv": b"new"})
    directory = build_run()
    monkeypatch.setattr(files, "sync_to_disk", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_report(directory)
    assert list((directory / "report").iterdir()) == []


def test_the_report_needs_no_torch() -> None:
    check = "import sys, ragen_apo.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
