"""The plan of a run's disk against what runs have written."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ragen_apo
from ragen_apo.config import RunConfig, load_config
from ragen_apo.errors import ConfigError
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages import pipeline
from ragen_apo.stages.disk import DiskPlan, free_disk, plan_disk
from ragen_apo.stages.memory import saved_sizes
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.factories import AlgorithmRuns, threads_restored

HEADERS = 64 * 1024
"""More than the names and shapes of a small model's tensors take in a file, in bytes."""


def weights_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def plan(config: RunConfig, model: Path, folder: Path, **options: Any) -> DiskPlan:
    policy = load_language_model(model, device=torch.device("cpu"))
    return plan_disk(config, saved_sizes(config.policy, policy.model), folder, **options)


def require_near(written: int, planned: int) -> None:
    assert planned <= written < planned + HEADERS


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "ppo", "oapl"])
def test_models_and_checkpoints_are_as_large_as_planned(
    algorithm: str, algorithm_runs: AlgorithmRuns
) -> None:
    run, config = algorithm_runs.finished(algorithm), algorithm_runs.config(algorithm)
    planned = plan(config, run.policy, run.path)
    checkpoint = list_checkpoints(run.checkpoints)[-1]
    require_near(weights_in(run.policy), planned.model)
    require_near(weights_in(checkpoint), planned.checkpoint)
    assert planned.written == weights_in(run.path) - weights_in(run.policy)
    assert planned.missing >= weights_in(run.policy) - HEADERS, "a run that goes on saves another"
    folders = [run.reference(0), run.policy]
    assert planned.num_models == len(folders), "a reference and a policy; the model is elsewhere"


@pytest.mark.slow
def test_a_lagged_copy_has_the_frozen_embeddings_as_well(
    qwen_folder: Path, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = (f"--policy.path={qwen_folder}", "--policy.freeze_embeddings=true", "--algorithm.lag=3")
    config = algorithm_runs.config("oapl", *keys, "--training.max_steps=1")
    run = factories.run(config, tmp_path / "run")
    planned = plan(config, run.policy, run.path)
    require_near(weights_in(list_checkpoints(run.checkpoints)[-1]), planned.checkpoint)


def test_references_that_no_plan_counts_take_no_room_from_what_is_planned(
    qwen_folder: Path, tmp_path: Path
) -> None:
    """`reference.refresh_max_kl` may ask for any number of them."""
    config = factories.config("--reference.refresh_every_steps=null", "--training.max_steps=6")
    missing = plan(config, qwen_folder, tmp_path).missing
    for version in range(5):
        folder = tmp_path / "references" / str(version)
        shutil.copytree(qwen_folder, folder)
    after = plan(config, qwen_folder, tmp_path)
    assert missing - after.missing == pytest.approx(after.model, abs=HEADERS)


@pytest.mark.slow
def test_a_whole_run_has_as_many_models_as_planned(finished_run: Path, tmp_path: Path) -> None:
    run, config = RunDirectory(finished_run), load_config(RunDirectory(finished_run).config)
    planned = plan(config, run.policy, tmp_path)
    folders = {file.parent for file in run.path.rglob("model.safetensors")}
    models = [each for each in folders if each.parent != run.checkpoints]
    assert planned.num_models == len(models)
    most = config.training.keep_checkpoints + 1
    assert planned.num_checkpoints == most, "the new one is written before the oldest goes"
    only_reference = plan(config, run.policy, tmp_path, only_reference=True)
    assert only_reference.num_models == 2, "initial/ and references/0/"


@pytest.mark.slow
def test_a_warm_start_has_as_many_checkpoints_as_planned(tmp_path: Path) -> None:
    config = factories.config("--training.keep_checkpoints=9")
    with threads_restored():
        started = ragen_apo.train(config, tmp_path / "run", until="reference", progress=False)
    run = started.files
    made = list_checkpoints(run.checkpoints)
    assert [each.name for each in made][:2] == ["1-copy-000010", "1-copy-000012"]
    planned = functools.partial(plan, model=run.reference(0), folder=tmp_path)
    assert planned(config, only_reference=True).num_checkpoints == len(made) == 6
    assert planned(config).num_checkpoints == 6 + 3, "one every second step of six"
    distilled = factories.changed(config, "--distillation.enabled=true")
    assert planned(distilled).num_checkpoints == 9 + 1, "as many as may be kept, and a new one"
    keys = ("--training.max_tasks=8", "--warm_start.enabled=false", "--distillation.num_epochs=20")
    few = planned(factories.changed(distilled, *keys))
    # 20 times 8 tasks of 2 samples are 20 updates of 16, with 2 checkpoints.
    assert few.num_checkpoints == 2 + 3


@pytest.mark.slow
def test_each_new_reference_is_a_model_but_for_one_after_the_last_step(
    qwen_folder: Path, tmp_path: Path
) -> None:
    def models(steps: int | None) -> int:
        every = "null" if steps is None else steps
        keys = (f"--reference.refresh_every_steps={every}", "--training.max_steps=6")
        return plan(factories.config(*keys), qwen_folder, tmp_path).num_models

    assert [models(steps) - models(None) for steps in (1, 2, 3, 5, 6)] == [5, 2, 1, 1, 0]
    assert factories.config("--reference.refresh_every_steps=3").reference.num_after_steps(0) == 0


def test_a_disk_without_room_is_refused_with_what_to_do(tmp_path: Path) -> None:
    gib = 2**30
    made = DiskPlan(num_models=2, model=gib, num_checkpoints=3, checkpoint=3 * gib, written=gib)
    made.require(10 * gib, tmp_path)
    expected = (
        f"{tmp_path} needs 10.0 GiB more for 2 models of 1.0 GiB and 3 checkpoints of 3.0 GiB, and "
        "its disk has 9.9 GiB free; free space, take another disk (--run-dir), lower "
        "training.keep_checkpoints, or train adapters (policy.lora)"
    )
    with pytest.raises(ConfigError) as caught:
        made.require(int(9.9 * gib), tmp_path)
    assert str(caught.value) == expected


def test_nothing_is_left_of_a_run_that_finds_no_room(
    monkeypatch: pytest.MonkeyPatch, qwen_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(pipeline, "free_disk", lambda _: 1000)
    pretrained = (f"--policy.path={qwen_folder}", "--warm_start.enabled=false")
    config = factories.config(*pretrained)
    with pytest.raises(ConfigError, match=r"its disk has 0\.0 MiB free"):
        factories.run(config, tmp_path / "run")
    assert not RunDirectory(tmp_path / "run").has_begun


def test_the_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "not" / "there") > 0
