"""`training.keep_best`: the policy has the weights of the best evaluation during training."""

import pkgutil
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ragen_apo.environments.base import make_environment
from ragen_apo.errors import CheckpointError, ConfigError
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages.best import BestWatch
from ragen_apo.stages.inputs import caveats
from tests import factories
from tests.factories import assert_same_tensors, rows

KEEP_BEST = (
    "--training.keep_best=true",
    "--training.eval_split=train",
    "--training.eval_every=1",
    "--training.keep_checkpoints=9",
    "--warm_start.demonstrations.num_steps=1",
    "--warm_start.copy.max_steps=0",
    "--optimizer.learning_rate=0.01",
    "--values.baseline=zero",  # returns are equal here, and so are they and V*
)
SUCCESS = (0.2, 0.7, 0.1, 0.3, 0.7, 0.6)
"""Of the evaluation after each step, as the tests pretend."""


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the evaluations from now on these success rates, and rewards."""

    def outcomes(*successes: float, reward: float = 0.0) -> None:
        left: Iterator[float] = iter(successes)

        def outcome(_: object) -> dict[str, float]:
            return {"success_rate": next(left), "avg_reward": reward, "avg_steps": 1.0}

        monkeypatch.setattr("ragen_apo.stages.training.outcome_summary", outcome)

    return outcomes


def checkpoint(run: RunDirectory, step: int) -> Path:
    return run.checkpoints / f"4-training-{step:06d}"


def evaluated(step: int, success: float, reward: float = 0.0) -> dict[str, float]:
    return {"step": step, "eval_success_rate": success, "eval_avg_reward": reward}


def test_the_best_is_the_latest_of_the_highest_success_and_reward() -> None:
    watch = BestWatch([{"step": 1}, evaluated(2, 0.5, 0.1), evaluated(4, 0.4, 9.0)])
    assert watch.step == 2
    assert not watch.note(evaluated(6, 0.5, 0.0))
    assert watch.note(evaluated(8, 0.5, 0.2))
    assert watch.note(evaluated(10, 0.5, 0.2))
    assert not watch.note({"step": 11})
    assert (watch.step, watch.success_rate) == (10, 0.5)
    assert BestWatch().step is None


def test_a_split_that_the_final_evaluation_plays_is_refused(tmp_path: Path) -> None:
    for split in ("null", "test"):
        config = factories.config(*KEEP_BEST, f"--training.eval_split={split}")
        with pytest.raises(ConfigError, match=r"by 3 tasks of .*, and 3 of .*: train$"):
            factories.run(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"training\.eval_split: .*nowhere"):
        factories.run(factories.config("--training.eval_split=nowhere"), tmp_path / "run")
    with pytest.raises(ConfigError, match="keep_best chooses among the evaluations"):
        factories.config(*KEEP_BEST, "--training.eval_every=null")
    assert not (tmp_path / "run" / "policy").exists()


@pytest.mark.slow
def test_the_policy_is_that_of_the_best_step(pretend: Callable[..., None], tmp_path: Path) -> None:
    pretend(*SUCCESS)
    run = factories.run(factories.config(*KEEP_BEST), tmp_path / "run")
    assert [row["eval_success_rate"] for row in rows(run.metrics)] == list(SUCCESS)
    assert_same_tensors(run.policy, checkpoint(run, 5))
    with pytest.raises(AssertionError):
        assert_same_tensors(run.policy, checkpoint(run, 6))
    best = {"step": 5, "success_rate": 0.7, "split": "train"}
    assert run.read_status()["best"] == best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "call", "num_done"),
    [
        ("ragen_apo.training.trainer:Trainer.step", 4, 2),
        ("ragen_apo.stages.training:save_checkpoint", 1, 0),  # after the first best one is kept
        ("ragen_apo.stages.training:save_checkpoint", 4, 4),  # after the last, step 5
        ("ragen_apo.stages.pipeline:note_stage_one_tokens", 1, 6),
    ],
)
def test_so_is_that_of_a_run_that_was_interrupted(
    place: str,
    call: int,
    num_done: int,
    pretend: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config, run = factories.config(*KEEP_BEST), RunDirectory(tmp_path / "run")
    pretend(*SUCCESS)
    whole = factories.run(config, tmp_path / "whole")
    pretend(*SUCCESS)
    interrupted(monkeypatch, place, call, lambda: factories.run(config, run.path))
    pretend(*SUCCESS[num_done:])
    factories.run(config, run.path)
    assert_same_tensors(run.policy, whole.policy)
    assert run.read_status()["best"] == whole.read_status()["best"]


def interrupted(
    monkeypatch: pytest.MonkeyPatch, place: str, call: int, make: Callable[[], object]
) -> None:
    """`make` until this call of the function at `place`, which does not come back."""
    function, calls = pkgutil.resolve_name(place), []

    def stop(*args: Any, **keys: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(place.replace(":", "."), stop)
        with pytest.raises(KeyboardInterrupt):
            make()


@pytest.mark.slow
def test_evaluations_that_a_kill_has_undone_count_for_nothing(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They may come out otherwise on a GPU or by a server, and the run has to end all the same."""
    config, run = factories.config(*KEEP_BEST), RunDirectory(tmp_path / "run")
    for again in ((0.2, 0.7, 0.8), (0.1, 0.8)):  # the best so far, killed before its checkpoint
        pretend(*again)
        place, call = "ragen_apo.stages.training:save_checkpoint", 3 if len(again) == 3 else 1
        interrupted(monkeypatch, place, call, lambda: factories.run(config, run.path))
    pretend(0.1, 0.1, 0.1, 0.1)
    factories.run(config, run.path)
    assert run.read_status()["best"] == {"step": 2, "success_rate": 0.7, "split": "train"}
    assert_same_tensors(run.policy, checkpoint(run, 2))


@pytest.mark.slow
def test_damaged_weights_are_said_and_the_run_can_do_without_them(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, run = factories.config(*KEEP_BEST), RunDirectory(tmp_path / "run")
    pretend(*SUCCESS)
    place = "ragen_apo.stages.training:take_best"
    interrupted(monkeypatch, place, 1, lambda: factories.run(config, run.path))
    damaged = run.best / "4-training-000005"
    (damaged / "model.safetensors").write_bytes(b"others")
    with pytest.raises(CheckpointError, match=r"000005 cannot be read: .* Or remove the folder"):
        factories.run(config, run.path)
    shutil.rmtree(damaged)
    factories.run(config, run.path)
    assert_same_tensors(run.policy, checkpoint(run, 6))


def test_choosing_by_tasks_that_are_trained_on_is_said() -> None:
    environments = make_environment("shop", {"num_products": 24, "max_turns": 3})
    few = "--training.max_tasks=10"
    said = caveats(factories.config(*KEEP_BEST), environments)
    assert any("chooses by 4 tasks, of which 4 are trained on" in each for each in said)
    said = caveats(factories.config(*KEEP_BEST, few), environments)
    assert not any("keep_best" in each for each in said)


@pytest.mark.slow
def test_it_may_be_what_was_distilled(pretend: Callable[..., None], tmp_path: Path) -> None:
    pretend(0.9, *SUCCESS)
    learned = "--warm_start.demonstrations.num_steps=40"  # some of its episodes succeed
    config = factories.config(*KEEP_BEST, learned, "--distillation.enabled=true")
    run = factories.run(config, tmp_path / "run")
    assert run.read_status()["best"]["step"] == 0
    assert_same_tensors(run.policy, run.distilled)


@pytest.mark.slow
def test_adapters_are_those_of_the_best_step(
    pretend: Callable[..., None], qwen_folder: Path, tmp_path: Path
) -> None:
    pretend(0.7, 0.1)
    config = factories.config(
        *KEEP_BEST,
        f"--policy.path={qwen_folder}",
        "--policy.lora.rank=4",
        "--agent.max_context_tokens=1024",
        "--training.max_steps=2",
    )
    run = factories.run(config, tmp_path / "run")
    first, second = (load_file(checkpoint(run, step) / "model.safetensors") for step in (1, 2))
    adapters = load_file(run.adapter / "adapter_model.safetensors")
    for tensors, is_kept in ((first, True), (second, False)):
        pairs = zip(sorted(adapters), sorted(tensors), strict=True)
        assert all(adapters[own].equal(tensors[other]) for own, other in pairs) == is_kept
