from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.contract import play
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task, make_task
from tests.environments.questions.files import question, write_rows


def task_of(asked: str, answer: str) -> Task:
    return make_task(
        environment="questions",
        instruction=asked,
        split="train",
        category="",
        payload={"answer": answer},
    )


def answered(environment: TextEnvironment, task: Task, *texts: str) -> list[tuple[Any, ...]]:
    environment.reset(task, seed=0)
    return [environment.step(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "reward"), [("7", 1.0), ("3 + 4 = 7", 1.0), ("8", 0.0), ("?", 0.0)]
)
def test_an_answer_ends_the_episode_and_earns_one_or_nothing(text: str, reward: float) -> None:
    environment = make_environment("questions", {"max_turns": 3})
    ((_, earned, terminated, truncated, info),) = answered(
        environment, task_of("What is 3 + 4?", "7"), text
    )
    assert (earned, terminated, truncated, info["success"]) == (reward, True, False, reward == 1.0)


def test_the_policy_reads_the_question_and_afterwards_the_report_says_the_answer() -> None:
    environment = make_environment("questions", {})
    first, _ = environment.reset(task_of("What is 3 + 4?", "7"), seed=0)
    assert first == "QUESTION: What is 3 + 4?"
    assert environment.step("8")[0] == "Wrong. The answer is 7."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("1" * 501, "it has 501 characters, and 500 are allowed"),
        ("7\x00", "it has control characters"),
        ("\ud8007", "it has control characters"),
    ],
)
def test_what_is_no_answer_costs_the_turn_and_nothing_else(text: str, problem: str) -> None:
    environment = make_environment("questions", {"max_turns": 2})
    invalid, right = answered(environment, task_of("What is 3 + 4?", "7"), text, "7")
    assert invalid == (f"Invalid answer: {problem}.", 0.0, False, False, {"invalid_action": True})
    assert right[1] == 1.0


def test_by_default_there_is_one_turn() -> None:
    environment = make_environment("questions", {})
    ((_, earned, terminated, truncated, info),) = answered(
        environment, task_of("What is 3 + 4?", "7"), ""
    )
    assert (earned, terminated, truncated, info["success"]) == (0.0, False, True, False)


def test_generated_questions_have_the_terms_the_numbers_and_the_operations_asked_for() -> None:
    options = {"min_terms": 3, "max_terms": 4, "max_number": 5, "operations": ["*", "-"]}
    environment = make_environment("questions", {**options, "data": "arithmetic"})
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    assert len(tasks) == 500
    assert {task.category for task in tasks} == {"terms: 3", "terms: 4"}
    for task in tasks:
        parts = task.instruction.removeprefix("What is ").removesuffix("?").split()
        assert task.category == f"terms: {len(parts[::2])}"
        assert all(1 <= int(number) <= 5 for number in parts[::2])
        assert set(parts[1::2]) <= {"*", "-"}
        assert int(task.payload["answer"]) == eval(" ".join(parts))


def test_more_generated_questions_begin_with_those_of_fewer() -> None:
    few, many = (
        make_environment("questions", {"num_train_tasks": number}).tasks("train")
        for number in (50, 300)
    )
    assert list(few) == list(many[:50])


def test_the_hasty_policy_is_right_on_easy_questions_only_and_the_teacher_in_between() -> None:
    environment = make_environment("questions", {"operations": ["+"]})
    tasks = environment.tasks("train")
    share: dict[tuple[str, str], float] = {}
    for name in ("hasty", "teacher", "heuristic"):
        make_policy = environment.scripted_policies()[name]
        for category in ("terms: 2", "terms: 3"):
            asked = [task for task in tasks if task.category == category]
            wins = [
                play(environment, t, make_policy(), seed=n).success for n, t in enumerate(asked)
            ]
            share[name, category] = sum(wins) / len(wins)
    assert share["hasty", "terms: 2"] == share["teacher", "terms: 2"] == 1.0
    assert share["hasty", "terms: 3"] == 0.0
    assert 0.25 < share["teacher", "terms: 3"] < 0.45  # TEACHER_GOOD_SHARE is 0.35
    assert share["heuristic", "terms: 3"] == 1.0


def test_the_thought_is_the_way_to_the_answer_multiplications_first() -> None:
    environment = make_environment("questions", {})
    policy = environment.scripted_policies()["heuristic"]()
    task = task_of("What is 3 + 4 * 2 - 1?", "10")
    policy.begin(task, seed=0)
    reply = policy.act(environment.reset(task, seed=0)[0])
    assert (reply.thought, reply.action) == ("4 * 2 = 8; 3 + 8 = 11; 11 - 1 = 10", "10")


def test_in_a_file_the_key_knows_and_the_heuristic_answers_what_is_commonest(
    tmp_path: Path,
) -> None:
    rows = [{"question": f"Is {number} even?", "answer": "no"} for number in range(1, 60, 2)]
    rows += [{"question": "Is 2 even?", "answer": "2 = 2 * 1\n#### yes"}]
    path = write_rows(tmp_path / "own.jsonl", rows)
    environment = make_environment("questions", {"data": str(path)})
    task = task_of("Is 4 even?", "yes")
    policies = environment.scripted_policies()
    results = {name: play(environment, task, policies[name]()).success for name in policies}
    assert (
        results == {"teacher": True, "oracle": True, "random": False, "heuristic": False}
        or (
            results["random"]  # the guess may be right
        )
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_term": 4}, "max_term: unknown key; did you mean environment.max_terms"),
        (
            {"data": "own.jsonl", "max_terms": 4, "operations": ["+"], "min_terms": None},
            "environment.max_terms, environment.operations: only for `data: arithmetic`, and .*"
            "own.jsonl.*or set it to null$",
        ),
        ({"question_column": "q"}, "question_column: only for `data: FILE`, and .*'arithmetic'"),
        ({"data": "own.jsonl", "maxterms": None}, "maxterms: unknown key"),
        ({"data": "own.jsonl", "test_share": 1.5}, "test_share: got 1.5, expected"),
        ({"compare": "maths"}, "compare: got 'maths', expected auto or math or text or number"),
        ({"operations": ["/"]}, r"operations.*got '/', expected"),
        ({"operations": []}, r"operations: got \[\], expected a list of"),
        ({"min_terms": 5, "max_terms": 4}, "max_terms to be at least min_terms"),
        ({"data": "arithmetic", "dataset": "openai/gsm8k"}, "got both data.*expected one of them"),
        ({"data": "a.jsonl", "train_split": "q"}, "train_split: only for `dataset: NAME`, and"),
        ({"data": 3}, "data: got 3, expected text"),
        (
            {"max_number": 2, "max_terms": 2, "num_train_tasks": 9, "num_test_tasks": 1},
            "ask for fewer tasks",
        ),
    ],
)
def test_options_that_do_not_fit_are_errors_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment("questions", options)


@pytest.mark.usefixtures("homeless")
def test_a_path_below_a_home_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"environment.data: got '~/own.jsonl', which cannot"):
        make_environment("questions", {"data": "~/own.jsonl"})


def test_a_source_that_is_null_is_none(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(number) for number in range(30)])
    of_file = make_environment("questions", {"data": str(path), "dataset": None, "subset": None})
    assert of_file.properties.data == f"30 questions of {path}"
    other = {"min_terms": None, "num_train_tasks": None, "train_split": None}
    assert make_environment("questions", {"data": str(path), **other}).tasks("train")
    generated = make_environment("questions", {"data": None, "test_data": None})
    assert generated.tasks("train")[0].category.startswith("terms: ")


def test_another_way_to_compare_is_another_version_of_the_reward(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(number) for number in range(30)])
    versions = {
        make_environment(
            "questions", {"data": str(path), "compare": mode}
        ).properties.reward_version
        for mode in ("auto", "text", "number")
    }
    assert len(versions) == 3


@pytest.mark.parametrize("option", ["data", "test_data"])
def test_an_empty_path_is_refused_by_name(option: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "q.jsonl", [question(number) for number in range(9)])
    options = {"data": str(tmp_path / "q.jsonl"), option: ""}
    with pytest.raises(ConfigError, match=f"environment.{option}"):
        make_environment("questions", options)
