"""Starting a run and clearing away a failed start, also where two processes do it at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragen_apo import run_directory
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory, clear_failed_start, create_run
from tests.command_line import snapshot


def test_of_simultaneous_starts_one_makes_the_run_and_the_others_are_refused(
    tmp_path: Path,
) -> None:
    num_starts = 4
    together = threading.Barrier(num_starts)

    def start(path: Path, number: int) -> int | None:
        together.wait()
        try:
            create_run(path, config_yaml=f"seed: {number}\n")
        except RunDirectoryError:
            return None
        return number

    with ThreadPoolExecutor(num_starts) as pool:
        for attempt in range(20):
            path = tmp_path / str(attempt)
            tried = pool.map(start, [path] * num_starts, range(num_starts))
            (made,) = [number for number in tried if number is not None]
            run = RunDirectory(path)
            assert run.config.read_text() == f"seed: {made}\n"
            assert {*path.iterdir()} == {run.config, run.lock}


def test_a_failed_start_leaves_a_run_alone_that_another_process_works_on(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", config_yaml="seed: 1\n")
    with run.locked():
        clear_failed_start(run, keep_directory=False)
        assert run.config.read_text() == "seed: 1\n"
        assert run.lock.exists()
    clear_failed_start(run, keep_directory=False)
    assert not run.path.exists()


def test_a_failed_start_leaves_a_folder_that_was_there_and_results(tmp_path: Path) -> None:
    run = create_run(tmp_path, config_yaml="seed: 1\n")
    clear_failed_start(run, keep_directory=True)
    assert [*tmp_path.iterdir()] == []
    create_run(tmp_path, config_yaml="seed: 1\n")
    run.initial.mkdir()  # refused after the model was built, which takes seconds
    (run.initial / "model.safetensors").touch()
    run.recordings.touch()
    clear_failed_start(run, keep_directory=True)
    assert [*tmp_path.iterdir()] == []
    create_run(tmp_path, config_yaml="seed: 1\n")
    run.checkpoints.mkdir()
    clear_failed_start(run, keep_directory=False)
    assert run.config.exists()


def test_a_clearing_that_is_killed_leaves_a_run_that_can_go_on_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(run_directory, "remove", lambda path: removed.append(path.name))
    run = create_run(tmp_path, config_yaml="seed: 1\n")
    clear_failed_start(run, keep_directory=True)
    assert removed.index("run.json") < removed.index("config.yaml"), "which --resume reads"


def test_what_a_killed_evaluation_left_goes_with_the_next(tmp_path: Path) -> None:
    run = create_run(tmp_path, config_yaml="seed: 1\n")
    left = [
        folder / "rows.jsonl.partial-0123abcd"
        for folder in (run.path, run.results.parent, run.report, run.reference(0).parent)
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run.remove_leftovers()
    assert not any(path.exists() for path in left)
    assert run.config.exists()


@pytest.mark.parametrize("left", [".lock", "config.yaml.partial-0123abcd"])
def test_what_a_killed_start_left_stands_in_nobody_s_way(left: str, tmp_path: Path) -> None:
    (tmp_path / left).touch()
    run = create_run(tmp_path, config_yaml="seed: 1\n")
    assert {*tmp_path.iterdir()} == {run.config, run.lock}


def test_a_folder_with_something_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(RunDirectoryError, match="exists already"):
        create_run(tmp_path, config_yaml="seed: 1\n")
    assert snapshot(tmp_path) == before


def test_results_are_never_beside_the_episodes_of_another_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.write_evaluation({"success_rate": 0.0}, [{"episode": 0, "success": False}])

    def killed(path: Path, value: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ragen_apo.run_directory.write_json_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_evaluation({"success_rate": 1.0}, [{"episode": 0, "success": True}])
    assert not run.results.exists()
    assert read_json_lines(run.episodes) == [{"episode": 0, "success": True}]


@pytest.mark.parametrize(
    ("config", "trust"),
    [
        ("environment: {name: shop}", ""),
        ("environment: {name: ./mine.py:make}", " --trust-remote-code"),
        ("environment: {name: mixture, parts: {a: {name: worlds:make}}}", " --trust-remote-code"),
        ("policy: {trust_remote_code: true}", " --trust-remote-code"),
        ("rollouts: {engine: vllm, api_key_env: KEY}", " --trust-remote-code"),
        ("rollouts: {engine: local, api_key_env: KEY}", ""),
        ("environment: [", ""),
    ],
)
def test_what_goes_on_with_a_run_trusts_what_it_asks_trust_for(
    config: str, trust: str, tmp_path: Path
) -> None:
    run = create_run(tmp_path / "my run", config_yaml=config)
    assert run.resume_command == f"ragen-apo train --run-dir '{run.path}' --resume{trust}"
