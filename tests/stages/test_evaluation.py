"""What an evaluation knows of the tasks that it plays: whether the run was trained on them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.report.findings import evaluated_tasks
from ragen_apo.report.load import load_run
from ragen_apo.stages.evaluation import evaluate_run
from tests import factories

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_environment.md"
UNTRAINED = (
    *factories.HARDLY_TRAINED,
    "--training.max_steps=0",
    "--evaluation.num_episodes=99",
)


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, Any]:
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 9)]
    for name, some in (("train", rows[:5]), ("test", rows[5:])):
        write(tmp_path / f"{name}.jsonl", some)
    files = {"data": str(tmp_path / "train.jsonl"), "test_data": str(tmp_path / "test.jsonl")}
    return {"name": "questions", **files}


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


@pytest.fixture
def overlapping(tmp_path: Path) -> dict[str, Any]:
    """The guide's numbers, one of which is in both splits."""
    _, text, _ = re.split(r"^```(?:python)?\n", PAGE.read_text("utf-8"), maxsplit=2, flags=re.M)
    text = text.replace("range(1, 21):", "[*range(1, 21), 5]:")
    text = text.replace("secret % 5 == 0 else", "secret % 5 == 0 and len(tasks['test']) < 4 else")
    (tmp_path / "guess.py").write_text(text, encoding="utf-8")
    return {"name": f"{tmp_path}/guess.py:make_guess_number"}


@pytest.mark.parametrize(
    ("world", "split", "number", "noun", "part"),
    [
        ("questions", "test", 0, "held-out tasks", ""),
        ("questions", "train", 5, "tasks of split “train”", ""),
        ("overlapping", "test", 1, "tasks of split “test”", "1 of the 4 tasks of the split test"),
    ],
)
def test_tasks_that_a_run_was_trained_on_are_not_called_held_out(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    world: str,
    split: str,
    number: int,
    noun: str,
    part: str,
) -> None:
    environment, said = request.getfixturevalue(world), factories.Sayings()
    config = factories.config(f"--evaluation.split={split}", *UNTRAINED, environment=environment)
    run = factories.run(config, tmp_path / "run")
    assert evaluate_run(config, run, progress=said)["tasks_trained_on"] == number
    assert evaluated_tasks(load_run(run.path)) == noun
    assert bool(said.lines) == bool(part) and part in "".join(said.lines)


def test_after_a_change_of_the_data_nothing_is_called_held_out(
    tmp_path: Path, questions: dict[str, Any]
) -> None:
    """A student's test questions were replaced by training questions, and nothing said so."""
    config = factories.config(*UNTRAINED, environment=questions)
    run = factories.run(config, tmp_path / "run")
    train, test = Path(questions["data"]), Path(questions["test_data"])
    test.write_text("".join(train.read_text("utf-8").splitlines(keepends=True)[:2]), "utf-8")
    said = factories.Sayings()
    assert evaluate_run(config, run, progress=said)["tasks_trained_on"] is None
    assert "not those that this run was begun with" in "".join(said.lines)
    assert evaluated_tasks(load_run(run.path)) == "tasks of split “test”"


@pytest.mark.parametrize("change", ["--evaluation.split=train", "--evaluation.num_episodes=1"])
def test_an_evaluation_says_which_other_one_it_replaces(
    change: str, tmp_path: Path, questions: dict[str, Any]
) -> None:
    """One of fewer episodes took the place of the run's own without a word."""
    config = factories.config(*UNTRAINED, environment=questions)
    run = factories.run(config, tmp_path / "run")
    said = factories.Sayings()
    for _ in range(2):
        number = evaluate_run(config, run, progress=said)["episodes"]
        assert said.lines == []
    evaluate_run(factories.changed(config, change), run, progress=said)
    (line,) = (line for line in said.lines if "This replaces" in line)
    assert f"evaluation of {number} episodes of the split test in {run.results.parent}" in line
    assert f"`ragen-apo report {run.path}` then writes" in line
