"""Data sets from local folders take the path of those from the hub."""

import sys
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.questions.environment import questions_of
from ragen_apo.errors import ConfigError, EnvironmentDataError
from tests.environments.questions.files import question, write_rows


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, which writes what it prepared into the folder of the test."""
    module = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


def folder_of_lines(folder: Path) -> Path:
    folder.mkdir()
    write_rows(folder / "train.jsonl", [question(number) for number in range(20)])
    write_rows(folder / "test.jsonl", [question(number) for number in range(20, 25)])
    return folder


@pytest.mark.slow
def test_the_splits_of_a_folder_of_jsonl_files_are_its_own(datasets: Any, tmp_path: Path) -> None:
    folder = folder_of_lines(tmp_path / "set")
    environment = make_environment("questions", {"dataset": str(folder)})
    assert [len(environment.tasks(split)) for split in ("train", "test")] == [20, 5]
    assert environment.properties.data == f"25 questions of {folder}"


@pytest.mark.slow
def test_a_folder_of_parquet_files_with_other_columns_and_one_split(
    datasets: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [
        {"problem": f"Double {n}?", "solution": f"So $\\boxed{{{2 * n}}}$.", "level": f"L{n % 2}"}
        for n in range(30)
    ]
    rows.append({**rows[0], "solution": "So $\\boxed{other}$."})
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    options = {
        "question_column": "problem",
        "answer_column": "solution",
        "category_column": "level",
        "test_split": None,
        "test_share": 0.3,
    }
    environment = make_environment("questions", {"dataset": str(folder), **options})
    train, test = environment.tasks("train"), environment.tasks("test")
    assert len(train) + len(test) == 30
    assert len(test) > 2
    assert {task.category for task in train} == {"L0", "L1"}
    assert all(
        task.payload["answer"] == str(2 * int(task.instruction.split()[1].rstrip("?")))
        for task in (*train, *test)
    )
    assert environment.properties.data.endswith("; 1 repeated one left out")


@pytest.mark.slow
def test_other_columns_are_kept_where_they_are_asked_for(datasets: Any, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{**question(number), "category": "x", "board": [number]} for number in range(20)]
    write_rows(folder / "train.jsonl", rows)
    options = {"dataset": str(folder), "test_split": None}
    for keep_columns in (False, True):
        task = questions_of(options, keep_columns=keep_columns).tasks("train")[0]
        assert task.category == "question", "no option names the column"
        assert set(task.payload) == {"answer", *(["board"] if keep_columns else [])}
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{**row, "board": b"\0"} for row in rows])
    (tmp_path / "other").mkdir()
    parquet.write_table(table, tmp_path / "other" / "train.parquet")
    options["dataset"] = str(tmp_path / "other")
    assert make_environment("questions", options).tasks("train")
    with pytest.raises(EnvironmentDataError, match="'board' is b'.x00', which no file of JSON"):
        questions_of(options, keep_columns=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_column": "anwser"}, "answer_column: got 'anwser', expected.*question, answer"),
        (
            {"test_split": "validation"},
            "test_split: got 'validation', expected.*train, test; null holds a share",
        ),
        ({"train_split": "all"}, "train_split: got 'all', expected.*train, test"),
        ({"dataset": "/no/such/folder"}, "/no/such/folder could not be loaded"),
    ],
)
def test_a_name_that_the_data_set_has_not_is_an_error_with_those_it_has(
    options: dict[str, Any], message: str, datasets: Any, tmp_path: Path
) -> None:
    folder = folder_of_lines(tmp_path / "set")
    with pytest.raises(ConfigError, match=message):
        make_environment("questions", {"dataset": str(folder), **options})


def test_a_file_is_not_looked_for_at_the_hub(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(1)])
    with pytest.raises(
        ConfigError, match=r"dataset: got .*own.jsonl', which is a file; .*\.data\."
    ):
        make_environment("questions", {"dataset": str(path)})


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'ragen-apo\[datasets\]'.*environment.data"):
        make_environment("questions", {"dataset": "openai/gsm8k", "subset": "main"})


@pytest.mark.slow
def test_a_folder_that_changed_is_read_again(datasets: Any, tmp_path: Path) -> None:
    folder = folder_of_lines(tmp_path / "set")
    before = make_environment("questions", {"dataset": str(folder)})
    write_rows(folder / "train.jsonl", [question(number) for number in range(30, 40)])
    after = make_environment("questions", {"dataset": str(folder)})
    assert [len(each.tasks("train")) for each in (before, after)] == [20, 10]


@pytest.mark.slow
def test_pictures_are_read_only_where_they_are_asked_for(datasets: Any, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "set"
    rows = [
        {**question(number), "picture": {"bytes": b"none", "path": None}} for number in range(9)
    ]
    features = {"question": datasets.Value("string"), "answer": datasets.Value("string")}
    typed = datasets.Features({**features, "picture": datasets.Image()})
    folder.mkdir()
    datasets.Dataset.from_list(rows).cast(typed).to_parquet(folder / "train.parquet")
    options = {"dataset": str(folder), "test_split": None}
    assert make_environment("questions", options).tasks("train")
    with pytest.raises(ConfigError, match="cannot be read, split train.*Columns that are not used"):
        questions_of(options, keep_columns=True)
