"""Kept answers: found again, appended only, whole after a kill."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragen_apo.errors import RunDirectoryError
from ragen_apo.policy.chat_api.answer import Answer
from ragen_apo.policy.chat_api.ledger import AnswerLedger, answer_key

CALM = Answer("calm", reasoning="because 😀", finish_reason="stop", prompt_tokens=7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two answers."""
    path = tmp_path / "answers.jsonl"
    with AnswerLedger(path) as ledger:
        ledger.add("a", CALM, episode=0, turn=0)
        ledger.add("b", CALM, episode=0, turn=1)
    return path


def test_an_answer_is_found_again_with_all_that_it_had(file: Path) -> None:
    with AnswerLedger(file) as ledger:
        assert ledger.get("a") == ledger.get("b") == CALM
        assert ledger.get("c") is None


def test_a_file_only_grows(file: Path) -> None:
    before = file.read_bytes()
    with AnswerLedger(file) as ledger:
        ledger.add("c", CALM)
    assert file.read_bytes().startswith(before)
    assert file.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_last_line_that_was_cut_off_is_dropped_and_the_next_one_is_whole(
    file: Path, cut: int
) -> None:
    file.write_bytes(file.read_bytes()[:-cut])
    with AnswerLedger(file) as ledger:
        assert (ledger.get("a"), ledger.get("b")) == (CALM, None)
        ledger.add("c", CALM)
    with AnswerLedger(file) as ledger:
        assert len(ledger) == 2
        assert ledger.get("c") == CALM


@pytest.mark.parametrize("content", [b"", b"\n", b"{", b"\x00\x00\x00", b"null\n"])
def test_a_file_without_a_whole_line_begins_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(content)
    with AnswerLedger(path) as ledger:
        ledger.add("a", CALM)
    with AnswerLedger(path) as ledger:
        assert ledger.get("a") == CALM


def test_a_damaged_line_in_the_middle_is_named(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0][:20] + b"\n", lines[1]]))
    with pytest.raises(RunDirectoryError, match=r"answers\.jsonl, line 1"):
        AnswerLedger(file)


def test_threads_share_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerLedger(path) as ledger, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ledger.add(str(number), CALM), range(200)))
    with AnswerLedger(path) as ledger:
        assert len(ledger) == 200


def test_a_key_changes_with_everything_that_an_answer_depends_on() -> None:
    conditions = {"model": "m", "temperature": 0.0, "messages": [{"role": "user", "content": "a"}]}
    changes = [{"model": "n"}, {"temperature": 1.0}, {"messages": []}, {"seed": 1}]
    keys = [answer_key({**conditions, **change}) for change in [{}, *changes]]
    assert len(set(keys)) == len(keys)
    assert answer_key(dict(reversed(conditions.items()))) == keys[0]
