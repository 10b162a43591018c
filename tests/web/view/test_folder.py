"""Which runs of a folder are found, and which paths are read."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import locked
from ragen_apo.run_directory import RunDirectory
from ragen_apo.web.view.folder import ITSELF, open_folder
from ragen_apo.web.view.state import RunState, is_locked, state_of
from tests.web.view_runs import client, get, some_episodes, write_run


def test_runs_are_found_below_the_folder_and_not_inside_each_other(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "compare" / "seed-0" / "grpo")
    write_run(tmp_path / "one" / "inner")
    write_run(tmp_path / ".hidden")
    assert sorted(open_folder(tmp_path).names()) == ["compare/seed-0/grpo", "one"]


def test_the_run_that_changed_last_is_first(tmp_path: Path) -> None:
    for seconds, name in ((100, "b"), (300, "c"), (200, "a")):
        os.utime(write_run(tmp_path / name) / "config.yaml", (seconds, seconds))
    assert open_folder(tmp_path).names() == ["c", "a", "b"]


def test_a_run_may_be_the_folder_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", some_episodes(2))
    assert open_folder(run).names() == [ITSELF]
    assert "task number 1" in client(run).get("/episodes", params={"run": ITSELF}).text


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a folder"):
        open_folder(tmp_path / "nothing")


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that nobody else may look into, whoever runs the tests (root may look everywhere)."""
    path = write_run(tmp_path / "of-another", some_episodes(1))

    def guarded(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(place: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(place, int) and path in Path(place).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
            return original(place, *arguments, **options)

        return call

    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, guarded(name))
    return path


def test_a_run_that_others_may_not_read_hides_no_other_run(closed: Path) -> None:
    write_run(closed.parent / "mine", some_episodes(1))
    pages = client(closed.parent)
    assert "mine" in get(pages, "/") and "mine" in get(pages, "/compare")
    assert pages.get("/run", params={"run": closed.name}).status_code == 404


def test_a_run_of_which_others_may_read_a_part_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "of-another", some_episodes(1))
    write_run(tmp_path / "mine", some_episodes(1))
    original = Path.exists

    def exists(path: Path, **options: Any) -> bool:
        if run / "evaluation" in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, **options)

    monkeypatch.setattr(Path, "exists", exists)
    pages = client(tmp_path)
    assert "evaluation/results.json" in (listed := get(pages, "/")) and "mine" in listed
    get(pages, "/compare")


def test_a_folder_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RunDirectoryError, match=r"may not read .*chmod -R a\+rX"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc", "one/../../outside", "link", "one\0", "", "one/evaluation"]
)
def test_a_path_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "outside", some_episodes(1))
    write_run(tmp_path / "runs" / "one", some_episodes(1))
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    pages = client(tmp_path / "runs")
    for path in ("/run", "/episodes", "/episode", "/values", "/failures", "/text"):
        answer = pages.get(path, params={"run": name, "field": "observation", "turn": "1"})
        assert answer.status_code == 404
        assert "a page" not in answer.text


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("metrics.jsonl", "/run"),
        ("evaluation/episodes.jsonl", "/episodes"),
        ("rollouts.jsonl", "/failures"),
        ("values.sqlite", "/values"),
        ("run.json", "/run"),
        ("evaluation", "/episodes"),
    ],
)
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(
    file: str, path: str, tmp_path: Path
) -> None:
    outside = write_run(tmp_path / "outside", some_episodes(1), metrics=[{"step": 1}])
    run = write_run(tmp_path / "runs" / "one")
    source = "training" if file == "rollouts.jsonl" else "evaluation"
    target = outside / file
    if not target.exists():
        target.write_text('{"episode": 0, "secret": "told"}\n')
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).symlink_to(target)
    answer = client(tmp_path / "runs").get(path, params={"run": "one", "source": source})
    assert answer.status_code == 404
    assert "leads out of" in answer.text
    assert "told" not in answer.text


def test_advice_says_nothing_of_a_file_outside_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("api: {model: told, extra_body: {key: told}}\n")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    RunDirectory(tmp_path / "runs" / "one").api_config.symlink_to(tmp_path / "secret.yaml")
    for source in ("evaluation", "training"):
        given = {"run": "one", "source": source}
        answer = client(tmp_path / "runs").get("/episodes", params=given)
        assert answer.status_code == 404
        assert "told" not in answer.text


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    os.mkfifo(run / "metrics.jsonl")
    answer = client(tmp_path).get("/run", params={"run": "one"})
    assert answer.status_code == 404
    assert "it is a pipe" in answer.text


def test_a_run_that_a_process_holds_is_running(tmp_path: Path) -> None:
    run = open_folder(write_run(tmp_path / "one", some_episodes(1)).parent).run("one")
    assert state_of(run) is RunState.EVALUATED
    with locked(run.lock, RuntimeError()):
        if not is_locked(run.lock):
            pytest.skip("this system does not say who holds a lock")
        assert state_of(run) is RunState.RUNNING
    assert state_of(run) is RunState.EVALUATED


def test_a_run_that_nobody_has_touched_for_long_has_stopped(tmp_path: Path) -> None:
    run = open_folder(write_run(tmp_path / "one").parent).run("one")
    assert state_of(run) is RunState.RUNNING
    os.utime(run.config, (1000, 1000))
    assert state_of(run) is RunState.STOPPED


@pytest.mark.parametrize(
    ("attempts", "words"), [(0, "warm-started"), (1, "stopped"), (None, "stopped")]
)
def test_a_run_that_was_to_end_with_its_reference_has_not_stopped(
    attempts: int | None, words: str, tmp_path: Path
) -> None:
    run = RunDirectory(write_run(tmp_path / "one"))
    run.note(**({} if attempts is None else {"attempts": attempts}))
    for file in run.path.iterdir():
        os.utime(file, (1000, 1000))
    chips = re.findall(r'class="chip [^>]*>([^<]+)<', get(client(tmp_path), "/"))
    assert chips == [words]
