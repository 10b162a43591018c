"""The command line: what people type, what they read, and the exit status that scripts see."""

import errno
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ragen_apo import api, cli
from ragen_apo.cli.evaluation import evaluate_run
from ragen_apo.config import load_config
from ragen_apo.config.overrides import parse_options
from ragen_apo.environments.base import make_environment
from ragen_apo.environments.contract import PROMISES
from ragen_apo.environments.frozen_lake import FrozenLakeWorld
from ragen_apo.evaluation.summary import results_document
from ragen_apo.files import append_json_line, read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.trainer import Trainer
from ragen_apo.warm_start import phases, supervised
from tests import factories
from tests.command_line import Command, Result, assert_refused, snapshot
from tests.forks import forked_command
from tests.sweeps import quick_first

COMPARISON = Path(__file__).resolve().parents[1] / "configs" / "compare_shop.yaml"
VERBS = (
    "train",
    "estimate-values",
    "evaluate",
    "report",
    "compare",
    "play",
    "check",
    "show-prompt",
)


# Help and a whole run


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_every_verb_explains_itself(arguments: list[str], command: Command) -> None:
    result = command(*arguments)
    assert result.status == 0
    assert "Usage: ragen-apo" in result.out
    names = VERBS if arguments == ["--help"] else [arguments[0]]
    assert all(name in result.out for name in names)


EXAMPLE_PAGES = (
    (),
    *((verb,) for verb in VERBS),
    ("data",),
    ("data", "webshop"),
    ("view",),
    ("serve",),
)


def examples_of(page: tuple[str, ...], command: Command) -> list[str]:
    """The example commands as they stand in a help page, without `ragen-apo`."""
    _, found, epilogue = command(*page, "--help").out.partition("Examples:")
    assert found, f"{page} has no examples"
    return [
        line.strip().removeprefix("ragen-apo ") for line in epilogue.splitlines() if line.strip()
    ]


@pytest.mark.parametrize("page", EXAMPLE_PAGES, ids=" ".join)
def test_every_help_page_ends_with_examples_that_can_be_parsed(
    page: tuple[str, ...], command: Command
) -> None:
    examples = examples_of(page, command)
    assert 1 <= len(examples) <= 3
    for example in examples:
        words = shlex.split(example)
        assert tuple(words[: len(page)]) == page
        function, bound, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
        assert callable(function)
        assert_understood(dict(bound.arguments))


def assert_understood(arguments: dict[str, Any]) -> None:
    """What the parser leaves to others: configurations, their keys, options of environments."""
    if "config" in arguments:
        path = COMPARISON.parents[1] / arguments["config"]
        assert path.exists()
        if not path.name.startswith("compare"):
            load_config(path, list(arguments.get("overrides", ())))
    if "environment" in arguments:
        make_environment(arguments["environment"], parse_options(arguments.get("options", ())))


def test_an_unknown_verb_is_refused_with_status_2(command: Command) -> None:
    assert command("trian").status == 2


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_train_evaluates_and_reports_in_one_command_and_names_the_algorithm_that_was_run(
    command: Command, config: Path, tmp_path: Path
) -> None:
    quick = ["--warm_start.enabled", "false", "--training.max_steps", 1, "--algorithm", "dr_grpo"]
    group = ["--algorithm.group_size", 2]
    result = command("train", "--config", config, "--run-dir", tmp_path / "new", *quick, *group)
    assert result.status == 0, result.message
    for name in ("policy", "metrics.jsonl", "evaluation/results.json", "report/report.html"):
        assert (tmp_path / "new" / name).exists()
    for said in (f"trained policy: {tmp_path}", "report:", "95% interval"):
        assert said in result.out
    assert "Dr. GRPO compares several rollouts" in result.out
    assert "Dr. GRPO (trained)" in result.out
    assert "A*-PO" not in result.out
    summary = (tmp_path / "new" / "report" / "summary.csv").read_text()
    assert "Dr. GRPO (trained)" in summary


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("distils", ["true", "false"])
def test_the_policy_of_a_run_of_no_step_is_not_called_trained(
    distils: str, command: Command, config: Path, tmp_path: Path
) -> None:
    """Nor distilled, as this one has no success to imitate."""
    quick = ["--warm_start.enabled", "false", "--training.max_steps", 0]
    distilling = ["--distillation.enabled", distils]
    result = command(
        "train", "--config", config, "--run-dir", tmp_path / "new", *quick, *distilling
    )
    assert result.status == 0, result.message
    assert "policy (not trained)" in result.out
    assert "95% interval of the policy" in result.out
    assert "policy (not trained)" in (tmp_path / "new" / "report" / "summary.csv").read_text()
    assert "(trained)" not in result.out


def test_the_policy_of_a_run_that_only_distils_is_called_distilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = api.Run(RunDirectory(tmp_path), factories.config("--training.max_steps=0"))
    append_json_line(run.files.distillation, {"step": 1, "reference_version": 0, "seconds": 1.0})
    played = [factories.episode(factories.turn(1.0), success=True)]
    results = results_document(played, policy="policy", split="test", baselines={})
    monkeypatch.setattr(api, "evaluate", lambda run: results)
    evaluate_run(run)
    said = capsys.readouterr().out
    assert "policy (distilled)" in said
    assert "95% interval of the policy" in said


@pytest.mark.slow
def test_estimate_values_adds_samples_and_prints_the_coverage(command: Command, run: Path) -> None:
    result = command("estimate-values", run, "--samples", 3)
    assert result.status == 0, result.message
    coverage = json.loads(result.out[result.out.index("{") :])
    assert coverage["tasks_by_num_samples"] == {"3": 21}


@pytest.mark.slow
def test_values_of_another_split_leave_the_report_on_training_tasks_alone(
    command: Command, run: Path
) -> None:
    before = (run / "value_report.json").read_bytes()
    assert command("estimate-values", run, "--samples", 1, "--split", "test").status == 0
    assert (run / "value_report.json").read_bytes() == before


# Bad input: a clear message, status 2, and nothing lost


def test_a_missing_configuration(command: Command, tmp_path: Path) -> None:
    result = command("train", "--config", tmp_path / "no.yaml", "--run-dir", tmp_path / "new")
    assert_refused(
        result, "no.yaml", "there is no configuration", "comes with ragen-apo, such as shop"
    )
    assert not (tmp_path / "new").exists()


def test_an_empty_run_dir_is_not_the_present_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an unset variable of a shell gives it."""
    monkeypatch.chdir(tmp_path)
    result = command("train", "--config", "configs/shop.yaml", "--run-dir", "")
    assert_refused(result, "--run-dir is empty; expected a path")
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_terminal_without_width_gets_its_help(
    columns: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "--run-dir" in command("train", "--help").out


def test_no_configuration_at_all(command: Command, tmp_path: Path) -> None:
    result = command("train", "--run-dir", tmp_path / "new")
    assert_refused(result, "--config is missing", "configs/shop.yaml")


def test_a_malformed_configuration(command: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("values: {beta1: [1, 2")
    result = command("train", "--config", tmp_path / "bad.yaml", "--run-dir", tmp_path / "new")
    assert_refused(result, "bad.yaml is not YAML", "line 1")
    assert not (tmp_path / "new").exists()


def test_a_comparison_is_refused_with_the_command_for_it(command: Command, tmp_path: Path) -> None:
    result = command("train", "--config", COMPARISON, "--run-dir", tmp_path / "new")
    assert_refused(result, f"is a comparison: ragen-apo compare --config {COMPARISON}")
    half = tmp_path / "half.yaml"
    half.write_text("seeds: [0]\nruns: {a: {}}\n")
    result = command("train", "--config", half, "--run-dir", tmp_path / "new")
    assert_refused(result, f"is a comparison: ragen-apo compare --config {half}")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (["--values.beta3", 1], ["values.beta3: unknown key", "values.beta1"]),
        (["--training.max_step", 1], ["unknown key", "training.max_steps"]),
        (["--algorithm.beta2", -1], ["algorithm.beta2", "-1", "greater than 0"]),
        (["--environment.max_turn", 3], ["environment.max_turn: unknown key", "max_turns"]),
        (["--environment.name", "shpo"], ["'shpo'", "did you mean 'shop'"]),
    ],
)
def test_an_unknown_key_or_a_value_out_of_range(
    override: list, parts: list[str], command: Command, config: Path, tmp_path: Path
) -> None:
    result = command("train", "--config", config, "--run-dir", tmp_path / "new", *override)
    assert_refused(result, *parts)
    assert not (tmp_path / "new").exists()


def test_a_model_folder_without_tokenizer(
    command: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    for file in (run / "policy").glob("tokenizer*"):
        file.unlink()
    model = ["--policy.path", run / "policy", "--warm_start.copy.max_steps", 0]
    result = command("train", "--config", config, "--run-dir", tmp_path / "new", *model)
    assert_refused(result, str(run / "policy"), "no tokenizer", "tokenizer.save_pretrained")
    assert not (tmp_path / "new").exists()


def test_a_model_that_cannot_be_had_or_is_too_short_is_refused_before_a_run_is_made(
    command: Command, config: Path, tmp_path: Path, qwen_folder: Path
) -> None:
    train = ["train", "--config", config, "--run-dir", tmp_path / "run"]
    train += ["--warm_start.copy.max_steps", 0, "--policy.path"]
    hub = "Qwen/Qwen2.5-1.5B-Instruct"
    assert_refused(command(*train, hub), hub, "HF_HUB_OFFLINE", f"hf download {hub} --local-dir")
    longer = ["--agent.max_context_tokens", 32_769]
    assert_refused(command(*train, qwen_folder, *longer), "is 32769", "at most 32768 tokens")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_value_store_of_another_reference_names_the_field_that_differs(
    command: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    before = snapshot(run)["values.sqlite"]
    result = command(
        "train",
        *("--config", config, "--run-dir", tmp_path / "new", "--no-evaluate"),
        *(
            "--values.store",
            run / "values.sqlite",
            "--reference.refresh_every_steps",
            "null",
        ),
        *("--warm_start.demonstrations.num_steps", 3),
    )
    assert_refused(result, "reference_fingerprint: store has", "ragen-apo estimate-values")
    assert (run / "values.sqlite").read_bytes() == before


def test_a_value_store_that_does_not_exist_is_refused_before_a_run_is_made(
    command: Command, config: Path, tmp_path: Path
) -> None:
    result = command(
        "train",
        *("--config", config, "--run-dir", tmp_path / "new"),
        *("--values.store", tmp_path / "no.sqlite"),
        *("--reference.refresh_every_steps", "null"),
    )
    assert_refused(result, "no value store at", "no.sqlite", "ragen-apo estimate-values")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_truncated_checkpoint_on_resume(command: Command, unfinished: Path) -> None:
    file = unfinished / "checkpoints" / "4-training-000006" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    before = snapshot(unfinished / "checkpoints")
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(
        result, "4-training-000006", "cannot be read", "Remove the folder", "4-training-000004"
    )
    assert snapshot(unfinished / "checkpoints") == before
    shutil.rmtree(file.parent)
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    quick_first(
        [('{"step": 2, "loss"', "is not JSON"), ('{"stop": 2}', "does not say which step")]
    ),
)
def test_a_damaged_line_of_the_metrics(
    line: str, problem: str, command: Command, unfinished: Path
) -> None:
    file = unfinished / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    before = snapshot(unfinished / "checkpoints")
    resumed = command("train", "--run-dir", unfinished, "--resume", "--no-evaluate")
    assert_refused(resumed, f"{file}, line 2 {problem}", "undamaged copy", "delete this line")
    assert snapshot(unfinished / "checkpoints") == before
    if "JSON" in problem:
        assert_refused(
            command("report", unfinished), f"{file}, line 2 {problem}", "delete this line"
        )
    file.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0


def disk_full(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def disk_full_for_rust(*_: Any, **__: Any) -> NoReturn:
    # What tokenizers and safetensors raise; safetensors wraps it in an exception of its own.
    raise Exception("No space left on device (os error 28)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "failure"),
    [
        ("ragen_apo.stages.training.append_json_line", disk_full),
        ("ragen_apo.training.checkpoint.save_file", disk_full),
        ("ragen_apo.policy.language_model.LanguageModel.save", disk_full_for_rust),
    ],
)
def test_a_full_disk_loses_nothing(
    target: str, failure: Callable, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = snapshot(run / "policy")
    shutil.rmtree(run / "policy")
    shutil.rmtree(run / "checkpoints" / "4-training-000006")
    with monkeypatch.context() as patch:
        patch.setattr(target, failure)
        result = command("train", "--run-dir", run, "--resume", "--no-evaluate")
    assert_refused(result, "No space left on device", "--resume")
    assert (run / "checkpoints" / "4-training-000004").is_dir()
    assert command("train", "--run-dir", run, "--resume", "--no-evaluate").status == 0
    assert snapshot(run / "policy") == expected


def test_a_run_directory_that_exists_is_left_alone(
    command: Command, config: Path, run: Path
) -> None:
    before = snapshot(run)
    result = command("train", "--config", config, "--run-dir", run)
    assert_refused(result, str(run), "exists already", "--resume", "--run-dir")
    assert snapshot(run) == before


def test_a_catalogue_with_a_duplicate_id(command: Command, config: Path, tmp_path: Path) -> None:
    from ragen_apo.environments import shop

    catalogue = json.loads(
        (Path(shop.__file__).parent / "catalogue.json").read_text(encoding="utf-8")
    )
    catalogue["products"][1]["id"] = catalogue["products"][0]["id"]
    (tmp_path / "twice.json").write_text(json.dumps(catalogue))
    result = command(
        *("train", "--config", config, "--run-dir", tmp_path / "new"),
        *("--environment.catalogue", tmp_path / "twice.json"),
    )
    assert_refused(result, "twice.json", "twice", "expected unique ids")
    assert not (tmp_path / "new").exists()


def test_resume_of_what_is_no_run(command: Command, tmp_path: Path) -> None:
    result = command("train", "--run-dir", tmp_path / "none", "--resume")
    assert_refused(result, "is not a run", f"there is no folder {tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()


def test_resume_with_another_configuration(command: Command, config: Path, run: Path) -> None:
    result = command(
        *("train", "--config", config, "--run-dir", run, "--resume"), *("--algorithm.beta2", 0.5)
    )
    assert_refused(result, "started with another configuration")
    assert_refused(
        command("train", "--run-dir", run, "--resume", "--algorithm.beta2", 0.5),
        "algorithm.beta2 was 0.05 and is 0.5",
    )


def test_evaluate_of_an_unfinished_run(command: Command, run: Path) -> None:
    shutil.rmtree(run / "policy")
    before = (run / "evaluation" / "results.json").read_bytes()
    result = command("evaluate", run)
    assert_refused(result, "no trained policy yet", f"ragen-apo train --run-dir {run} --resume")
    assert (run / "evaluation" / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--split", "tset"], ["'tset'", "train or test or all"]),
        (["--episodes", 0], ["--episodes", "at least 1", "got 0"]),
        (["--pass-k", 0], ["--pass-k", "at least 1"]),
    ],
)
def test_evaluate_with_bad_arguments(
    arguments: list, parts: list[str], command: Command, run: Path
) -> None:
    assert_refused(command("evaluate", run, *arguments), *parts)


def test_report_without_evaluation(command: Command, run: Path) -> None:
    shutil.rmtree(run / "evaluation")
    result = command("report", run)
    assert_refused(result, "no finished evaluation", f"ragen-apo evaluate {run}")


def test_values_of_a_reference_that_does_not_exist(command: Command, run: Path) -> None:
    assert_refused(command("estimate-values", run, "--reference", 7), "has no reference 7")
    assert_refused(command("estimate-values", run, "--samples", 0), "--samples", "got 0")


# Ctrl-C


@pytest.mark.slow
def test_ctrl_c_says_what_is_kept_and_training_continues(
    command: Command, run: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoints" / "4-training-000006")
    shutil.rmtree(run / "policy")

    def interrupt(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ragen_apo.training.trainer.Trainer.step", interrupt)
        result = command("train", "--run-dir", run, "--resume")
    assert result.status == 130
    assert "interrupted" in result.message
    assert "--resume" in result.message
    assert command("train", "--run-dir", run, "--resume", "--no-evaluate").status == 0
    assert snapshot(run / "policy") == snapshot(finished_run / "policy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "terminated"),
    ],
)
def test_a_real_signal_ends_training_with_its_status(
    number: signal.Signals, status: int, word: str, config: Path, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "new"
    model = ("--policy.path", finished_run / "references" / "0", "--warm_start.enabled", "false")
    endless = (*model, "--training.max_steps", 100_000)
    process = forked_command(
        tmp_path / "output", "train", "--config", config, "--run-dir", run, *endless
    )
    while process.is_running() and not read_json_lines(run / "metrics.jsonl"):
        time.sleep(0.02)
    process.send(number)
    said = process.ended(seconds=60)
    assert process.returncode == status, said
    assert f"{word}. Nothing that was saved is lost" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_terminal_that_is_gone_ends_a_command_with_its_status() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that `nohup` has started ignore it
        os.execv(sys.executable, [sys.executable, "-m", "ragen_apo", "play", "shop", "--task", "0"])
    said = b""
    while b"TASK" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_sigterm_that_is_ignored_stays_ignored(
    before: signal.Handlers, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[Any] = []

    def answer(*_: str) -> str:
        inside.append(signal.getsignal(signal.SIGTERM))
        return "quit"

    monkeypatch.setattr("builtins.input", answer)
    found = signal.signal(signal.SIGTERM, before)
    try:
        assert command("play", "shop", "--task", 0).status == 0
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, found)
    assert len(inside) == 1
    assert (inside[0] == before) == (before == signal.SIG_IGN)


@pytest.mark.slow
def test_a_second_sigterm_ends_what_is_slow_to_end(
    config: Path, finished_run: Path, tmp_path: Path
) -> None:
    def hang(*_: Any) -> NoReturn:
        try:
            print("a step begins", flush=True)
            time.sleep(30)
        finally:
            print("something is closed", flush=True)
            time.sleep(30)

    def patched() -> None:
        Trainer.step = hang  # in the fork

    model = ("--policy.path", finished_run / "references" / "0", "--warm_start.enabled", "false")
    asked = ("--config", config, "--run-dir", tmp_path / "new", *model)
    process = forked_command(tmp_path / "output", "train", *asked, before=patched)
    process.says("a step begins")
    process.send(signal.SIGTERM)
    process.says("something is closed")
    process.send(signal.SIGTERM)
    process.ended(seconds=20)
    assert process.returncode == -signal.SIGTERM


# Play


def test_play_reads_actions_from_standard_input(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("search classic blanket\ndance\nquit\n"))
    result = command("play", "shop", "--task", 0)
    assert result.status == 0, result.message
    assert "TASK: " in result.out
    assert "Top 5" in result.out
    assert "Invalid action" in result.out
    assert "in 2 turns" in result.out


def test_play_takes_options_of_the_environment(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("dance\nbuy 1\n"))
    result = command("play", "shop", "--max_turns", 1, "--num_products", 8)
    assert "Available: 8 products" in result.out
    assert "No turns left" in result.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["shop", "--task", 10_000], ["--task must be from 0 to 396", "got 10000"]),
        (["shpo"], ["'shpo'", "did you mean 'shop'"]),
        (["shop", "--max_turn", 3], ["max_turn: unknown key", "max_turns"]),
        (
            ["webshop", "--data", "generated:50", "--goals", "human"],
            ["the split 'train' has no tasks; expected test"],
        ),
    ],
)
def test_play_with_bad_arguments(arguments: list, parts: list[str], command: Command) -> None:
    assert_refused(command("play", *arguments), *parts)


SHOP_OPTIONS = ("--max_turns", 3, "--num_products", 24)
"""Those of the tiny configuration."""


@pytest.mark.slow
def test_check_prints_each_promise_and_how_the_scripted_policies_fare(command: Command) -> None:
    result = command("check", "frozen_lake", "--slippery", "false", "--num-tasks", 4)
    assert result.status == 0
    assert result.out.count("ok  ") == len(PROMISES)
    assert "oracle" in result.out and "100.0%" in result.out


@pytest.mark.slow
def test_check_of_an_environment_with_a_fault_says_so_and_ends_with_status_1(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenLakeWorld, "key", lambda _: "always the same")
    result = command("check", "frozen_lake", "--slippery", "false")
    assert result.status == 1
    assert "NOT  equal state keys mean equal futures" in result.out


def play_and_record(
    command: Command, monkeypatch: pytest.MonkeyPatch, file: Path, lines: str, *arguments: object
) -> Result:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return command("play", "shop", "--record", file, *arguments)


@pytest.mark.slow
def test_a_warm_start_uses_exactly_the_episodes_that_a_person_recorded(
    command: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "people" / "mine.jsonl"
    sessions = {
        ("search mug\nbuy 1\n", *SHOP_OPTIONS): "recorded in",
        ("dance\n click 2 \nclick 1\n", *SHOP_OPTIONS, "--task", 3): "recorded in",
        ("search mug\nquit\n", *SHOP_OPTIONS): "not recorded",
        ("buy 1\n", "--num_products", 24): "recorded in",
        ("buy 2\n", *SHOP_OPTIONS, "--split", "test"): "recorded in",
    }
    for (lines, *arguments), answer in sessions.items():
        result = play_and_record(command, monkeypatch, file, lines, *arguments)
        assert answer in result.out, result.message
    with file.open("a") as stream:
        stream.write('{"cut off')
    used: list[Any] = []
    original = phases.training_samples

    def watched(trajectory: Any) -> Any:
        used.append(trajectory)
        return original(trajectory)

    monkeypatch.setattr(phases, "training_samples", watched)
    run = tmp_path / "run"
    keys = ["--warm_start.copy.max_steps", 0, "--warm_start.demonstrations.num_steps", 2]
    keys += ["--training.max_steps", 0, "--warm_start.demonstrations.recordings", file.parent]
    result = command("train", "--config", config, "--run-dir", run, "--no-evaluate", *keys)
    assert result.status == 0, result.message
    said = " ".join(result.out.split())
    assert "2 recorded episodes from" in said
    assert "1 of a task that is not for training (split test)" in said
    assert "1 of version" in said
    assert "1 unreadable" in said
    actions = [[turn.action for turn in trajectory.turns] for trajectory in used]
    assert actions == [["search mug", "buy 1"], ["dance", "click 2", "click 1"]]
    assert all(turn.thought == "" and turn.response_token_ids for t in used for turn in t.turns)
    assert len(read_json_lines(run / "recordings.jsonl")) == 2


@pytest.mark.slow
def test_a_resumed_run_uses_the_recordings_that_it_began_with(
    command: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.jsonl"
    play_and_record(command, monkeypatch, file, "buy 1\n", *SHOP_OPTIONS)
    keys = ["--warm_start.copy.max_steps", 0, "--warm_start.demonstrations.num_steps", 20]
    keys += ["--training.max_steps", 0, "--warm_start.demonstrations.recordings", file]
    train = ["train", "--config", config, "--no-evaluate", *keys]
    command(*train, "--run-dir", tmp_path / "whole")
    original, num_calls = supervised.accumulate_supervised_gradients, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 15:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(supervised, "accumulate_supervised_gradients", interrupted)
    assert command(*train, "--run-dir", tmp_path / "run").status == 130
    play_and_record(command, monkeypatch, file, "buy 2\n", *SHOP_OPTIONS)
    resumed = command("train", "--run-dir", tmp_path / "run", "--resume", "--no-evaluate")
    assert resumed.status == 0, resumed.message
    policies = [tmp_path / name / "policy" / "model.safetensors" for name in ("run", "whole")]
    assert policies[0].read_bytes() == policies[1].read_bytes()


def test_recordings_that_cannot_be_used_are_refused_before_a_run_is_made(
    command: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.jsonl"
    play_and_record(command, monkeypatch, file, "buy 1\n", "--num_products", 8)
    for path, words in ((file, "1 of version"), (tmp_path / "none", "there is no")):
        key = ["--warm_start.demonstrations.recordings", path]
        result = command("train", "--config", config, "--run-dir", tmp_path / "run", *key)
        assert_refused(result, words, "warm_start.demonstrations.recordings")
        assert not (tmp_path / "run").exists()


def test_a_recording_needs_the_name_of_a_jsonl_file(command: Command, tmp_path: Path) -> None:
    assert_refused(command("play", "shop", "--record", tmp_path), "ends in .jsonl")


@pytest.mark.slow
def test_a_run_with_the_store_of_another_is_not_sampled(
    command: Command, run: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    shutil.rmtree(other / "policy")
    text = (other / "config.yaml").read_text()
    text = re.sub("store: null", f"store: {run}/values.sqlite", text)
    (other / "config.yaml").write_text(
        re.sub(r"refresh_every_steps: \d+", "refresh_every_steps: null", text)
    )
    status = json.loads((other / "run.json").read_text())
    status["configuration"]["values"]["store"] = f"{run}/values.sqlite"
    status["configuration"]["reference"]["refresh_every_steps"] = None
    (other / "run.json").write_text(json.dumps(status))
    assert_refused(command("estimate-values", other), "takes V* from", "would not read samples of")
