"""The lines of a run's files: each is read once, and says what it says in full."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import append_json_line, write_json_lines_atomically
from ragen_apo.web.view.rows import EpisodeIndex, progress, read_rows
from tests.web.view_runs import HOSTILE, some_episodes, write_run


def _index(path: Path, **options: Any) -> EpisodeIndex:
    index = EpisodeIndex()
    index.refresh(path, **options)
    return index


def _row(**fields: Any) -> Mapping[str, Any]:
    return {"episode": 0, "turns": [], "task": {"task_id": "t"}, "success": False, **fields}


def test_the_best_is_that_of_the_evaluations_or_else_of_the_rollouts() -> None:
    rows = [
        {"step": 1, "success_rate": 0.9, "eval_success_rate": 0.25},
        {"step": 2, "success_rate": 0.5, "eval_success_rate": math.nan},
        {"step": 3, "success_rate": 0.7, "eval_success_rate": 0.25},
    ]
    found = progress(rows)
    assert (found.best, found.best_step, found.is_evaluated) == (0.25, 1, True)
    assert found.last is rows[2]
    found = progress([{"step": 4, "success_rate": 0.5}, {"step": 5, "success_rate": "all"}])
    assert (found.best, found.best_step, found.is_evaluated) == (0.5, 4, False)


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"')
    assert read_rows(path) == [{"step": 1}]
    with path.open("a") as stream:
        stream.write(": 2}\n")
    assert read_rows(path)[1] == {"step": 2}


def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    for step in (1.0, 2.0, 3.0):
        append_json_line(path, _row(**{"return": step}))
    index = _index(path)
    path.write_text(json.dumps(_row(**{"return": 7.0})) + "\n")
    index.refresh(path)
    assert list(index.returns) == [7.0]


@pytest.mark.parametrize("line", ["nonsense", "3", "[1]", '{"a": ' + "[" * 300 + "]" * 300 + "}"])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(RunDirectoryError, match="line 2 is no row"):
        read_rows(path)


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
    found = index.read(path, [5, 0])
    assert [(number, each.task) for number, each in found.items()] == [
        (number, episodes[number].task) for number in (5, 0)
    ]


def test_an_episode_of_another_form_is_refused_by_its_line(tmp_path: Path) -> None:
    write_json_lines_atomically(tmp_path / "e.jsonl", [_row()])
    with pytest.raises(RunDirectoryError, match="line 1 is no episode .task.environment"):
        _index(tmp_path / "e.jsonl").read(tmp_path / "e.jsonl", [0])


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
    assert (index.failures, list(index.returns), index.task_ids) == (["loop"], [-1.0], ["right"])


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


@pytest.mark.parametrize("longer", [0, 1, 300])
def test_a_file_that_another_takes_the_place_of_is_read_anew(longer: int, tmp_path: Path) -> None:
    """A disk may give it the number (inode) of one that was removed."""
    path = tmp_path / "e.jsonl"
    write_json_lines_atomically(path, [{**_row(), "failure": "before"}] * 5)
    index = _index(path)
    path.write_text(
        "".join(json.dumps({**_row(), "failure": "after"}) + "\n" for _ in range(5 + longer))
    )
    index.refresh(path)
    assert index.failures == ["after"] * (5 + longer)


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    """A block or two, then it stops; the rest is read when it is needed."""
    path = tmp_path / "e.jsonl"
    row = {**_row(), "final_observation": "x" * 500_000}
    write_json_lines_atomically(path, [row] * 30)
    index = _index(path, num_episodes=3)
    assert 3 <= len(index) < 30
    index.refresh(path)
    assert len(index) == 30


@pytest.mark.parametrize(
    "text",
    ["NUMBER 77", "é", 'a "quote"', "\n", "ÉCLAIR", "Straße", "a.c", "\\d", 'b": 3', "turns"],
)
def test_a_text_is_found_in_every_episode_that_has_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    found = {0, 7, 8, 21}
    named = {"avg turns": 1, "turns/9": 2, "turns-a": 3}
    texts = [200 * "ab " + 3 * (text.lower() if n in found else "z") for n in range(22)]
    write_json_lines_atomically(
        path, [{**_row(), "metrics": named, "final_observation": each} for each in texts]
    )
    assert _index(path).containing(path, text) == found
