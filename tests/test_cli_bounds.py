"""Numbers and files beyond what can be meant: one line, before anything is read or written."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.environments.webshop.generated import write_generated_files
from tests.command_line import Command, assert_one_line

Refused = Callable[..., str]


@pytest.fixture
def refused(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """Runs the entry point; the one line with which it ends, exit status 2."""
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path / "data"))

    def refused(*arguments: object) -> str:
        result = command(*arguments)
        assert_one_line(result)
        return result.err

    return refused


NUMBERS = {
    ("evaluate", "R", "--episodes"): "at least 1 and at most 1,000,000",
    ("evaluate", "R", "--pass-k"): "at least 1 and at most 1,000,000",
    ("estimate-values", "R", "--samples"): "at least 1 and at most 1,000,000",
    ("estimate-values", "R", "--reference"): "at least 0 and at most 1,000,000,000",
    ("compare", "--config", "C", "--parallel"): "at least 1 and at most 1,000,000",
    ("play", "--task"): "at least 0 and at most 1,000,000,000",
    ("check", "bandit", "--num-tasks"): "at least 1 and at most 1,000,000",
    ("data", "webshop", "--generated"): "at least 1 and at most 10,000,000",
}


@pytest.mark.parametrize("words", NUMBERS)
@pytest.mark.parametrize("number", ["1e22", "2.7", "-1", "many", "nan", "inf", "9" * 5000, ""])
def test_a_number_that_cannot_be_meant_is_refused_with_what_is_allowed(
    words: tuple[str, ...], number: str, refused: Refused
) -> None:
    message = refused(*words[:-1], f"{words[-1]}={number}")
    assert f"error: {words[-1]}: got " in message
    assert f"expected a whole number {NUMBERS[words]}" in message
    assert len(message) < 200


def test_a_whole_number_may_be_written_as_in_a_configuration(refused: Refused) -> None:
    assert "--task must be from 0 to 396 in 'train', got 1000" in refused("play", "--task", "1e3")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_catalogue_that_is_no_file_is_refused_and_not_waited_for(
    kind: str, pipe: Path, tmp_path: Path, refused: Refused
) -> None:
    path = {"pipe": pipe, "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    said = "it is a folder" if kind == "folder" else "it is a pipe or a device"
    message = refused("play", "shop", "--catalogue", path)
    assert f"cannot read the shop catalogue {path} ({said})" in message


@pytest.mark.parametrize("name", ["items_shuffle_1000", "items_ins_v2_1000", "items_human_ins"])
def test_webshop_data_that_is_no_file_is_refused_and_not_waited_for(
    name: str, tmp_path: Path, refused: Refused
) -> None:
    hand = tmp_path / "hand"
    hand.mkdir()
    write_generated_files(hand, 3)
    for stem in ("items_shuffle", "items_ins_v2"):
        (hand / f"{stem}.json").rename(hand / f"{stem}_1000.json")
    (hand / f"{name}.json").unlink()
    os.mkfifo(hand / f"{name}.json")
    message = refused("data", "webshop", "--from", hand)
    assert f"--from {hand}: {name}.json is no regular file, found" in message
    assert f"{name}.json is no regular file" in refused("play", "webshop", "--data", hand)


def test_a_generated_catalogue_of_a_size_beyond_use_is_refused(refused: Refused) -> None:
    message = refused("play", "webshop", "--data", f"generated:{10**15}")
    assert "at least 1 and at most 10,000,000" in message


def test_recordings_that_are_no_file_are_refused_before_a_directory_is_made(
    pipe: Path, config: Path, tmp_path: Path, refused: Refused
) -> None:
    for path in (pipe, pipe.parent):
        message = refused(
            "train", "--config", config, "--run-dir", tmp_path / "run",
            "--warm_start.demonstrations.recordings", path,
        )  # fmt: skip
        assert f"recordings: {pipe} is a pipe, a device or a folder" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("--evaluation.split=nope", "evaluation.split: "),
        ("--warm_start.demonstrations.teacher=nobody", "has no scripted policy 'nobody'"),
    ],
)
def test_what_the_environment_lacks_is_said_before_a_directory_is_made(
    key: str, said: str, config: Path, tmp_path: Path, refused: Refused
) -> None:
    run = tmp_path / "run"
    assert said in refused("train", "--config", config, "--run-dir", run, key)
    assert not run.exists()
