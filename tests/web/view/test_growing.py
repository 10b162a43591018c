"""Files that grow a line at a time: each line is read once, and says what it says in full."""

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import append_json_line, write_json_lines_atomically
from ragen_apo.web.view import growing
from ragen_apo.web.view.growing import EpisodeIndex, Metrics
from ragen_apo.web.view.lists import containing
from tests.web.view_runs import HOSTILE, some_episodes, write_run


def _index(path: Path, **options: Any) -> EpisodeIndex:
    index = EpisodeIndex()
    index.refresh(path, **options)
    return index


def _row(**fields: Any) -> Mapping[str, Any]:
    return {"episode": 0, "turns": [], "task": {"task_id": "t"}, "success": False, **fields}


def test_metrics_that_are_appended_are_added(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics()
    append_json_line(path, {"step": 1, "loss": 2.0})
    metrics.refresh(path)
    append_json_line(path, {"step": 2, "entropy": 0.5})
    append_json_line(path, {"step": 3, "loss": math.nan, "entropy": "much"})
    metrics.refresh(path)
    assert metrics.num_rows == 3
    assert metrics.series("loss") == ([1.0], [2.0])
    assert metrics.series("entropy") == ([2.0], [0.5])
    assert metrics.series("unknown") == ([], [])


def test_a_series_is_whole_while_another_thread_adds_rows(tmp_path: Path) -> None:
    path, found = tmp_path / "metrics.jsonl", []

    class Slow(Metrics):
        def take(self, line: bytes, start: int) -> None:
            super().take(line, start)
            self._phases.pop()  # as far as the columns, in the middle of a row
            begun.set()
            reader.join(timeout=0.2)  # it has to wait for the row
            self._phases.append("stage 2")

    def read() -> None:
        begun.wait()
        try:
            found.append(metrics.series("loss", phase="stage 2"))
        except IndexError as error:
            found.append(error)

    metrics, begun = Slow(), threading.Event()
    reader = threading.Thread(target=read)
    append_json_line(path, {"step": 1, "loss": 2.0, "phase": "stage 2"})
    reader.start()
    metrics.refresh(path)
    reader.join()
    assert found == [([1.0], [2.0])]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics()
    path.write_text('{"step": 1}\n{"step"')
    metrics.refresh(path)
    assert metrics.num_rows == 1
    with path.open("a") as stream:
        stream.write(": 2}\n")
    metrics.refresh(path)
    assert metrics.last == {"step": 2}


def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics()
    write_json_lines_atomically(path, [{"step": step, "loss": step} for step in (1, 2, 3)])
    metrics.refresh(path)
    write_json_lines_atomically(path, [{"step": 1, "loss": 7}])
    metrics.refresh(path)
    assert metrics.series("loss") == ([1.0], [7.0])


@pytest.mark.parametrize("line", ["nonsense", "3", "[1]", '{"a": ' + "[" * 200 + "]" * 200 + "}"])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(RunDirectoryError, match="line 2 is no row"):
        Metrics().refresh(path)


def test_an_index_has_what_the_rows_say(tmp_path: Path) -> None:
    episodes = some_episodes(7, every=3)
    path = write_run(tmp_path / "run", episodes) / "evaluation" / "episodes.jsonl"
    index = _index(path)
    assert len(index) == 7
    assert list(index.returns) == [each.episode_return for each in episodes]
    assert index.task_ids == [each.task.task_id for each in episodes]
    assert [bool(each) for each in index.successes] == [each.success for each in episodes]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert index.failures == [row["failure"] or "" for row in rows]
    assert index.read(path, [5, 0]) == [rows[5], rows[0]]


@pytest.mark.parametrize(
    "text",
    [HOSTILE, '", "num_turns": 9, "policy": "x", "return": 9.0', '"task_id": "z"}, "terminated": '],
)
def test_a_text_cannot_pass_for_a_field(text: str, tmp_path: Path) -> None:
    row = {
        "episode": 0,
        "failure": "loop",
        "final_observation": text,
        "num_turns": 1,
        "policy": text,
        "return": -1.0,
        "step": 3,
        "stop_reason": "the turn limit was reached",
        "success": False,
        "task": {"instruction": text, "payload": {"task_id": text}, "task_id": "right"},
        "terminated": False,
        "turns": [{"observation": text}],
    }
    write_json_lines_atomically(tmp_path / "e.jsonl", [row])
    index = _index(tmp_path / "e.jsonl")
    found = index.failures, list(index.returns), index.task_ids, list(index.steps)
    assert found == (["loop"], [-1.0], ["right"], [3])


@pytest.mark.parametrize(
    "row",
    [_row(), _row(**{"return": None, "num_turns": -3}), _row(step="x", failure=4), {"turns": 3}],
)
def test_a_row_of_another_program_is_read_as_far_as_it_goes(
    row: Mapping[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "e.jsonl").write_text(json.dumps(row, separators=(",", ":")) + "\n")
    index = _index(tmp_path / "e.jsonl")
    assert (len(index), list(index.returns), list(index.num_turns)) == (1, [0.0], [0])


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    """A block or two, then it stops; the rest is read when it is needed."""
    path = tmp_path / "e.jsonl"
    row = {**_row(), "final_observation": "x" * 500_000}
    write_json_lines_atomically(path, [row] * 30)
    index = _index(path, num_lines=3)
    assert 3 <= len(index) < 30
    index.refresh(path)
    assert len(index) == 30


def test_every_line_is_in_one_stretch_whatever_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "BLOCK_BYTES", 2000)
    path = tmp_path / "e.jsonl"
    lengths = [10, 5000, 10, 10, 1900, 10, 7000]
    rows = [{**_row(), "final_observation": length * "x"} for length in lengths]
    write_json_lines_atomically(path, rows)
    index = _index(path)
    stretches = list(index.stretches(path))
    assert b"".join(lines for _, lines in stretches) == path.read_bytes()
    assert all(path.read_bytes()[index.offsets[n] :].startswith(lines) for n, lines in stretches)
    assert 1 < len(stretches) < len(rows)


@pytest.mark.parametrize("text", ["NUMBER 77", "é", 'a "quote"', "\n"])
def test_a_text_is_found_in_every_episode_that_has_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "BLOCK_BYTES", 3000)
    path = tmp_path / "e.jsonl"
    found = {0, 7, 8, 21}
    texts = [200 * "ab " + 3 * (text.lower() if n in found else "z") for n in range(22)]
    write_json_lines_atomically(path, [{**_row(), "final_observation": each} for each in texts])
    assert containing(_index(path), path, text) == found
