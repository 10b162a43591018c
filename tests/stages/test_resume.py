"""A run that was killed with SIGKILL and resumed ends with the same files as one that was not.

A fault point is a function and at which of its calls the process dies. The killed runs are forks
of this process (`run_until_killed`), at the end they are resumed here by the command line.
"""

import json
import os
import shutil
import signal
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragen_apo.cli import app
from ragen_apo.config import resolved_yaml
from ragen_apo.environments.human.play import play
from ragen_apo.environments.human.recordings import Recording, append_recording
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import CheckpointError, RunDirectoryError
from ragen_apo.files import PARTIAL_MARK, read_json_lines, write_checksums
from ragen_apo.run_directory import RunDirectory, open_run
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.factories import AlgorithmRuns, assert_same_tensors, rows, threads_restored
from tests.forks import Fork

pytestmark = pytest.mark.slow

UPDATE = "ragen_apo.warm_start.supervised:accumulate_supervised_gradients"
SAVE_MODEL = "ragen_apo.policy.language_model:LanguageModel.save"
STEP = "ragen_apo.training.trainer:Trainer.step"
FLUSH = "ragen_apo.files:sync_to_disk"

# The tiny configuration makes 12 copy updates, 40 updates on demonstrations (a checkpoint every 10)
# and 6 steps of Stage 2 (a checkpoint every 2, a new reference after 3).
FAULTS = {
    "in the demonstrations": (UPDATE, 12 + 35, "2-demonstrations-000030"),
    "inside a transaction of Stage 1": (
        "ragen_apo.values.store:zlib.compress",
        9,
        "2-demonstrations-000040",
    ),
    "while a new reference is saved": (SAVE_MODEL, 1, "4-training-000002"),
    "in Stage 2 between checkpoints": (STEP, 2, "4-training-000002"),
    "between a row of metrics and its checkpoint": (
        "ragen_apo.stages.training:save_checkpoint",
        1,
        "4-training-000002",
    ),
    "between the tensors of a checkpoint": (
        "ragen_apo.training.checkpoint:save_file",
        2,
        "4-training-000002",
    ),
    "while an old checkpoint is removed": (
        "ragen_apo.training.checkpoint:shutil.rmtree",
        3,  # the first two calls remove what the kill before left
        "4-training-000004",
    ),
    "while the trained policy is saved": (SAVE_MODEL, 1, "4-training-000006"),
    "between the episodes and the results of the evaluation": (
        "ragen_apo.run_directory:RunDirectory.write_evaluation",
        1,
        "4-training-000006",
    ),
}
"""In the order of a run: where it dies, at which call since it was resumed, and with which newest
checkpoint."""


NOTED = {
    "in the demonstrations": {"copy", "demonstrations"},
    "while a new reference is saved": {"copy", "demonstrations", "stage 1", "stage 2"},
}
"""Of which phases run.json has the seconds when it is killed there."""


def assert_killed(status: int, fault: str = "") -> None:
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed, f"never got there: {fault}"


def assert_same_state(actual: RunDirectory, expected: RunDirectory) -> None:
    """What the algorithm keeps besides the policy is equal in the newest checkpoints."""
    newest = [list_checkpoints(run.checkpoints)[-1] for run in (actual, expected)]
    states = [load_file(path / "algorithm.safetensors") for path in newest]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_that_is_killed_again_and_again_ends_with_the_files_of_one_that_was_not(
    run_until_killed: Callable[..., int], finished_run: Path, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    for fault, (target, call, newest) in FAULTS.items():
        assert_killed(run_until_killed(tmp_path, target=target, call=call), fault)
        assert list_checkpoints(run.checkpoints)[-1].name == newest, fault
        noted = run.read_status()["phases"]
        assert NOTED.get(fault, set()) <= set(noted), "the time up to the last checkpoint is kept"
        assert all(phase["seconds"] > 0 for phase in noted.values())
    resume(run.path)
    assert_same_run(run.path, finished_run)


def test_so_does_a_run_that_is_killed_at_every_fiftieth_flush_to_disk(
    run_until_killed: Callable[..., int], finished_run: Path, tmp_path: Path
) -> None:
    statuses = [run_until_killed(tmp_path, target=FLUSH, call=50)]
    while os.WIFSIGNALED(statuses[-1]) and len(statuses) < 10:
        statuses.append(run_until_killed(tmp_path, target=FLUSH, call=50))
    assert statuses[-1] == 0
    assert len(statuses) >= 3
    assert_same_run(tmp_path / "run", finished_run)


def test_so_does_one_whose_environments_act_side_by_side_in_processes_of_their_own(
    run_until_killed: Callable[..., int], tmp_path: Path
) -> None:
    """Before and after the kill; in the run that was not killed, one after another."""
    config = factories.config("--training.num_rows=5")  # so many processes
    whole = factories.run(config, tmp_path / "whole").path
    resume(whole)
    keys = ("--rollouts.num_environment_workers=4", "--rollouts.environment_processes=true")
    text = resolved_yaml(factories.changed(config, *keys))
    assert_killed(run_until_killed(tmp_path, target=STEP, call=4, text=text))
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_a_reference_that_was_saved_and_not_noted_is_noted_when_the_run_goes_on(
    run_until_killed: Callable[..., int], finished_run: Path, tmp_path: Path
) -> None:
    target = "ragen_apo.stages.pipeline:note_reference"
    assert_killed(run_until_killed(tmp_path, target=target, call=1))
    run = RunDirectory(tmp_path / "run")
    assert run.reference(0).exists() and "references" not in run.read_status()
    train(run.path, command="warm-start")
    noted = RunDirectory(finished_run).read_status()["references"]
    assert run.read_status()["references"] == {"0": noted["0"]}
    train(run.path)
    assert run.read_status()["references"] == noted


def test_recordings_are_those_of_the_beginning_whenever_the_run_is_killed(
    run_until_killed: Callable[..., int], tmp_path: Path
) -> None:
    shop = ShopEnvironment(num_products=24, max_turns=3)
    mine = tmp_path / "mine.jsonl"
    for task in shop.tasks("train")[:4]:
        lines = iter(["search blue", f"buy {task.payload['product_id']}"])
        episode = play(shop, task, read=lambda _, lines=lines: next(lines), write=lambda _: None)
        append_recording(mine, Recording(shop.properties.version, 0, episode))
    config = factories.config(f"--warm_start.demonstrations.recordings={mine}")
    target, text = "ragen_apo.stages.pipeline:copy_phase", resolved_yaml(config)
    assert_killed(run_until_killed(tmp_path, target=target, call=1, text=text))
    assert len(read_json_lines(tmp_path / "run" / "recordings.jsonl")) == 4
    mine.unlink()
    resume(tmp_path / "run")


def test_ppo_killed_between_its_policy_and_its_critic(
    run_until_killed: Callable[..., int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    # A checkpoint after 2 of 4 steps and one at the end, of three files each.
    status = run_until_killed(
        tmp_path,
        target="ragen_apo.training.checkpoint:save_file",
        call=3 + 3,
        text=resolved_yaml(algorithm_runs.config("ppo")),
    )
    assert_killed(status)
    run, expected = RunDirectory(tmp_path / "run"), algorithm_runs.finished("ppo")
    assert len(list_checkpoints(run.checkpoints)) == 1
    train(run.path)
    assert rows(run.metrics) == rows(expected.metrics)
    assert rows(run.rollouts) == rows(expected.rollouts)
    assert_same_tensors(run.policy, expected.policy)
    assert_same_state(run, expected)


def test_ppo_whose_critic_is_missing_from_the_checkpoint_is_refused(
    algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    run = RunDirectory(Path(shutil.copytree(algorithm_runs.finished("ppo").path, tmp_path / "run")))
    shutil.rmtree(run.policy)  # a finished run reads no checkpoint
    newest = list_checkpoints(run.checkpoints)[-1]
    whole = load_file(newest / "algorithm.safetensors")
    kept = {name: tensor for name, tensor in whole.items() if name.startswith("critic/")}
    resuming = ["train", "--run-dir", str(run.path), "--resume", "--no-evaluate"]
    for tensors in ({}, kept):  # no file, and one without the moments
        (newest / "algorithm.safetensors").unlink(missing_ok=True)
        if tensors:
            save_file(tensors, newest / "algorithm.safetensors")
        write_checksums(newest)
        with pytest.raises(
            CheckpointError, match=r"algorithm\.safetensors: tensor body\..* is missing"
        ):
            app(resuming)


def test_a_run_killed_in_the_middle_of_a_lag_is_played_on_by_the_lagged_policy(
    run_until_killed: Callable[..., int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    # Checkpoints after 2 and 4 of 4 steps of one update; who samples is renewed after 3.
    config = algorithm_runs.config("oapl", "--algorithm.lag=3")
    whole = factories.run(config, tmp_path / "whole")
    status = run_until_killed(tmp_path, target=STEP, call=4, text=resolved_yaml(config))
    assert_killed(status)
    run = RunDirectory(tmp_path / "run")
    (checkpoint,) = list_checkpoints(run.checkpoints)
    kept, trained = (
        load_file(checkpoint / f"{name}.safetensors") for name in ("algorithm", "model")
    )
    assert kept.pop("num_updates") == 2
    assert kept.keys() == {f"lagged/{name}" for name in trained}
    assert not all(torch.equal(kept[f"lagged/{name}"], trained[name]) for name in trained)
    train(run.path)
    assert [row["sampler_lag"] for row in rows(run.metrics)] == [0, 1, 2, 0]
    assert rows(run.metrics) == rows(whole.metrics)
    assert_same_tensors(run.policy, whole.policy)
    assert_same_state(run, whole)


@pytest.mark.usefixtures("few_random_features")
def test_a_run_with_a_context_window_and_values_by_regression_killed_in_stage_two(
    run_until_killed: Callable[..., int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    config = algorithm_runs.config(
        "apo_turn",
        "--agent.context={mode: last_turns, num_turns: 1}",
        "--values.estimator=regression",
    )
    whole = factories.run(config, tmp_path / "whole")
    # In the last of four steps, after the checkpoint of the second.
    status = run_until_killed(tmp_path, target=STEP, call=4, text=resolved_yaml(config))
    assert_killed(status)
    run = RunDirectory(tmp_path / "run")
    train(run.path)
    assert rows(run.metrics) == rows(whole.metrics)
    assert rows(run.rollouts) == rows(whole.rollouts)
    assert_same_tensors(run.policy, whole.policy)
    assert samples(run.path) == samples(whole.path)
    assert all(row["gradient_norm"] > 0 for row in rows(whole.metrics)), "or moments do not matter"
    assert all(row.get("known_turn_share", 1.0) == 1.0 for row in rows(whole.metrics))
    assert any('"restarts_context": true' in trajectory for trajectory in stored(whole.path))


@pytest.mark.parametrize(
    "target", ["ragen_apo.stages.training:save_checkpoint", SAVE_MODEL], ids=["before", "after"]
)
def test_a_run_that_a_rule_stops_killed_around_its_last_checkpoint(
    target: str, run_until_killed: Callable[..., int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    # Information among four tasks never exceeds log 4 = 1.39, so the third of four steps is the
    # last one. After a resume from step 2 the rule has to know of the first two.
    config = algorithm_runs.config(
        "rloo",
        "--training.early_stop={min_mutual_information: 9, patience: 3}",
        "--monitors.every_steps=1",
    )
    whole = factories.run(config, tmp_path / "whole")
    # The second checkpoint is the last one, the second model (after the reference) the policy.
    status = run_until_killed(tmp_path, target=target, call=2, text=resolved_yaml(config))
    assert_killed(status)
    run = factories.run(config, tmp_path / "run")
    assert len(rows(run.metrics)) == 3
    assert rows(run.metrics) == rows(whole.metrics)
    assert run.read_status()["early_stop"] == whole.read_status()["early_stop"]
    assert_same_tensors(run.policy, whole.policy)


def test_a_mixture_killed_in_the_middle_of_stage_two_goes_on(
    run_until_killed: Callable[..., int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    parts = {
        "shop": {"weight": 2, "num_products": 24},
        "lake": {"name": "frozen_lake", "slippery": False, "num_train_tasks": 8},
    }
    mixture = {"name": "mixture", "max_turns": 3, "parts": parts}
    config = algorithm_runs.config("apo", environment=mixture)
    expected = factories.run(config, tmp_path / "whole")
    # In the last of four steps, after the checkpoint of the second.
    status = run_until_killed(tmp_path, target=STEP, call=4, text=resolved_yaml(config))
    assert_killed(status)
    run = RunDirectory(tmp_path / "run")
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["4-training-000002"]
    train(run.path)
    assert rows(run.metrics) == rows(expected.metrics)
    assert rows(run.rollouts) == rows(expected.rollouts)
    assert_same_tensors(run.policy, expected.policy)


def test_a_selection_of_tasks_survives_kills_before_and_after_a_new_reference(
    run_until_killed: Callable[..., int], finished_run: Path, tmp_path: Path
) -> None:
    overrides = [
        f"--policy.path={finished_run / 'references' / '0'}",
        "--warm_start.enabled=false",
        "--values.num_samples=2",
        "--values.max_samples=4",
        "--reference.refresh_every_steps=2",
        "--rollout_filter.strategy=top_fraction",
        "--rollout_filter.value=0.5",
        "--training.max_tasks=14",
        "--training.max_steps=4",
        "--training.tasks_per_step=5",
        "--training.eval_every=null",
        "--training.checkpoint_every=1",
        "--evaluation.num_episodes=1",
    ]
    text = resolved_yaml(factories.config(*overrides))
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    assert run_until_killed(folders[0], target=STEP, call=100, text=text) == 0
    for call in (2, 3):  # in steps 2 and 4: with the first reference, and with the second
        status = run_until_killed(folders[1], target=STEP, call=call, text=text)
        assert_killed(status)
    assert run_until_killed(folders[1], target=STEP, call=100, text=text) == 0
    expected, run = (RunDirectory(folder / "run") for folder in folders)
    assert rows(run.metrics) == rows(expected.metrics)
    assert_same_tensors(run.policy, expected.policy)
    assert samples(run.path) == samples(expected.path)
    for version, steps in ((0, slice(0, 2)), (1, slice(2, 4))):
        report = document(expected.value_report_of(version))
        assert report == document(run.value_report_of(version))
        kept = report["selection"]["kept"]
        # Half of those with variance: less than half of the tasks, less than two steps.
        assert 0 < kept <= 7 and report["num_tasks"] == 14
        assert [row["num_training_tasks"] for row in rows(run.metrics)[steps]] == [kept, kept]


def test_two_processes_cannot_train_the_same_run(finished_run: Path, tmp_path: Path) -> None:
    def work() -> None:
        with open_run(finished_run).locked():
            print("locked")
            signal.pause()

    other = Fork(tmp_path / "output", work)
    try:
        other.says("locked")
        with pytest.raises(RunDirectoryError, match="another process is working on"):
            app(["train", "--run-dir", str(finished_run), "--resume"])
    finally:
        other.send(signal.SIGKILL)
        other.ended()
    with open_run(finished_run).locked():
        pass


def test_a_run_whose_only_checkpoint_was_removed_goes_on_from_its_reference(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    for name in ("checkpoints", "policy", "references/1"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", finished_run)


def train(path: Path, *, command: str = "train") -> None:
    arguments = [command, "--run-dir", str(path), "--resume"]
    if command == "train":
        arguments.append("--no-evaluate")
    with threads_restored():
        app(arguments, result_action="return_value")


def resume(path: Path) -> None:
    train(path)
    with threads_restored():
        app(["evaluate", str(path)], result_action="return_value")


def assert_same_run(actual: Path, expected: Path) -> None:
    for name in ("warm_start.jsonl", "metrics.jsonl"):
        assert rows(actual / name) == rows(expected / name)
    for folder in ("initial", "references/0", "references/1", "policy"):
        assert_same_tensors(actual / folder, expected / folder)
    assert samples(actual) == samples(expected)
    for name in ("value_report.json", "value_report_1.json", "evaluation/results.json"):
        assert document(actual / name) == document(expected / name)
    episodes = [read_json_lines(RunDirectory(run).episodes) for run in (actual, expected)]
    assert [without(row, "policy") for row in episodes[0]] == [
        without(row, "policy") for row in episodes[1]
    ]
    assert not list(actual.rglob(f"*{PARTIAL_MARK}*"))


def document(path: Path) -> dict[str, Any]:
    return without(json.loads(path.read_text()), "policy")


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def stored(run: Path) -> list[str]:
    """The trajectories of Stage 1 as JSON."""
    return [zlib.decompress(row[-1]).decode() for row in samples(run)]


def samples(run: Path) -> list[tuple]:
    with sqlite3.connect(RunDirectory(run).values) as connection:
        found = connection.execute(
            "SELECT conditions, task_id, sample_index, episode_return, success, zlib_json "
            "FROM samples JOIN trajectories USING (conditions, task_id, sample_index) "
            "ORDER BY conditions, task_id, sample_index"
        ).fetchall()
    connection.close()
    assert found
    return found
