"""What is read from a run directory, and what is said when it cannot be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import write_json_atomically
from ragen_apo.report import load
from ragen_apo.report.load import finite, load_run, series
from ragen_apo.run_directory import RunDirectory


def test_a_whole_run_is_read(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    assert run.trained
    assert run.num_episodes == len(run.episodes) == 100
    assert run.config["algorithm"]["beta2"] == 0.05
    assert len(run.metrics) == 60
    assert run.value_report["num_tasks"] == 397


def test_a_run_with_only_configuration_and_evaluation_is_read(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run(trained=False)
    for name in ("run.json", "warm_start.jsonl", "value_report.json"):
        (directory / name).unlink()
    run = load_run(directory)
    assert not run.trained
    assert (run.record, run.warm_start, run.value_report) == ({}, [], {})


@pytest.mark.parametrize("missing", ["results.json", "episodes.jsonl"])
def test_a_missing_evaluation_is_refused_with_the_command_that_makes_it(
    build_run: Callable[..., Path], missing: str
) -> None:
    directory = build_run()
    (directory / "evaluation" / missing).unlink()
    (directory / "policy").mkdir()
    with pytest.raises(RunDirectoryError, match=f"ragen-apo evaluate {directory}"):
        load_run(directory)


def test_a_run_that_is_not_trained_yet_is_refused_with_the_command_that_goes_on(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run()
    (directory / "evaluation" / "results.json").unlink()
    with pytest.raises(RunDirectoryError, match=f"ragen-apo train --run-dir {directory} --resume"):
        load_run(directory)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run: there is no folder .*nowhere"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match=r"is not a run: there is no .*config.yaml"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("evaluation/results.json", "{", "is not JSON"),
        ("evaluation/results.json", "[]", "must hold a JSON object, got list"),
        ("value_report.json", "nonsense", "is not JSON"),
        ("metrics.jsonl", 'x\n{"step": 1}\n', "line 1 is not JSON"),
        ("metrics.jsonl", "3\n", "line 1 must hold a JSON object"),
        ("config.yaml", "a: [1", "is not YAML"),
        ("config.yaml", "", "has no section `algorithm`: it was emptied or cut off"),
        ("evaluation/episodes.jsonl", "", "has 0 episodes, and .*results.json counts 100"),
        ("evaluation/episodes.jsonl", '{"episode": 1, "tu', "has 0 episodes, and .*counts 100"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    build_run: Callable[..., Path], name: str, text: str, message: str
) -> None:
    directory = build_run()
    (directory / name).write_text(text)
    with pytest.raises(RunDirectoryError, match=message) as caught:
        load_run(directory)
    assert Path(name).name in str(caught.value)


def test_a_curve_that_has_lost_its_end_is_refused(build_run: Callable[..., Path]) -> None:
    """Of a run that is over; a line break may be lacking."""
    file = build_run() / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole.removesuffix("\n"))
    assert len(load_run(file.parent).metrics) == 60
    file.write_text(whole[:-20])
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl, line 60 is cut off, and the run"):
        load_run(file.parent)


@pytest.mark.parametrize("value", [None, "1", True, math.nan, math.inf, [1.0]])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert finite(value) is None


def test_a_series_leaves_out_what_is_no_number_and_counts_rows_without_a_step() -> None:
    rows = [{"step": 5, "x": 1}, {"step": 6, "x": math.nan}, {"x": 2.5}, {"step": 8}]
    assert series(rows, "x") == ([5.0, 3], [1.0, 2.5])


def test_results_that_change_while_they_are_read_are_not_mixed(
    build_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(build_run())
    read = load.read_json

    def read_before_an_evaluation_ends(path: Path, *args: Any, **options: Any) -> Any:
        found = read(path, *args, **options)
        if path == run.results:
            write_json_atomically(path, {**json.loads(path.read_text()), "success_rate": 0.0})
        return found

    monkeypatch.setattr(load, "read_json", read_before_an_evaluation_ends)
    with pytest.raises(RunDirectoryError, match="is being evaluated: its results changed"):
        load_run(run.path)
