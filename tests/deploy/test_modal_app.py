"""deploy/modal_app.py as far as it goes without an account: its import and `.local()`."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ragen_apo.run_directory import RunDirectory
from tests.factories import TINY_CONFIG

APP = Path(__file__).resolve().parents[2] / "deploy" / "modal_app.py"

pytest.importorskip("modal", reason="the package modal is not installed")


def imported() -> ModuleType:
    spec = importlib.util.spec_from_file_location("modal_app", APP)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def modal_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The application, with runs in a temporary folder in place of the volume."""
    monkeypatch.setenv("RAGEN_APO_RUNS", str(tmp_path))
    return imported()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.filterwarnings("ignore:.*executing locally and will not have access")
def test_a_run_is_trained_evaluated_and_reported(modal_app: ModuleType, tmp_path: Path) -> None:
    steps = ["--warm_start.enabled=false", "--training.max_steps=1"]
    overrides = [*steps, "--machine.device=cpu", "--no-evaluate"]
    run = RunDirectory(tmp_path / "tiny")
    assert modal_app.train.local(TINY_CONFIG, "tiny", overrides) == str(run.path)
    assert run.policy.is_dir()
    assert '"success_rate"' in modal_app.evaluate.local("tiny", "--episodes 2")
    assert "<html" in modal_app.report.local("tiny")


def test_a_new_run_gets_the_configuration_and_the_overrides(
    modal_app: ModuleType, tmp_path: Path
) -> None:
    *arguments, seed, one = modal_app.training_arguments(
        "seed: 3", "mine", ["--trust-remote-code", "--seed", "1"]
    )
    assert arguments[:-1] == ["train", "--run-dir", str(tmp_path / "mine"), "--config"]
    assert Path(arguments[-1]).read_text() == "seed: 3"
    assert (seed, one) == ("--seed", "1")


def test_a_run_that_is_there_goes_on(modal_app: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    arguments = modal_app.training_arguments("seed: 3", "mine", ["--seed", "1"])
    assert arguments == ["train", "--run-dir", str(tmp_path / "mine"), "--resume", "--seed", "1"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "/runs/mine", ".hidden"])
def test_a_name_that_leads_out_of_the_volume_is_refused(modal_app: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match="expected letters, digits"):
        modal_app.run_folder(name)


def test_several_gpus_are_started_by_torchrun(modal_app: ModuleType) -> None:
    assert modal_app.launcher(num_processes=1) == [sys.executable, "-m", "ragen_apo.cli"]
    command = " ".join(modal_app.launcher(num_processes=8))
    assert "torch.distributed.run --nnodes 1 --node-rank 0 --nproc-per-node 8" in command


def test_several_nodes_meet_at_the_first(modal_app: ModuleType) -> None:
    command = " ".join(modal_app.launcher(num_processes=8, rank=1, hosts=("fd00::1", "fd00::2")))
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr fd00::1" in command


def test_a_container_has_as_many_objects_as_where_the_secret_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers do not have the variable, and Modal refuses to start with another number."""
    monkeypatch.setenv("RAGEN_APO_SECRET", "wandb")
    with_name = len(imported().training["secrets"])
    monkeypatch.delenv("RAGEN_APO_SECRET")
    assert len(imported().training["secrets"]) == with_name == 1


def test_what_is_refused_is_told_and_not_raised(modal_app: ModuleType) -> None:
    """What is raised in a container is tried again, up to ten times on rented GPUs."""
    exits = "import sys; sys.exit(int(sys.argv[1]))"
    ended = {status: [sys.executable, "-c", exits, str(status)] for status in (0, 1, 2)}
    assert modal_app.run_or_refusal(ended[0], "mine") == str(modal_app.run_folder("mine"))
    assert modal_app.run_or_refusal(ended[2], "mine").startswith(modal_app.REFUSAL)
    with pytest.raises(subprocess.CalledProcessError):
        modal_app.run_or_refusal(ended[1], "mine")
    modal_app.run_folder("mine").mkdir()
    (modal_app.run_folder("mine") / "config.yaml").touch()
    with pytest.raises(subprocess.CalledProcessError):  # a run that had begun may have lost a disk
        modal_app.run_or_refusal(ended[2], "mine")
