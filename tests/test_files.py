"""Files that are whole or not there, also when the writer fails or is killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import save_file

from ragen_apo import files
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import (
    PARTIAL_MARK,
    append_json_line,
    directory_written_atomically,
    read_json_lines,
    remove_partial_files,
    write_json_atomically,
    write_json_lines_atomically,
    write_text_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "sync_to_disk", no_space)


def test_text_and_json_are_written_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "value.json"
    write_text_atomically(target, "Größe 你好\n")
    assert target.read_text(encoding="utf-8") == "Größe 你好\n"
    write_json_atomically(target, {"b": 1, "a": [None, 0.5]})
    assert json.loads(target.read_text(encoding="utf-8")) == {"a": [None, 0.5], "b": 1}
    assert names(target.parent) == ["value.json"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    target.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_text_atomically(target, "new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["value.json"]


def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    write_json_atomically(target, 1)
    with pytest.raises(TypeError):
        write_json_atomically(target, object())
    assert target.read_text() == "1\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the full device of Linux")
def test_a_row_for_which_the_disk_has_no_room_names_its_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_json_line(Path("/dev/full"), {"step": 1})


@pytest.mark.parametrize("name", ["write_bytes", "fsync"])
def test_a_file_for_which_the_disk_has_no_room_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write or a flush that fails does not say of which file."""

    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path if name == "write_bytes" else os, name, refused)
    with pytest.raises(OSError, match="value.json") as raised:
        write_text_atomically(tmp_path / "value.json", "new")
    assert raised.value.errno == errno.EDQUOT
    assert names(tmp_path) == []


class TestDirectories:
    def test_one_appears_with_all_its_files(self, tmp_path: Path) -> None:
        target = tmp_path / "runs" / "step-1"
        with directory_written_atomically(target) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "weights").write_text("w")
            assert not target.exists()
        assert (target / "inner" / "weights").read_text() == "w"
        assert names(target.parent) == ["step-1"]

    @pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
    def test_who_may_read_the_folder_may_read_its_files(self, umask: int, tmp_path: Path) -> None:
        """safetensors gives a file to its owner alone, whatever the umask says."""
        target, before = tmp_path / "folder", os.umask(umask)
        try:
            with directory_written_atomically(target) as partial:
                save_file({"w": torch.zeros(1)}, partial / "model.safetensors")
                (partial / "inner").mkdir()
                (partial / "inner" / "own.txt").touch(mode=0o600)
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in target.rglob("*")}
        assert modes == {
            "model.safetensors": 0o666 & ~umask,
            "inner": 0o777 & ~umask,
            "own.txt": 0o666 & ~umask,
        }

    def test_an_existing_one_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        target = tmp_path / "step-1"
        target.mkdir()
        (target / "old").write_text("")
        with directory_written_atomically(target) as folder:
            (folder / "new").write_text("")
        assert names(target) == ["new"]
        assert names(tmp_path) == ["step-1"]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_an_exception_leaves_the_old_one_and_nothing_else(
        self, tmp_path: Path, error: type[BaseException]
    ) -> None:
        target = tmp_path / "step-1"
        target.mkdir()
        (target / "old").write_text("")
        with pytest.raises(error), directory_written_atomically(target) as folder:  # noqa: PT012
            (folder / "new").write_text("")
            raise error
        assert names(target) == ["old"]
        assert names(tmp_path) == ["step-1"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / f"value.json{PARTIAL_MARK}12345678").write_text("half")
    (tmp_path / f"step-1{PARTIAL_MARK}12345678").mkdir()
    (tmp_path / f"step-1{PARTIAL_MARK}12345678" / "weights").write_text("half")
    (tmp_path / "value.json").write_text("whole")
    remove_partial_files(tmp_path)
    assert names(tmp_path) == ["value.json"]


def test_a_file_of_the_users_with_partial_in_its_name_is_left_alone(tmp_path: Path) -> None:
    mine = [f"notes{PARTIAL_MARK}draft", f"a{PARTIAL_MARK}1234567", f"a{PARTIAL_MARK}12345678.txt"]
    for name in [*mine, f"a{PARTIAL_MARK}1234567G", f"{PARTIAL_MARK}12345678"]:
        (tmp_path / name).write_text("mine")
    before = names(tmp_path)
    remove_partial_files(tmp_path)
    assert names(tmp_path) == before


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    program = (
        "import itertools, pathlib, sys\n"
        "from ragen_apo.files import write_json_atomically\n"
        "for number in itertools.count():\n"
        "    write_json_atomically(pathlib.Path(sys.argv[1]), [number] * 50_000)\n"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", program, str(target)])
        deadline = time.monotonic() + 30
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        value = json.loads(target.read_text())
        assert len(value) == 50_000
        assert len(set(value)) == 1
        target.unlink()


class TestJsonLines:
    def test_rows_are_appended_and_read_in_order(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        append_json_line(path, {"step": 1})
        append_json_line(path, {"step": 2, "text": "a\nb\u2028c\x85d"})
        assert read_json_lines(path) == [{"step": 1}, {"step": 2, "text": "a\nb\u2028c\x85d"}]

    def test_an_absent_file_has_no_rows(self, tmp_path: Path) -> None:
        assert read_json_lines(tmp_path / "metrics.jsonl") == []

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (b'{"st', "is not JSON"),
            (b"", "is not JSON"),
            (b'{"step\xff": 2}', "is not JSON"),
            (b"\x00\x00\x00\x00", "is not JSON"),
            (b"[1, 2]", "must hold a JSON object, got [1, 2]"),
        ],
    )
    def test_a_broken_line_before_the_last_is_an_error_with_its_number(
        self, tmp_path: Path, line: bytes, problem: str
    ) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
        with pytest.raises(RunDirectoryError) as caught:
            read_json_lines(path)
        message = str(caught.value)
        assert f"{path}, line 2 {problem}" in message
        assert "copy" in message and "delete this line" in message

    @pytest.mark.parametrize("end", [b'{"step": 2, "lo', b"\x00\x00\x00", b'{"text": "\xe2\x82'])
    def test_a_last_line_may_be_any_part_of_one(self, tmp_path: Path, end: bytes) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 1}\n' + end)
        assert read_json_lines(path) == [{"step": 1}]

    def test_a_last_line_that_is_whole_and_damaged_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 1}\n{"step": 2,,}\n')
        with pytest.raises(RunDirectoryError, match="line 2 is not JSON"):
            read_json_lines(path)

    def test_all_rows_are_replaced_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        append_json_line(path, {"step": 9})
        write_json_lines_atomically(path, [{"step": 1}, {"step": 2}])
        assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
        write_json_lines_atomically(path, [])
        assert read_json_lines(path) == []
