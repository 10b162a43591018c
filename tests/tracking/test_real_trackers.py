"""Each tracker's own package, offline, and what it has written, read back."""

import importlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from ragen_apo.files import append_json_line
from ragen_apo.run_directory import RunDirectory
from ragen_apo.tracking.run_tracking import TRACKERS, RunTracking
from tests import factories
from tests.tracking.trackers import READERS, Written

pytestmark = pytest.mark.slow


@pytest.fixture(params=[*TRACKERS, "mlflow, a folder"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    name, _, store = request.param.partition(", ")
    if find_spec(name) is None:
        pytest.skip(f"the extra `{name}` is not installed")
    if store:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    elif name == "mlflow" and find_spec("alembic") is None:
        pytest.skip("mlflow-skinny is installed, without the databases of the extra `mlflow`")
    return name


def note_steps(name: str, run: RunDirectory, *steps: int, options: Sequence[str] = ()) -> None:
    """One attempt, in what a process of its own would make: these steps of Stage 2."""
    said = factories.Sayings()
    keys = f"--tracking={{trackers: {name}, project: tests, num_episodes: 1}}"
    tracking = RunTracking(factories.config(keys, *options), run, said)
    with tracking.running():
        copied = {"phase": "copy", "step": 10 * steps[0], "loss": 2.5, "seconds": 0.25}
        append_json_line(run.warm_start, copied)
        tracking.note(run.warm_start, copied)
        for step in steps:
            row = {"step": step, "success_rate": step / 4, "reference_version": 0}
            append_json_line(run.metrics, row)
            episodes = [factories.played(f"buy {number} at {step}") for number in "12"]
            tracking.note(run.metrics, row, episodes=episodes)
    assert said.lines == []


def written(name: str, run: RunDirectory) -> Written:
    state = json.loads(run.tracking_state.read_text())
    return READERS[name](run.trackers, state["run_name"])


def test_a_tracker_has_the_numbers_of_the_files_under_their_names_and_steps(
    name: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    note_steps(name, run, 1, 2)
    assert written(name, run).points == {
        "copy/loss": [(10, 2.5)],
        "copy/seconds": [(10, 0.25)],
        "success_rate": [(1, 0.25), (2, 0.5)],
        "reference_version": [(1, 0.0), (2, 0.0)],
    }


def test_it_shows_as_many_episodes_as_are_asked_for(name: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    note_steps(name, run, 1, 2)
    episodes = written(name, run).episodes
    for text in ("buy 1 at 1", "buy 1 at 2", "search[mug]", "the end"):
        assert text in episodes
    assert "buy 2" not in episodes


def test_a_resumed_run_is_the_same_run_of_the_tracker(name: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    note_steps(name, run, 1)
    note_steps(name, run, 2)
    found = written(name, run)
    assert found.runs == 1
    assert found.points["success_rate"] == [(1, 0.25), (2, 0.5)]


@pytest.mark.skipif(find_spec("alembic") is None, reason="the extra `mlflow` is not installed")
def test_mlflow_has_the_configuration_of_the_attempt_that_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    note_steps("mlflow", run, 1)
    note_steps("mlflow", run, 2, options=["--training.max_steps=77"])
    assert written("mlflow", run).config["training"]["max_steps"] == 77


@pytest.mark.skipif(find_spec("wandb") is None, reason="the extra `wandb` is not installed")
def test_wandb_without_a_key_is_left_out_and_not_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    importlib.import_module("wandb").teardown()  # it has read the environment before
    said = factories.Sayings()
    config = factories.config("--tracking=wandb")
    with RunTracking(config, RunDirectory(tmp_path), said).running():
        pass
    assert "set WANDB_API_KEY or run `wandb login`; WANDB_MODE=offline needs none" in said.lines[0]
