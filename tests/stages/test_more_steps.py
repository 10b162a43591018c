"""Runs that are given more steps after their last one, or end after fewer than were planned."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import ragen_apo
from ragen_apo.config import load_config, resolved_yaml
from ragen_apo.errors import CheckpointError, ConfigError, RunDirectoryError, ServerError
from ragen_apo.files import read_json_lines
from ragen_apo.phase_clock import PhaseClock
from ragen_apo.report.algorithm import circumstances
from ragen_apo.report.load import load_run
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages import pipeline
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.command_line import Command, assert_refused, snapshot
from tests.factories import (
    AlgorithmRuns,
    assert_same_tensors,
    made_once,
    rows,
    threads_restored,
)
from tests.stages.test_resume import assert_killed, assert_same_run


def go_on(path: Path, max_steps: int, **sections: Any) -> RunDirectory:
    """The run, trained up to this step."""
    with threads_restored():
        training = {"max_steps": max_steps}
        run = ragen_apo.train(
            None, path, resume=True, progress=False, training=training, **sections
        )
    return run.files


def going_on(run: RunDirectory) -> tuple[object, ...]:
    """The command that does so, without an evaluation and a report."""
    return "train", "--run-dir", run.path, "--resume", "--no-evaluate"


@pytest.mark.slow
def test_a_run_of_three_steps_that_goes_on_to_six_ends_like_one_of_six(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    """After the third step a new reference is due, which a run of three has no use for."""
    config = tmp_path / "tiny.yaml"
    config.write_text(factories.TINY_CONFIG)
    path = tmp_path / "run"
    three = command("train", "--config", config, "--run-dir", path, "--training.max_steps", 3)
    assert three.status == 0
    assert not (path / "references" / "1").exists()
    evaluated = RunDirectory(path).read_status()["phases"]["evaluation"]["seconds"]
    before = {name: snapshot(path / name) for name in ("policy", "evaluation", "report")}

    result = command("train", "--run-dir", path, "--resume", "--training.max_steps", 6)

    assert result.status == 0
    earlier = path / "earlier" / "step-000003"
    assert f"3 of 6 steps are made; their policy, evaluation and report are in {earlier}" in (
        " ".join(result.out.split())
    )
    assert {name: snapshot(earlier / name) for name in before} == before
    assert_same_run(path, finished_run)
    assert load_config(path / "config.yaml").training.max_steps == 6
    phases = RunDirectory(path).read_status()["phases"]
    assert phases["evaluation"]["seconds"] > evaluated > 0, "of both evaluations"
    assert "The run had ended after step 3 and was given more steps." in circumstances(
        load_run(path)
    )
    assert "is trained already" in command("train", "--run-dir", path, "--resume").out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("apo", ["--distillation.enabled=true", "--reference.refresh_every_steps=2"]),
        ("apo", ["--reference.refresh_max_kl=1e-9"]),
        ("ppo", []),
        ("oapl", ["--algorithm.lag=3"]),
    ],
)
def test_so_does_a_run_whose_algorithm_keeps_more_than_a_policy(
    algorithm: str, overrides: list[str], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    config = algorithm_runs.config(algorithm, *overrides)
    if overrides:
        whole = factories.run(config, tmp_path / "whole")
    else:
        whole = algorithm_runs.finished(algorithm)
    longer = factories.run(factories.changed(config, "--training.max_steps=2"), tmp_path / "two")
    go_on(longer.path, 4)
    for curve in ("metrics", "rollouts", "distillation"):
        files = [getattr(run, curve) for run in (longer, whole)]
        assert files[0].exists() == files[1].exists()
        assert not files[0].exists() or rows(files[0]) == rows(files[1])
    assert longer.reference_versions() == whole.reference_versions()
    assert_same_tensors(longer.policy, whole.policy)


@pytest.fixture(scope="module")
def of_three_steps(shared: Path) -> Path:
    """A run of three steps, evaluated; read only."""

    def make(path: Path) -> None:
        factories.run(factories.config("--training.max_steps=3"), path)
        with threads_restored():
            ragen_apo.evaluate(path, progress=False)

    return made_once(shared / "of-three-steps", make)


@pytest.mark.slow
@pytest.mark.parametrize("call", range(1, 4))
def test_a_kill_while_results_are_set_aside_loses_nothing(
    call: int,
    run_until_killed: Callable[..., int],
    finished_run: Path,
    of_three_steps: Path,
    tmp_path: Path,
) -> None:
    run = RunDirectory(Path(shutil.copytree(of_three_steps, tmp_path / "run")))
    run.config.write_text(resolved_yaml(factories.config()))
    target = "ragen_apo.stages.more_steps:sync_to_disk"
    # Evaluation and policy are moved; the third call does not come.
    status = run_until_killed(tmp_path, target=target, call=call)
    if call < 3:
        assert_killed(status)
        # Nothing calls os.kill, so such a run is not killed.
        assert run_until_killed(tmp_path, target="os:kill", call=1) == 0
    assert {path.name for path in run.earlier(3).iterdir()} == {"policy", "evaluation"}
    assert run.read_status()["went_on_after"] == [3]
    assert_same_run(run.path, finished_run)


@pytest.mark.slow
def test_a_run_of_no_steps_begins_stage_two(algorithm_runs: AlgorithmRuns, tmp_path: Path) -> None:
    config = algorithm_runs.config("grpo")
    run = factories.run(factories.changed(config, "--training.max_steps=0"), tmp_path / "none")
    go_on(run.path, 4)
    assert_same_tensors(run.policy, algorithm_runs.finished("grpo").policy)


@pytest.mark.slow
def test_a_run_goes_on_more_than_once(algorithm_runs: AlgorithmRuns, tmp_path: Path) -> None:
    config = algorithm_runs.config("grpo")
    run = factories.run(factories.changed(config, "--training.max_steps=1"), tmp_path / "one")
    for max_steps in (3, 4):
        go_on(run.path, max_steps)
    assert run.read_status()["went_on_after"] == [1, 3]
    with pytest.raises(RunDirectoryError, match=r"max_steps is 1, and .* has made 4 steps"):
        go_on(run.path, 1)
    assert_same_tensors(run.policy, algorithm_runs.finished("grpo").policy)


def test_a_run_that_was_interrupted_may_end_after_the_steps_that_it_has(unfinished: Path) -> None:
    run = RunDirectory(unfinished)
    shutil.rmtree(list_checkpoints(run.checkpoints)[-1])  # that of step 6 of 6
    before = snapshot(unfinished)
    with pytest.raises(RunDirectoryError, match=r"has made 4 steps already; expected at least 4,"):
        go_on(unfinished, 3)
    assert snapshot(unfinished) == before
    go_on(unfinished, 4)
    assert [row["step"] for row in read_json_lines(run.metrics)] == [1, 2, 3, 4]
    assert run.policy.exists()


def test_a_finished_run_cannot_be_given_fewer_steps(command: Command, run: Path) -> None:
    before = snapshot(run)
    for max_steps in (5, 0):
        result = command("train", "--run-dir", run, "--resume", "--training.max_steps", max_steps)
        assert_refused(result, f"training.max_steps is {max_steps}", "has made 6 steps already")
    assert snapshot(run) == before


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_learning_rate_that_has_fallen_goes_on_as_that_of_the_longer_run_and_the_run_says_so(
    schedule: str, command: Command, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    config = algorithm_runs.config("grpo", f"--optimizer.schedule={schedule}")
    whole = factories.run(config, tmp_path / "whole")
    run = factories.run(factories.changed(config, "--training.max_steps=2"), tmp_path / "run")
    result = command("train", "--run-dir", run.path, "--resume", "--training.max_steps", 4)
    said = " ".join(result.out.split())
    assert "fallen as in a run of 2 steps and goes on as in one of 4" in said
    rates, expected = (
        [row["learning_rate"] for row in read_json_lines(each.metrics)] for each in (run, whole)
    )
    assert rates[2:] == expected[2:]
    assert rates[1] < expected[1]
    assert any("its learning rate rose again" in each for each in circumstances(load_run(run.path)))


@pytest.mark.slow
def test_a_run_that_goes_on_again_names_every_number_of_steps_that_it_was_to_make(
    command: Command, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    config = algorithm_runs.config("grpo", "--optimizer.schedule=linear", "--training.max_steps=1")
    run = factories.run(config, tmp_path / "run")
    go_on(run.path, 2)
    result = command(*going_on(run), "--training.max_steps", 3)
    assert "max_steps was 1 and 2 and is 3: the learning rate" in " ".join(result.out.split())


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["describe_servers", "set_results_aside"])
def test_a_run_of_no_steps_that_is_given_some_has_not_made_them_if_it_is_interrupted(
    killed_in: str,
    algorithm_runs: AlgorithmRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = factories.changed(algorithm_runs.config("grpo"), "--training.max_steps=0")
    run = factories.run(config, tmp_path / "none")

    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, killed_in, interrupted)
        with pytest.raises(KeyboardInterrupt):
            go_on(run.path, 4)
    go_on(run.path, 4)
    assert run.read_status()["went_on_after"] == [0]
    assert run.earlier(0).exists()
    assert_same_tensors(run.policy, algorithm_runs.finished("grpo").policy)


@pytest.mark.slow
def test_a_run_says_that_samples_were_added_to_its_stage_one(
    command: Command, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    config = algorithm_runs.config("apo", "--training.max_steps=1", "--values.adaptive=false")
    run = factories.run(config, tmp_path / "run")
    (before,) = run.read_status()["samples_of_references"].values()
    num_samples = 2 * config.values.num_samples
    assert command("estimate-values", run.path, "--samples", num_samples).status == 0
    result = command(*going_on(run), "--training.max_steps", 2)
    after = run.read_status()["samples_of_references"]["0"]
    assert after == 2 * before
    said = f"Stage 1 of reference 0 has {after} samples now, and had {before} when"
    assert said in " ".join(result.out.split())


@pytest.mark.slow
def test_samples_that_nothing_reads_are_not_said_to_be_used(
    command: Command, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = ("--training.max_steps=1", "--values.adaptive=false", "--values.baseline=zero")
    run = factories.run(algorithm_runs.config("apo", *keys), tmp_path / "run")
    assert command("estimate-values", run.path, "--samples", 9).status == 0
    result = command(*going_on(run), "--training.max_steps", 2)
    assert result.status == 0
    assert "when this run read it before" not in " ".join(result.out.split())


@pytest.mark.slow
def test_a_regression_counts_as_stage_one_once(
    algorithm_runs: AlgorithmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    timed = PhaseClock.timed

    def noted(clock: PhaseClock, phase: str, **options: Any) -> Any:
        calls.append(phase)
        return timed(clock, phase, **options)

    monkeypatch.setattr(PhaseClock, "timed", noted)
    keys = ("--training.max_steps=1", "--values.estimator=regression", "--training.max_tasks=6")
    run = factories.run(algorithm_runs.config("apo", *keys), tmp_path / "run")
    assert calls.count("stage 1") == 2, "samples, then the regression on them"
    calls.clear()
    go_on(run.path, 2)
    assert calls.count("stage 1") == 1


@pytest.mark.slow
def test_without_its_last_checkpoint_a_run_goes_on_from_the_one_before(
    of_three_steps: Path, finished_run: Path, tmp_path: Path
) -> None:
    """As the message for a damaged checkpoint advises."""
    path = Path(shutil.copytree(of_three_steps, tmp_path / "run"))
    last = list_checkpoints(path / "checkpoints")[-1]
    assert last.name == "4-training-000003"
    (last / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"Remove the folder .* \(4-training-000002\)"):
        go_on(path, 6)
    shutil.rmtree(last)
    run, whole = go_on(path, 6), RunDirectory(finished_run)
    assert rows(run.metrics) == rows(whole.metrics)
    assert_same_tensors(run.policy, whole.policy)


def test_without_a_checkpoint_a_run_is_not_trained_again(run: Path) -> None:
    for checkpoint in list_checkpoints(run / "checkpoints"):
        shutil.rmtree(checkpoint)
    before = snapshot(run)
    with pytest.raises(RunDirectoryError, match=r"has made 6 steps, but .* no checkpoint of them"):
        go_on(run, 8)
    assert snapshot(run) == before
    go_on(run, 6)
    assert snapshot(run) == before


def test_a_run_that_is_refused_keeps_its_configuration(run: Path) -> None:
    shutil.rmtree(run / "references")
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"references/0 is missing"):
        go_on(run, 8)
    assert (run / "config.yaml").read_bytes() == before
    assert not (run / "earlier").exists()


def test_results_stay_where_they_are_until_the_servers_have_answered(run: Path) -> None:
    before = snapshot(run / "policy")
    with pytest.raises(ServerError, match="connection failed"):
        go_on(run, 8, rollouts={"engine": "vllm", "base_url": "http://127.0.0.1:9"})
    assert snapshot(run / "policy") == before
    assert not (run / "earlier").exists()


@pytest.mark.parametrize("has_notes", [True, False])
def test_a_finished_run_that_has_lost_its_steps_is_not_trained_again(
    has_notes: bool, run: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    if not has_notes:
        (run / "run.json").unlink()
    before = snapshot(run)
    go_on(run, 6)
    with pytest.raises(RunDirectoryError, match=r"has made 6 steps, but .* no checkpoint"):
        go_on(run, 8)
    assert snapshot(run) == before


@pytest.mark.slow
def test_before_its_first_step_a_run_gets_the_learning_rates_of_its_new_number(
    command: Command, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    config = algorithm_runs.config("grpo", "--optimizer.schedule=linear")
    run = factories.run(factories.changed(config, "--training.max_steps=0"), tmp_path / "run")
    go_on(run.path, 2)
    shutil.rmtree(run.policy)  # it was interrupted when it had made both
    result = command(*going_on(run))
    assert "the learning rate has fallen" not in result.out
    assert run.policy.exists()


def test_a_run_that_a_rule_has_stopped_stays_stopped(
    command: Command, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    rules = ["--training.early_stop.patience=1", "--training.early_stop.min_entropy=100"]
    run = factories.run(algorithm_runs.config("grpo", *rules), tmp_path / "run")
    assert run.read_status()["early_stop"]["step"] == 1
    before = snapshot(run.path)
    result = command(*going_on(run), "--training.max_steps", 9)
    assert "is trained already; it stopped after step 1: entropy" in result.out
    assert {name for name, _ in snapshot(run.path).items() ^ before.items()} <= {"config.yaml"}


# Keys that may change


def test_keys_that_may_change_are_written_down(unfinished: Path) -> None:
    go_on(unfinished, 6, rollouts={"num_environment_workers": 2}, evaluation={"pass_k": 3})
    kept = load_config(unfinished / "config.yaml")
    assert kept.rollouts.num_environment_workers == 2
    assert kept.evaluation.pass_k == 3


def test_one_key_that_may_not_change_changes_none(unfinished: Path) -> None:
    before = snapshot(unfinished)
    with pytest.raises(RunDirectoryError, match=r"one given: seed was 0 and is 3\. .* What may"):
        go_on(unfinished, 6, seed=3, evaluation={"pass_k": 3})
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        go_on(unfinished, -1)
    assert snapshot(unfinished) == before


def test_the_run_says_that_code_is_trusted_only_if_it_did(unfinished: Path) -> None:
    text = (unfinished / "config.yaml").read_text()
    assert "trust_remote_code: false" in text
    with threads_restored():
        ragen_apo.train(
            *(None, unfinished),
            resume=True,
            trust_remote_code=True,
            progress=False,
            evaluation={"pass_k": 3},
        )
    assert "trust_remote_code: false" in (unfinished / "config.yaml").read_text()


def test_the_keys_of_the_start_may_be_given_again(command: Command, run: Path) -> None:
    """As a scheduler does, which gives the command of a killed job once more."""
    began = load_config(run / "config.yaml")
    name, options = began.environment.name, began.environment.options
    keys = [f"--environment.{key}={value}" for key, value in {"name": name, **options}.items()]
    keys += [f"--seed={began.seed}", f"--algorithm={began.algorithm.name}", "--no-evaluate"]
    result = command("train", "--run-dir", run, "--resume", *keys)
    assert "is trained already" in result.out, result.err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["--algorithm.beta2", 0.5], "algorithm.beta2 was 0.05 and is 0.5"),
        (["--environment.num_products", 5], "a run goes on with its own environment"),
        (["--training.max_step", 5], "did you mean training.max_steps"),
        (["--training.max_steps"], "no value"),
    ],
)
def test_overrides_that_a_run_cannot_go_on_with(
    override: list[object], says: str, command: Command, run: Path
) -> None:
    before = snapshot(run)
    assert_refused(command("train", "--run-dir", run, "--resume", *override), says)
    assert snapshot(run) == before
