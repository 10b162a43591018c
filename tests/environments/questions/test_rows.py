import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.errors import ConfigError, EnvironmentDataError
from tests.environments.questions.files import question, write_rows


def made(path: Path, **options: Any) -> TextEnvironment:
    return make_environment("questions", {"data": str(path), **options})


def names(environment: TextEnvironment, split: str) -> set[str]:
    return {task.instruction for task in environment.tasks(split)}


def test_a_line_becomes_a_task(tmp_path: Path) -> None:
    row = {"question": "Capital of Peru?", "answer": "Lima", "category": "cities", "id": "pe"}
    path = write_rows(tmp_path / "own.jsonl", [row, *(question(n) for n in range(20))])
    environment = made(path)
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    (task,) = (task for task in tasks if task.category == "cities")
    assert task.instruction == "Capital of Peru?"
    assert task.payload == {"answer": "Lima", "id": "pe"}
    assert {task.category for task in tasks} == {"cities", "question"}
    assert environment.properties.data == f"21 questions of {path}"


@pytest.mark.parametrize(
    ("answer", "right", "solution"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 1,024", "1,024", "48/2 = 24 clips."),
        ("#### 42", "42", None),
        (
            r"It is half, so $\boxed{\frac{1}{2}}$.",
            r"\frac{1}{2}",
            r"It is half, so $\boxed{\frac{1}{2}}$.",
        ),
        (7, "7", None),
        (0.5, "0.5", None),
        ("  Lima ", "Lima", None),
    ],
)
def test_the_answer_is_told_from_its_derivation(
    answer: Any, right: str, solution: str | None, tmp_path: Path
) -> None:
    rows = [{"question": "Which?", "answer": answer}, *(question(n) for n in range(20))]
    environment = made(write_rows(tmp_path / "own.jsonl", rows))
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    (task,) = (task for task in tasks if task.instruction == "Which?")
    assert task.payload["answer"] == right
    assert task.payload.get("solution") == solution


def test_a_line_that_is_added_moves_no_other(tmp_path: Path) -> None:
    rows = [question(number) for number in range(200)]
    before = made(write_rows(tmp_path / "before.jsonl", rows))
    after = made(write_rows(tmp_path / "after.jsonl", [question(999), *reversed(rows)]))
    for split in ("train", "test"):
        assert names(before, split) <= names(after, split)
    assert len(names(after, "train")) + len(names(after, "test")) == 201


def test_a_question_that_is_reworded_stays_in_its_split_by_its_id(tmp_path: Path) -> None:
    rows = [{**question(number), "id": number} for number in range(100)]
    reworded = [{**row, "question": f"Please: {row['question']}"} for row in rows]
    before = made(write_rows(tmp_path / "before.jsonl", rows))
    after = made(write_rows(tmp_path / "after.jsonl", reworded))
    assert names(after, "test") == {f"Please: {name}" for name in names(before, "test")}


def test_the_share_of_the_test_is_about_what_was_asked_for(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(number) for number in range(1000)])
    # 1,000 draws with 0.3: a standard deviation of 14.5
    assert 250 < len(made(path, test_share=0.3).tasks("test")) < 350


def test_a_file_of_its_own_is_the_test_and_its_questions_are_not_trained_on(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [question(number) for number in range(10)])
    test = write_rows(tmp_path / "test.jsonl", [question(number) for number in range(8, 12)])
    environment = made(train, test_data=str(test))
    assert [task.instruction for task in environment.tasks("test")] == [
        question(number)["question"] for number in range(8, 12)
    ]
    assert len(environment.tasks("train")) == 8
    assert "2 repeated ones left out" in environment.properties.data


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(number) for number in range(30)])
    before = made(path)
    write_rows(path, [question(number) for number in range(31)])
    after = made(path)
    sizes = [sum(len(e.tasks(split)) for split in ("train", "test")) for e in (before, after)]
    assert sizes == [30, 31]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "Which?", "anwser": "Lima"}, "has no 'answer'; its keys: question, anwser"),
        ({"answer": "Lima"}, "has no 'question'"),
        ({"question": "Which?", "answer": None}, "has no 'answer'"),
        ({"question": "Which?", "answer": "  "}, "'answer' is no right answer: it is empty"),
        (
            {"question": "Which?", "answer": "a way\n####  "},
            "'answer' is no right answer: it is empty",
        ),
        ({"question": " ", "answer": "Lima"}, "'question' is empty"),
        ({"question": "Which?", "answer": math.nan}, "'answer' is nan, expected text or a number"),
        ({"question": "Which?", "answer": "a\u0007b"}, "it has control characters"),
        ({"question": "Which?", "answer": ["Lima"]}, r"'answer' is \['Lima'\], expected text"),
        ({"question": "Which?", "answer": True}, "'answer' is True, expected text"),
        ({"question": "Which?", "answer": "x" * 501}, "it has 501 characters, and 500 are allowed"),
        ({"question": "\ud800", "answer": "Lima"}, "lone surrogate"),
        ("not an object", "expected a JSON object"),
        ({"question": "Which?", "answer": "Lima", "id": 3}, "the id '3' of .*line 4"),
        ({"question": "What is  2 + 2?", "answer": "5"}, "is '5' instead of '4'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: Any, message: str, tmp_path: Path) -> None:
    rows = [{**question(number), "id": number} for number in range(6)]
    path = write_rows(tmp_path / "own.jsonl", [*rows, line])
    with pytest.raises(EnvironmentDataError, match=rf"own\.jsonl, line 7\D.*{message}"):
        made(path)


OTHER_COLUMNS = {
    "question_column": "prompt",
    "answer_column": "solution",
    "category_column": "kind",
}


def test_a_file_may_have_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q {n}?", "solution": f"a way\n#### {n}", "kind": "x"} for n in range(20)]
    path = write_rows(tmp_path / "own.jsonl", rows)
    task = made(path, **OTHER_COLUMNS).tasks("train")[0]
    assert task.category == "x"
    assert task.payload == {"answer": task.instruction[2:-1], "solution": "a way"}
    with pytest.raises(ConfigError, match="category_column: got 'knd', expected.*kind, prompt"):
        made(path, **{**OTHER_COLUMNS, "category_column": "knd"})
    with pytest.raises(EnvironmentDataError, match="no 'question'.*environment.question_column"):
        made(path)
    without = made(path, **{**OTHER_COLUMNS, "category_column": None})
    assert without.tasks("train")[0].category == "question"


@pytest.mark.parametrize(
    ("header", "between"), [("question;answer", ";"), ("question , answer", ",")]
)
def test_a_table_of_a_spreadsheet_is_read_as_it_writes_it(
    header: str, between: str, tmp_path: Path
) -> None:
    rows = "".join(f"Is it {n}?{between}{n}\n" for n in range(20))
    (tmp_path / "own.csv").write_text(f"{header}\n{rows}", encoding="utf-8")
    environment = made(tmp_path / "own.csv")
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    assert {task.instruction for task in tasks} == {f"Is it {n}?" for n in range(20)}


@pytest.mark.parametrize("name", ["own.csv", "own.tsv", "own.json"])
def test_a_table_or_an_array_has_the_tasks_of_lines(name: str, tmp_path: Path) -> None:
    rows = [{"question": f'Is "{n},\n{n}" it?', "answer": str(n), "id": f"q{n}"} for n in range(20)]
    lines = made(write_rows(tmp_path / "own.jsonl", rows))
    path = tmp_path / name
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".json":
            json.dump(rows, file, indent=1)
        else:
            dialect = "excel" if path.suffix == ".csv" else "excel-tab"
            table = csv.DictWriter(file, rows[0].keys(), dialect=dialect)
            table.writeheader()
            table.writerows(rows)
    for split in ("train", "test"):
        assert list(made(path).tasks(split)) == list(lines.tasks(split))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.csv", "question,answer\nA?,1\nB, or C?,2\n", "row 2 has more cells than the header"),
        ("own.csv", "question,answer\nA?\n", "row 1 has no 'answer'"),
        ("own.csv", 'question,answer\n"A?,1\n', "own.csv is no table in UTF-8"),
        (
            "own.csv",
            "question,answer,answer\nA?,1,2\n",
            "header names a column twice: answer, answer",
        ),
        ("own.json", '[{"question": "A?"}]', "own.json, object 1 has no 'answer'"),
        ("own.json", "[1]", "object 1: got 1, expected a JSON object"),
        ("own.json", "[{", "own.json is not JSON"),
        ("own.parquet", "PAR1", "save it as train.parquet in a folder.*environment.dataset"),
    ],
)
def test_a_file_of_another_form_is_called_what_it_is(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises((ConfigError, EnvironmentDataError), match=message):
        made(path)


def test_a_line_that_is_no_json_is_named_and_empty_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(question(1)) + "\n\n{'question': 3}\n", encoding="utf-8")
    with pytest.raises(EnvironmentDataError, match="line 3 is not JSON"):
        made(path)


def test_a_key_that_stands_twice_in_a_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "Which?", "answer": "Lima", "answer": "Quito"}\n', "utf-8")
    with pytest.raises(EnvironmentDataError, match="line 1 is .*: the key 'answer' stands twice"):
        made(path)


def test_a_file_without_questions_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(EnvironmentDataError, match="has no question"):
        made(path)


@pytest.mark.parametrize("option", ["data", "test_data"])
def test_a_missing_file_is_an_error_that_names_the_option(option: str, tmp_path: Path) -> None:
    there = str(write_rows(tmp_path / "own.jsonl", [question(number) for number in range(9)]))
    options = {"data": there, "test_data": there, option: str(tmp_path / "no.jsonl")}
    with pytest.raises(
        ConfigError,
        match=rf"environment\.{option}: .*no\.jsonl.*No such file.*the current directory",
    ):
        make_environment("questions", options)


def test_a_split_without_questions_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(1)])
    with pytest.raises(ConfigError, match="has none of 1 question; change test_share"):
        made(path)


def test_an_answer_that_is_no_number_is_refused_where_numbers_are_compared(tmp_path: Path) -> None:
    rows = [{"question": "Capital of Peru?", "answer": "Lima"}, *(question(n) for n in range(20))]
    path = write_rows(tmp_path / "own.jsonl", rows)
    with pytest.raises(EnvironmentDataError, match="line 1: the answer 'Lima' is no number"):
        made(path, compare="number")


def test_a_whole_number_of_any_length_is_text_as_any_other(tmp_path: Path) -> None:
    rows = [{**question(number), "answer": 10**400 + number} for number in range(9)]
    task = made(write_rows(tmp_path / "q.jsonl", rows)).tasks("train")[0]
    assert len(task.payload["answer"]) == 401
