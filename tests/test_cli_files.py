"""Files that cannot be read or written: one line with path and reason, status 2, nothing lost."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ragen_apo.errors import ModelError
from ragen_apo.files import write_checksums
from tests.command_line import Command, assert_one_line

PARTIAL = ".partial-0123abcd"

# What the operating system refuses


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO, errno.EMFILE]
)
def test_whatever_the_system_refuses_is_one_line_with_path_and_reason(
    number: int, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(
        "ragen_apo.report.write.report_files", lambda *_, **__: {"summary.csv": b""}
    )
    monkeypatch.setattr("ragen_apo.report.write.write_bytes_atomically", refused)
    result = command("report", run)
    assert_one_line(result, run / "report" / "summary.csv", os.strerror(number))


def report_fails(monkeypatch: pytest.MonkeyPatch, cause: BaseException, *, is_told: bool) -> None:
    """`report` raises the cause, or an error of this package that has it."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        if is_told:
            raise ModelError("the model has no layers") from cause
        raise cause

    monkeypatch.setattr("ragen_apo.report.write.report_files", refused)


class PanicException(BaseException):
    """As Rust raises it in Python."""


@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError"),
    ],
)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_limit_of_threads_is_one_line_with_its_name(
    cause: BaseException,
    is_told: bool,
    command: Command,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report_fails(monkeypatch, cause, is_told=is_told)
    assert_one_line(command("report", run), "no further thread or process. `ulimit -u`")


def too_large_for_the_host() -> NoReturn:
    torch.empty(1 << 58)
    raise AssertionError


def too_large_for_the_gpu() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has\n...")


def too_large_for_python() -> NoReturn:
    bytearray(1 << 60)
    raise AssertionError


def too_large_for_the_system() -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (too_large_for_the_host, "can't allocate memory"),
        (too_large_for_the_gpu, "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has)"),
        (too_large_for_python, "not enough memory"),
        (too_large_for_the_system, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("is_told", [True, False])
def test_a_lack_of_memory_is_one_line_with_what_to_lower(
    allocate: Callable[[], NoReturn],
    said: str,
    is_told: bool,
    command: Command,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Exception, match=r".*") as raised:
        allocate()
    report_fails(monkeypatch, raised.value, is_told=is_told)
    result = command("report", run)
    assert_one_line(result, "there is not enough memory", said, "--training.micro_batch_size")


def test_memory_that_is_nothing_to_the_error_does_not_take_its_place(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> NoReturn:
        try:
            bytearray(1 << 60)
        except MemoryError:
            raise ModelError("the model has no layers")  # noqa: B904 - a handler's own error

    monkeypatch.setattr("ragen_apo.report.write.report_files", refused)
    assert_one_line(command("report", run), "the model has no layers")


def in_a_circle() -> Exception:
    error = ValueError("a step failed")
    error.__cause__ = RuntimeError("and again")
    error.__cause__.__cause__ = error
    return error


@pytest.mark.parametrize(
    "cause", [in_a_circle(), BlockingIOError(errno.EAGAIN, "write could not complete")]
)
def test_other_causes_are_not_taken_for_a_limit_of_threads(
    cause: Exception, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_fails(monkeypatch, cause, is_told=True)
    assert_one_line(command("report", run), "the model has no layers")


@pytest.mark.parametrize("owner", ["this user", "root", "a number without a name"])
def test_a_path_of_somebody_else_is_named_with_its_owner(
    owner: str, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path) + PARTIAL)

    def unknown(_: Path) -> NoReturn:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(
        "ragen_apo.report.write.report_files", lambda *_, **__: {"summary.csv": b""}
    )
    monkeypatch.setattr("ragen_apo.report.write.write_bytes_atomically", refused)
    if owner != "this user":
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        name = (lambda _: owner) if owner == "root" else unknown
        monkeypatch.setattr(Path, "owner", name)
    result = command("report", run)
    path = run / "report" / "summary.csv"
    expected = {
        "this user": "Expected a path that can be read and written",
        "root": f"{run / 'report'} belongs to user root. Ask",
        "a number without a name": f"{run / 'report'} belongs to user {os.getuid()}. Ask",
    }[owner]
    assert_one_line(result, f"error: {path}: Permission denied", expected)
    assert PARTIAL not in result.err


def test_a_run_below_a_file_or_a_dangling_link_or_with_a_name_of_256_characters(
    command: Command, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.iterdir())
    for place, reason in (
        (tmp_path / "file" / "run", "Not a directory"),
        (tmp_path / "link", "a link to something that is not there"),
        (tmp_path / "link" / "run", "a link to something that is not there"),
        (tmp_path / ("x" * 256), "File name too long"),
    ):
        result = command("train", "--config", config, "--run-dir", place)
        assert_one_line(result, reason)
        assert str(place)[:100] in result.err or str(place.parent) in result.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", ["evaluation", "results.json", "episodes.jsonl"])
def test_results_that_cannot_be_written_are_refused_before_anything_is_played(
    target: str, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[object] = []
    monkeypatch.setattr(
        "ragen_apo.stages.evaluation.play_evaluation", lambda *_, **__: played.append(1)
    )
    shutil.rmtree(run / "evaluation")
    place = run / "evaluation"
    if target == "evaluation":
        place.write_text("a file where the folder should be")
    else:
        (place / target).mkdir(parents=True)
    assert_one_line(command("evaluate", run), place)
    assert not played


@pytest.mark.slow
def test_a_model_that_cannot_be_written_is_one_line_whoever_says_so(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> NoReturn:
        raise Exception("Permission denied (os error 13)")

    shutil.rmtree(run / "policy")
    monkeypatch.setattr("ragen_apo.policy.language_model.LanguageModel.save", refused)
    result = command("train", "--run-dir", run, "--resume", "--no-evaluate")
    assert_one_line(result, run / "policy", "Permission denied")
    assert not list(run.glob("policy*"))


@pytest.mark.slow
def test_a_start_that_was_killed_while_it_wrote_the_configuration_is_started_anew(
    command: Command, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml.partial-0123abcd").write_text("seed")
    steps = ["--warm_start.enabled=false", "--training.max_steps=0", "--no-evaluate"]
    result = command("train", "--config", config, "--run-dir", run, *steps)
    assert result.status == 0, result.err
    assert (run / "policy").is_dir()
    assert not list(run.glob("*.partial-*"))


@pytest.mark.parametrize("name", ["config.yaml.partial-mine", "notes.partial-0123abcd", "notes"])
def test_a_directory_with_anything_else_in_it_is_left_as_it_is(
    name: str, command: Command, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for each in (name, "config.yaml.partial-0123abcd"):
        (run / each).write_text("mine")
    result = command("train", "--config", config, "--run-dir", run)
    assert_one_line(result, run, "exists already")
    assert {path.read_text() for path in run.iterdir()} == {"mine"} and len(
        list(run.iterdir())
    ) == 2


# What stands in the files of a run


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"phases": {"co', "is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("[" * 100_000, "nested deeper than 100 levels"),
        ('{"phases": []}', "phases: Input should be a valid dictionary, got []"),
        ('{"phases": {"stage 2": {"seconds": "long"}}}', "phases.stage 2.seconds: "),
        ("\x00", "is not JSON"),
    ],
)
def test_a_run_json_that_is_cut_or_made_by_hand(
    text: str, problem: str, command: Command, run: Path
) -> None:
    (run / "run.json").write_text(text)
    for arguments in (("train", "--run-dir", run, "--resume"), ("report", run)):
        result = command(*arguments)
        assert_one_line(result, run / "run.json", problem, "put an undamaged copy")
    assert (run / "run.json").read_text() == text
    (run / "run.json").unlink()
    assert command("train", "--run-dir", run, "--resume", "--no-evaluate").status == 0


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("results.json", {"failures": {"timeout": {"examples": 3}}}, "failures.timeout.examples: "),
        ("results.json", {"baselines": [1]}, "baselines: Input should be a valid dictionary"),
        ("results.json", {"split": ["test"]}, "split: Input should be a valid string"),
        ("episodes.jsonl", {"turns": [3]}, "line 1 cannot be used (turns.0: "),
        ("episodes.jsonl", {"turns": [{"flags": 5}]}, "line 1 cannot be used (turns.0.flags: "),
        ("episodes.jsonl", {"task": "buy"}, "line 1 cannot be used (task: "),
        ("episodes.jsonl", {"episode": [1]}, "line 1 cannot be used (episode: "),
    ],
)
def test_hand_made_types_in_an_evaluation_are_one_line_of_report(
    name: str, change: dict[str, Any], problem: str, command: Command, run: Path
) -> None:
    file = run / "evaluation" / name
    first, *others = (
        file.read_text().splitlines() if name == "episodes.jsonl" else [file.read_text()]
    )
    file.write_text("\n".join([json.dumps({**json.loads(first), **change}), *others]))
    assert_one_line(command("report", run), file, problem)
    assert not (run / "report").exists()


def test_deep_json_in_an_evaluation_is_one_line_of_report(command: Command, run: Path) -> None:
    deep = '{"by_category": ' + "[" * 500 + "]" * 500 + "}"
    (run / "evaluation" / "results.json").write_text(deep)
    assert_one_line(command("report", run), "results.json", "nested deeper than 100 levels")


def test_recordings_made_by_hand_are_named_and_not_used(
    command: Command, config: Path, tmp_path: Path
) -> None:
    task = {"environment": "shop", "task_id": 5, "instruction": "", "split": "train"}
    turn = {"observation": 1, "action": ["buy"], "reward": "much", "invalid": 0}
    episode = {"task": task, "turns": [turn], "terminated": 1, "truncated": 0}
    lines = [json.dumps({"environment_version": 1, "seed": 0, "episode": episode}), "[" * 100_000]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines))
    key = ["--warm_start.demonstrations.recordings", file]
    result = command("train", "--config", config, "--run-dir", tmp_path / "run", *key)
    assert_one_line(result, f"2 unreadable (cut off?): {file}, line 1, {file}, line 2")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_report_of_a_directory_with_a_strange_or_a_long_name(command: Command, run: Path) -> None:
    for name in ("a\x01b\nc\x1b[31m", "x" * 255):
        renamed = run.rename(run.with_name(name))
        result = command("report", renamed)
        assert result.status == 0, result.err
        assert (renamed / "report" / "slides.pptx").exists()
        run = renamed


# Damage in what training goes on from


def newest(run: Path) -> Path:
    return run / "checkpoints" / "4-training-000006"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line_and_the_one_before_it_is_named(
    command: Command, run: Path
) -> None:
    shutil.rmtree(run / "policy")  # a finished run reads no checkpoint
    (newest(run) / "state.json").write_text('{"phase": "dreaming", "step": 6}')
    write_checksums(newest(run))
    result = command("train", "--run-dir", run, "--resume")
    assert_one_line(result, newest(run), "state.json: the phase is 'dreaming'", "4-training-000004")
    shutil.copy(newest(run) / "model.safetensors", newest(run) / "optimizer.safetensors")
    result = command("train", "--run-dir", run, "--resume")
    assert_one_line(result, newest(run), "4-training-000004")
    shutil.rmtree(newest(run))
    assert command("train", "--run-dir", run, "--resume", "--no-evaluate").status == 0


@pytest.mark.parametrize("folder", ["policy", "references/0"])
def test_one_flipped_byte_in_a_model_of_the_run_is_found_when_it_is_loaded(
    folder: str, command: Command, run: Path
) -> None:
    file = run / folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = (run / "evaluation" / "results.json").read_bytes()
    result = command("evaluate", run)
    assert_one_line(result, run / folder, "model.safetensors is not what was written", "SHA256SUMS")
    assert (run / "evaluation" / "results.json").read_bytes() == before
