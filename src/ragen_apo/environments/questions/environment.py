"""Questions with checked answers: the policy thinks, answers once, and is right (1) or wrong (0).

The setting of Brantley et al. (2025), "Accelerating RL for LLM Reasoning with Optimal Advantage
Regression" (arXiv 2505.20686). Questions are generated sums, the lines of a file, or a Hugging Face
data set. Deterministic: seeds are not used.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ragen_apo.environments.base import (
    EnvironmentProperties,
    FailureWords,
    PatternWords,
    ScriptedPolicy,
    validate_options,
)
from ragen_apo.environments.questions.arithmetic import describe_question, draw_question
from ragen_apo.environments.questions.comparing import Comparison, Mode, comparison
from ragen_apo.environments.questions.hub import dataset_rows
from ragen_apo.environments.questions.numbers import read_quantity
from ragen_apo.environments.questions.options import (
    ARITHMETIC,
    SOURCES,
    ArithmeticOptions,
    DatasetOptions,
    FileOptions,
    QuestionOptions,
)
from ragen_apo.environments.questions.rows import (
    NAME,
    Row,
    distinct,
    divided,
    problem_with_answer,
    read_rows,
)
from ragen_apo.environments.questions.scripted import arithmetic_policies, known_answer_policies
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.environments.toolkit.task_draws import SPLITS, draw_tasks
from ragen_apo.errors import ConfigError, EnvironmentDataError
from ragen_apo.plural import counted
from ragen_apo.types import Task, make_task

TEXT_VERSION = 1
"""Raise it whenever the words of an observation or the dynamics change."""

FAILURE_WORDS = FailureWords(
    wrong_final_action=PatternWords(
        name="wrong answer",
        meaning="The agent answered, and the answer is not the right one.",
        advice="Read some in the report: an answer that is right and written otherwise is a matter "
        "of `environment.compare`; else see how often the reference is right (Stage 1).",
    ),
    impossible=PatternWords(
        name="no answer",
        meaning="The answer was empty, too long or held control characters.",
    ),
)


class QuestionGame:
    """One question, answered once."""

    def __init__(self, compare: Comparison, task: Task, seed: int) -> None:
        self._compare, self._question = compare, task.instruction
        self._right = str(task.payload["answer"])
        self._answered = ""

    def first_observation(self) -> str:
        return f"QUESTION: {self._question}"

    def play(self, text: str) -> Answer:
        if problem := problem_with_answer(text):
            return Answer(f"Invalid answer: {problem}.", invalid=True)
        if self._compare.is_right(text, self._right):
            self._answered = "right"
            return Answer("Right.", 1.0, terminated=True, success=True)
        self._answered = "wrong"
        return Answer(f"Wrong. The answer is {self._right}.", terminated=True)

    def key(self) -> str:
        """Whether the answer was right; nothing depends on what a wrong one was."""
        return self._answered or "open"


def make_questions(**options: object) -> GameEnvironment:
    """The environment `questions`; raises ConfigError for options it does not accept.

    Raises EnvironmentDataError for questions that cannot be used.
    """
    return questions_of(options, keep_columns=False)


def questions_of(options: Mapping[str, object], *, keep_columns: bool) -> GameEnvironment:
    """`make_questions` of these options.

    With `keep_columns` the payload of a task has what else its row has.
    """
    data, dataset = options.get("data"), options.get("dataset")
    if dataset is not None and data is not None:
        raise ConfigError(
            f"environment: got both data {data!r} and dataset {dataset!r}, expected one of them; "
            "set the other to null"
        )
    if dataset is not None:
        return _of_rows(_checked(DatasetOptions, options), keep_columns)
    if data in (None, ARITHMETIC):
        return _of_arithmetic(_checked(ArithmeticOptions, options))
    return _of_rows(_checked(FileOptions, options), keep_columns)


_Options = TypeVar("_Options", bound=QuestionOptions)


def _checked(model_class: type[_Options], options: Mapping[str, object]) -> _Options:
    """The options of this source. Those of other sources may be null, which is as if not there."""
    source_of = {
        option: source
        for source, each in SOURCES.items()
        for option in each.model_fields
        if option not in model_class.model_fields
    }
    others = [key for key, value in options.items() if key in source_of and value is not None]
    if others:
        named = ", ".join(f"environment.{key}" for key in others)
        sources = " and ".join(dict.fromkeys(f"`{source_of[key]}`" for key in others))
        got = options.get("dataset") or options.get("data") or ARITHMETIC
        raise ConfigError(
            f"{named}: only for {sources}, and the questions are those of {got!r}. Leave out what "
            "does not apply, or set it to null"
        )
    absent = source_of.keys() | {"data", "dataset"}
    given = {key: each for key, each in options.items() if each is not None or key not in absent}
    return validate_options(model_class, given)


def _of_arithmetic(options: ArithmeticOptions) -> GameEnvironment:
    tasks = draw_tasks(
        NAME,
        draw_question,
        (options.min_terms, options.max_terms, options.max_number, tuple(options.operations)),
        content=str,
        describe=describe_question,
        counts=options.counts,
    )
    return _environment(options, tasks, policies=arithmetic_policies(tasks["train"]))


_Tasks = Mapping[str, Sequence[Task]]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # `read_rows` says why
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=16)
def _tasks_of(
    options: FileOptions | DatasetOptions, stamps: tuple[object, ...], keep_columns: bool
) -> tuple[_Tasks, int]:
    """The tasks, and how many rows were left out as repeated.

    The same object for files that have not changed since, which `stamps` says.
    """
    if isinstance(options, FileOptions):
        read = [
            read_rows(path, option=option, columns=options.columns, keep_columns=keep_columns)
            for option, path in options.paths.items()
        ]
    else:
        read = dataset_rows(options, keep_columns=keep_columns)
    train, test = read if len(read) > 1 else divided(read[0], test_share=options.test_share)
    rows_of = distinct(train, test, refuse_contradictions=isinstance(options, FileOptions))
    num_kept = sum(map(len, rows_of.values()))
    for split, rows in rows_of.items():
        if not rows:
            raise ConfigError(
                f"environment: the split {split} has none of {counted(num_kept, 'question')}; "
                "change test_share, or give the test questions a file of their own as test_data"
            )
    tasks = {
        split: tuple(_task(row, split, options.compare) for row in rows)
        for split, rows in rows_of.items()
    }
    return tasks, sum(map(len, read)) - num_kept


def _task(row: Row, split: str, compare: Mode) -> Task:
    if compare == "number" and read_quantity(row.answer) is None:
        raise EnvironmentDataError(
            f"{row.location}: the answer {row.answer[:80]!r} is no number, which "
            "environment.compare: number asks for; choose auto, math or text"
        )
    optional = {"solution": row.solution, "id": row.name}
    return make_task(
        environment=NAME,
        instruction=row.question,
        split=split,
        category=row.category,
        payload={
            **row.more,
            "answer": row.answer,
            **{key: value for key, value in optional.items() if value},
        },
    )


def _of_rows(options: FileOptions | DatasetOptions, keep_columns: bool) -> GameEnvironment:
    stamps = tuple((path.absolute(), _stamp(path)) for path in options.files())
    # pydantic's frozen models are hashable
    tasks, num_left_out = _tasks_of(options, stamps, keep_columns)  # pyright: ignore[reportArgumentType]
    number = sum(map(len, tasks.values()))
    repeated = f"; {counted(num_left_out, 'repeated one')} left out" if num_left_out else ""
    return _environment(
        options,
        tasks,
        policies=known_answer_policies(tasks["train"]),
        data=f"{counted(number, 'question')} of {options.source}{repeated}",
    )


def _environment(
    options: QuestionOptions,
    tasks: _Tasks,
    *,
    policies: Mapping[str, Callable[[], ScriptedPolicy]],
    data: str = "",
) -> GameEnvironment:
    compare = comparison(options.compare)
    properties = EnvironmentProperties(
        name=NAME,
        version=f"{NAME}-{TEXT_VERSION}-turns{options.max_turns}",
        reward_version=compare.version,
        deterministic=True,
        return_range=(0.0, 1.0),
        splits=SPLITS,
        rules=(
            "You are asked a question. Think step by step, then answer once. Your action is the "
            "answer alone, such as 42, without the way to it."
        ),
        data=data,
        failure_words=FAILURE_WORDS,
    )
    return GameEnvironment(
        properties=properties,
        tasks=tasks,
        start=functools.partial(QuestionGame, compare),
        policies=policies,
        max_turns=options.max_turns,
    )
