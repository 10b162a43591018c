"""Which rows trackers get, in a whole run, after a kill and after a failure."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ragen_apo.config import RunConfig, resolved_yaml
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.files import (
    append_json_line,
    read_json_lines,
    write_json_atomically,
    write_json_lines_atomically,
)
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages.inputs import check_start
from ragen_apo.tracking.run_tracking import TRACKERS, RunTracking, numbers, stage_one_row
from tests import factories
from tests.factories import Sayings, assert_same_tensors, changed, rows
from tests.tracking.trackers import Fails, Remembers, Written


@pytest.fixture(autouse=True)
def trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensorboard` stands for one that remembers, `mlflow` for one that fails."""
    monkeypatch.setitem(TRACKERS, "tensorboard", "tests.tracking.trackers:Remembers")
    monkeypatch.setitem(TRACKERS, "mlflow", "tests.tracking.trackers:Fails")
    monkeypatch.setattr(Remembers, "runs", {})
    monkeypatch.setattr(Fails, "where", "everywhere")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ragen_apo.tracking.run_tracking.find_spec",
        lambda name: ModuleSpec(name, None, origin="somewhere"),
    )


def attempt(
    run: RunDirectory, *steps: int, trackers: str = "tensorboard", project: str = "mine"
) -> list[str]:
    """What a process says that makes these steps of Stage 2 in a run."""
    said = Sayings()
    keys = f"--tracking.trackers=[{trackers}]", f"--tracking.project={project}"
    tracking = RunTracking(factories.config(*keys), run, said)
    with tracking.running():
        for step in steps:
            row = {"step": step, "loss": float(step)}
            append_json_line(run.metrics, row)
            tracking.note(run.metrics, row, episodes=[factories.played("buy")])
    return said.lines


def only_run() -> Written:
    (written,) = Remembers.runs.values()
    return written


def losses() -> list[tuple[int, float]]:
    return only_run().points["loss"]


# A whole run


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_tracker_gets_every_number_of_every_phase_and_one_that_fails_changes_nothing(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "where", "log")
    said, untracked = Sayings(), RunDirectory(finished_run)
    config = factories.config("--tracking=[mlflow, tensorboard]")
    run = factories.run(config, tmp_path / "run", progress=said)
    assert rows(run.metrics) == rows(untracked.metrics)
    assert_same_tensors(run.policy, untracked.policy)
    assert sum("tracking: mlflow failed" in line for line in said.lines) == 1
    written, expected = only_run(), Written()
    for path in (run.warm_start, run.metrics):
        for row in read_json_lines(path):
            prefix = f"{row.pop('phase')}/" if "phase" in row else ""
            step = row.pop("step")
            for name, value in row.items():
                expected.add(prefix + name, step, value)
    found = {name: points for name, points in written.points.items() if "stage_1" not in name}
    assert found == expected.points
    for version in (0, 1):
        report = json.loads(run.value_report_of(version).read_text())
        returns = written.points["stage_1/mean_return"]
        assert returns[version] == (version, pytest.approx(report["mean_return"], abs=1e-6))
        share = written.points["stage_1/pass_at_k/1"]
        assert share[version] == (version, pytest.approx(report["pass_at_k"]["1"], abs=1e-6))
    assert written.episodes == "3: 3\n6: 3\n", "the split has three tasks"


@pytest.mark.usefixtures("installed")
def test_a_run_may_go_on_with_other_trackers(unfinished: Path) -> None:
    config = changed(factories.config(), "--tracking=tensorboard")
    RunDirectory(unfinished).config.write_text(resolved_yaml(config))
    factories.run(config, unfinished)
    assert [step for step, _ in only_run().points["return_mean"]] == [1, 2, 3, 4, 5, 6]


# Failures


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("where", ["__init__", "log", "log_episodes", "finish", "everywhere"])
def test_a_tracker_that_fails_is_mentioned_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fails, "where", where)
    (warning,) = attempt(RunDirectory(tmp_path), 1, 2, trackers="mlflow")
    assert "no route to https://...@tracker.example" in warning, "without the password"
    assert "The run goes on without it; its own files have all metrics" in warning


@pytest.mark.usefixtures("installed")
def test_what_a_tracker_of_ours_lacks_is_said_without_the_type_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **_options: object) -> None:
        raise ConfigError("no key: set WANDB_API_KEY")

    monkeypatch.setattr(Remembers, "__init__", start)
    (warning,) = attempt(RunDirectory(tmp_path), 1, trackers="tensorboard")
    assert warning.startswith(
        "tracking: tensorboard failed to start: no key: set WANDB_API_KEY. The run goes on"
    )


# From one attempt to the next


@pytest.mark.usefixtures("installed")
def test_steps_that_are_made_again_after_a_kill_are_not_sent_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt(run, 1, 2, 3)
    write_json_lines_atomically(run.metrics, read_json_lines(run.metrics)[:1])
    attempt(run, 2, 3, 4)
    assert losses() == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.mark.usefixtures("installed")
def test_where_a_damaged_line_was_taken_out_all_later_steps_are_sent(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt(run, 1, 2, 3)
    first, _, third = read_json_lines(run.metrics)
    write_json_lines_atomically(run.metrics, [first, third])
    attempt(run, 4, 5)
    assert [step for step, _ in losses()] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("installed")
def test_a_row_that_was_written_before_a_kill_and_not_sent_is_sent_later(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt(run, 1)
    append_json_line(run.metrics, {"step": 2, "loss": 2.0})
    attempt(run, 3)
    assert losses() == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.usefixtures("installed")
def test_a_tracker_that_is_new_gets_the_whole_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    append_json_line(run.warm_start, {"phase": "copy", "step": 10, "loss": 5.0})
    append_json_line(run.metrics, {"step": 1, "loss": 1.0})
    attempt(run, 2)
    assert losses() == [(1, 1.0), (2, 2.0)]
    assert only_run().points["copy/loss"] == [(10, 5.0)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("tracker", "second"), [("wandb", [1, 2, 3, 4]), ("tensorboard", [3, 4])])
def test_another_project_gets_the_whole_run_if_the_tracker_has_projects(
    tracker: str, second: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", "tests.tracking.trackers:Remembers")
    run = RunDirectory(tmp_path)
    attempt(run, 1, 2, trackers=tracker, project="first")
    attempt(run, 3, 4, trackers=tracker, project="second")
    attempt(run, 5, trackers=tracker, project="second")
    assert [step for step, _ in losses()] == [1, 2, *second, 5]


@pytest.mark.usefixtures("installed")
def test_a_tracking_json_from_before_there_were_projects_still_counts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt(run, 1, 2)
    old = {"run_name": "older", "num_rows": {"tensorboard": {"metrics.jsonl": 2}}}
    write_json_atomically(run.tracking_state, old)
    attempt(run, 3)
    assert [step for step, _ in Remembers.runs["older"].points["loss"]] == [3]


@pytest.mark.usefixtures("installed")
def test_a_tracker_that_failed_gets_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    assert len(attempt(run, 1, 2, trackers="mlflow")) == 1
    monkeypatch.setattr(Fails, "where", "nowhere")
    assert attempt(run, 3, trackers="mlflow") == []
    assert losses() == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.usefixtures("installed")
def test_stage_one_of_later_references_is_sent_when_it_was_missed_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    for version in (0, 1):
        run.reference(version).mkdir(parents=True)
        write_json_atomically(run.value_report_of(version), {"mean_return": version / 2})
    attempt(run, 1, trackers="mlflow")
    monkeypatch.setattr(Fails, "where", "nowhere")
    tracking = RunTracking(factories.config("--tracking=[mlflow]"), run, Sayings())
    with tracking.running():  # Stage 1 of the first reference runs again when a run is resumed
        tracking.note(run.value_report, stage_one_row({"mean_return": 0.0}, 0))
    assert only_run().points["stage_1/mean_return"] == [(0, 0.0), (1, 0.5)]


@pytest.mark.usefixtures("installed")
def test_a_damaged_report_of_stage_one_keeps_no_run_from_its_trackers(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.reference(1).mkdir(parents=True)
    run.value_report_of(1).write_text('{"mean')
    (said,) = attempt(run, 1)
    assert said.startswith("tracking: Stage 1 is not sent: ")
    assert "estimate-values RUN --reference 1" in said
    assert losses() == [(1, 1.0)]


@pytest.mark.usefixtures("installed")
def test_a_tracker_that_exits_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fails, "error", SystemExit)
    assert len(attempt(RunDirectory(tmp_path), 1, trackers="mlflow")) == 1


@pytest.mark.usefixtures("installed")
def test_trackers_are_told_whether_the_run_came_to_its_end(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    tracking = RunTracking(factories.config("--tracking=[tensorboard]"), run, Sayings())
    with pytest.raises(KeyboardInterrupt), tracking.running():
        raise KeyboardInterrupt
    attempt(run, 1)
    assert only_run().failed == [True, False]


@pytest.mark.usefixtures("installed")
def test_the_failure_of_one_tracker_is_none_of_another(tmp_path: Path) -> None:
    attempt(RunDirectory(tmp_path), 1, 2, trackers="mlflow, tensorboard")
    assert losses() == [(1, 1.0), (2, 2.0)]


@pytest.mark.usefixtures("installed")
def test_two_runs_in_folders_of_the_same_name_are_two_runs_of_a_tracker(tmp_path: Path) -> None:
    for seed in ("seed-0", "seed-1"):
        (tmp_path / seed / "my run").mkdir(parents=True)
        attempt(RunDirectory(tmp_path / seed / "my run"), 1)
    assert len(Remembers.runs) == 2
    assert all(name.startswith("my-run-") for name in Remembers.runs)


@pytest.mark.usefixtures("installed")
def test_a_damaged_tracking_json_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.tracking_state.write_text('{"run_name": 3}')
    with pytest.raises(RunDirectoryError, match=r"tracking\.json cannot be used: run_name"):
        attempt(run)


def test_without_trackers_there_is_no_file_of_theirs(tmp_path: Path) -> None:
    attempt(RunDirectory(tmp_path), 1, trackers="")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# What is refused, and what is sent


def test_a_package_that_is_missing_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb needs .* pip install 'ragen-apo\[wandb\]'"):
        check_start(factories.config("--tracking=wandb"))


def test_a_folder_of_the_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match=r"trackio needs a package that is not installed"):
        check_start(factories.config("--tracking=trackio"))


def test_an_unknown_tracker_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tensorboard or trackio or wandb or mlflow"):
        factories.config("--tracking=neptune")


def test_a_project_that_trackers_would_refuse_is_refused_before() -> None:
    with pytest.raises(ConfigError, match="project has at most 100 letters, .* got 'a/b'"):
        factories.config("--tracking.project=a/b")


@pytest.mark.parametrize("text", ["tensorboard", "[tensorboard]", "{trackers: [tensorboard]}"])
def test_names_alone_stand_for_the_section(text: str) -> None:
    config: RunConfig = factories.config(f"--tracking={text}")
    assert config.tracking.trackers == ["tensorboard"]
    assert changed(config) == config


def test_only_finite_numbers_are_sent() -> None:
    row = {"step": 1, "a": 1, "b": float("nan"), "c": "text", "d": None, "e": True, "f": {"g": 0.5}}
    assert numbers(row) == {"a": 1, "f/g": 0.5}


def test_the_distillation_of_a_later_reference_has_a_curve_of_its_own() -> None:
    row = {"phase": "distillation", "reference_version": 0, "step": 1, "loss": 1.0}
    assert numbers(row)["distillation/loss"] == 1.0
    assert numbers(row | {"reference_version": 1})["distillation/1/loss"] == 1.0
