r"""Questions with their answers as files and data sets have them, checked and divided.

A row has `question` and `answer`, and may have `category` and `id`. The answer of GSM8K is a
derivation, then `#### 42`; that of MATH ends in `\boxed{42}`. Then the rest is the row's solution.
"""

import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_apo.environments.answers import problem_with_text
from ragen_apo.environments.questions.numbers import unboxed
from ragen_apo.environments.questions.options import READ
from ragen_apo.errors import ConfigError, EnvironmentDataError
from ragen_apo.files import parse_json, require_regular_file
from ragen_apo.printable import shortened
from ragen_apo.seeding import derive_seed

NAME = "questions"
MAX_ANSWER_CHARACTERS = 500
"""Longer answers are no answers, the right ones included."""
DEFAULT_CATEGORY = "question"

_FINAL = "####"
_CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's notes for a calculator, `<<48/2=24>>`."""


@dataclass(frozen=True)
class Row:
    """One question with its answer."""

    question: str
    answer: str
    """The right one."""
    solution: str
    """How to get there; empty where the data does not say."""
    category: str
    name: str
    """Its id in the data; empty for none."""
    location: str
    """File and line, for messages."""
    more: Mapping[str, Any]
    """What else it has, by name, if that is kept."""

    @property
    def key(self) -> str:
        """The question without regard to spaces."""
        return " ".join(self.question.split())


def read_rows(
    path: Path, *, option: str, columns: Mapping[str, str], keep_columns: bool
) -> list[Row]:
    """The rows of a file of JSONL, JSON or CSV, without other columns unless they are kept.

    Raises ConfigError, which names the option, for no such file and for a column that no row has,
    and EnvironmentDataError, which names the line, for a row that cannot be used.
    """
    try:
        require_regular_file(path)
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(
            f"environment.{option}: got {str(path)!r}, which cannot be read ({error.strerror}); "
            "expected a JSONL, JSON or CSV file with questions and their answers, or `arithmetic`; "
            f"a relative path starts in the current directory, {Path.cwd()}"
        ) from error
    kind = path.suffix.lower()
    if kind == ".parquet":
        raise ConfigError(
            f"environment.{option}: got {str(path)!r}, expected a JSONL, JSON or CSV file; save it "
            "as train.parquet in a folder, and name the folder as environment.dataset"
        )
    if kind in (".csv", ".tsv"):
        found = _of_table(content, path, delimiter="," if kind == ".csv" else "\t")
    elif kind == ".json" and content.lstrip()[:1] == b"[":
        array = _parsed(content, str(path))
        found = ((f"{path}, object {number}", values) for number, values in enumerate(array, 1))
    else:
        found = _of_lines(content, path)
    rows, keys = [], set[str]()
    for location, values in found:
        if not isinstance(values, dict):
            got = shortened(repr(values), 80)
            raise EnvironmentDataError(f"{location}: got {got}, expected a JSON object")
        rows.append(row_of(values, columns, location=location, keep_columns=keep_columns))
        keys |= values.keys()
    if not rows:
        raise EnvironmentDataError(f"{path} has no question; expected one in each line")
    for key, column in columns.items():
        if column not in (key, *keys):
            raise ConfigError(
                f"environment.{key}_column: got {column!r}, expected one of the columns of {path}: "
                f"{', '.join(sorted(keys))}"
            )
    return rows


def _of_lines(content: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            location = f"{path}, line {number}"
            yield location, _parsed(line, location)


def _parsed(text: bytes, location: str) -> Any:
    try:
        return parse_json(text, unique_keys=True)
    except ValueError as error:
        raise EnvironmentDataError(f"{location} is not JSON with unique keys: {error}") from error


def _of_table(content: bytes, path: Path, *, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Rows are numbered without the header: one with line breaks has several lines."""
    try:
        text = content.decode()
        header = text.partition("\n")[0]
        if delimiter not in header and ";" in header:  # as Excel writes it in much of Europe
            delimiter = ";"
        table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        table.fieldnames = names = [name.strip() for name in table.fieldnames or ()]
        if len(set(names)) < len(names):
            raise EnvironmentDataError(
                f"{path}: the header names a column twice: {', '.join(sorted(names))}"
            )
        for number, values in enumerate(table, 1):
            if None in values:
                raise EnvironmentDataError(
                    f"{path}, row {number} has more cells than the header; a cell with "
                    f"{delimiter!r} stands in double quotes"
                )
            yield f"{path}, row {number}", values
    except (csv.Error, UnicodeDecodeError) as error:
        raise EnvironmentDataError(f"{path} is no table in UTF-8: {error}") from error


def row_of(
    values: Mapping[str, Any], columns: Mapping[str, str], *, location: str, keep_columns: bool
) -> Row:
    """A row, checked; EnvironmentDataError with the location where it cannot be used."""
    for key in ("question", "answer"):
        if values.get(columns[key]) is None:
            there = ", ".join(map(str, values)) or "none"
            raise EnvironmentDataError(
                f"{location} has no {columns[key]!r}; its keys: {there}. environment.{key}_column "
                f"says which is the {key}"
            )
    answer, solution = _final_answer(_text(values, columns["answer"], location))
    if problem := problem_with_answer(answer):
        raise EnvironmentDataError(
            f"{location}: {columns['answer']!r} is no right answer: {problem}. A derivation may "
            "stand before `#### ` and the answer"
        )
    question = _text(values, columns["question"], location).strip()
    if not question:
        raise EnvironmentDataError(f"{location}: {columns['question']!r} is empty")
    return Row(
        question=question,
        answer=answer,
        solution=solution,
        category=_optional(values, columns.get("category"), location) or DEFAULT_CATEGORY,
        name=_optional(values, columns.get("id"), location),
        location=location,
        more=_others(values, columns, location) if keep_columns else {},
    )


def problem_with_answer(text: str) -> str | None:
    """Why this is no answer, right or wrong; None where it is one."""
    if not text.strip():
        return "it is empty"
    if len(text) > MAX_ANSWER_CHARACTERS:
        return f"it has {len(text):,} characters, and {MAX_ANSWER_CHARACTERS} are allowed"
    if any(unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\r\t" for each in text):
        return "it has control characters"
    return None


def _text(values: Mapping[str, Any], key: str, location: str) -> str:
    """The text under a key; a number is text, too."""
    value = values[key]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if not isinstance(value, str):
        found = shortened(repr(value), 80)
        raise EnvironmentDataError(f"{location}: {key!r} is {found}, expected text or a number")
    if problem := problem_with_text(value):
        raise EnvironmentDataError(f"{location}: {key!r}: {problem}")
    return value


def _optional(values: Mapping[str, Any], key: str | None, location: str) -> str:
    if key is None or values.get(key) is None:
        return ""
    return _text(values, key, location).strip()


def _others(values: Mapping[str, Any], columns: Mapping[str, str], location: str) -> dict[str, Any]:
    """What else a row has, which has to fit into the payload of a task."""
    named = {*columns.values(), *READ}
    others = {key: value for key, value in values.items() if key not in named}
    for key, value in others.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EnvironmentDataError(
                f"{location}: {key!r} is {shortened(repr(value), 80)}, which no file of JSON can "
                "hold; expected text, numbers, true, false, null, lists and objects. Leave the "
                "column out"
            ) from error
    return others


def _final_answer(text: str) -> tuple[str, str]:
    """The right answer, and the derivation before it."""
    before, mark, after = text.rpartition(_FINAL)
    if mark:
        return after.strip(), _CALCULATOR.sub("", before).strip()
    boxed = unboxed(text)
    if boxed != text and len(boxed) + len("$\\boxed{}$.") < len(text):
        return boxed.strip(), text.strip()
    return text.strip(), ""


def divided(rows: Sequence[Row], *, test_share: float) -> tuple[list[Row], list[Row]]:
    """Rows of train and test by a hash of each one's id, else of its question.

    Others do not move when one is added.
    """
    train: list[Row] = []
    test: list[Row] = []
    for row in rows:
        drawn = derive_seed(NAME, "split", row.name or row.key) / 2**63
        (test if drawn < test_share else train).append(row)
    return train, test


def distinct(
    train: Sequence[Row], test: Sequence[Row], *, refuse_contradictions: bool
) -> dict[str, list[Row]]:
    """The rows of each split with each question once: the first of equal ones, that of the test.

    Raises EnvironmentDataError for two rows with one id and, if that is to be refused, for a
    question with two answers.
    """
    kept: dict[str, list[Row]] = {"train": [], "test": []}
    by_question: dict[str, Row] = {}
    by_name: dict[str, Row] = {}
    for split, rows in (("test", test), ("train", train)):
        for row in rows:
            namesake = by_name.setdefault(row.name, row) if row.name else row
            if namesake is not row:
                raise EnvironmentDataError(
                    f"{row.location} has the id {row.name!r} of {namesake.location}; every id may "
                    "occur once"
                )
            first = by_question.setdefault(row.key, row)
            if first is row:
                kept[split].append(row)
            elif first.answer != row.answer and refuse_contradictions:
                raise EnvironmentDataError(
                    f"{row.location} asks what {first.location} asks, and its answer is "
                    f"{shortened(repr(row.answer), 40)} instead of "
                    f"{shortened(repr(first.answer), 40)}; remove one of them"
                )
    return kept
