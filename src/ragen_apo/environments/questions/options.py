"""The options of the environment `questions`, for each source of questions."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ragen_apo.config.section import PathText, Section
from ragen_apo.environments.questions.arithmetic import Operation
from ragen_apo.environments.questions.comparing import Mode
from ragen_apo.environments.toolkit.task_draws import DrawnTasks

ARITHMETIC = "arithmetic"
READ = ("question", "answer", "category", "id")
"""What is read of a row."""


class QuestionOptions(Section):
    """The options of all questions."""

    compare: Mode = "auto"
    """How an answer is compared with the right one: as text, as a number, by math-verify, or what
    suits the right answer (see docs/questions.md)."""
    max_turns: int = Field(default=1, ge=1, le=1000)
    """An answer ends the episode, right or wrong; more turns are for text that is no answer."""


class ArithmeticOptions(DrawnTasks, QuestionOptions):
    """The options of the environment `questions` with `data: arithmetic`, generated questions."""

    data: Literal["arithmetic"] = "arithmetic"
    """These questions: what a row of numbers and operations is."""
    min_terms: int = Field(default=2, ge=2, le=20)
    """The numbers in a question, at least."""
    max_terms: int = Field(default=3, ge=2, le=20)
    """The numbers in a question, at most; the category of a question is how many it has."""
    max_number: int = Field(default=10, ge=1, le=1000)
    """Numbers are drawn from 1 to this one."""
    operations: list[Operation] = Field(default=["+", "-"], min_length=1)
    """What joins the numbers; multiplication goes first."""

    @model_validator(mode="after")
    def _terms_fit(self) -> "ArithmeticOptions":
        if self.max_terms < self.min_terms:
            raise ValueError("expected max_terms to be at least min_terms")
        return self


class _Divided(QuestionOptions):
    """The options of questions that come in one piece or in two."""

    test_share: float = Field(default=0.2, gt=0, lt=1)
    """The share of the questions that is the split `test`, where the data does not say which. A
    hash of each one's id, or of its words, decides: a question that is added moves no other."""
    question_column: str = "question"
    """The column, or key, with the question."""
    answer_column: str = "answer"
    """That with the answer; after a derivation, what follows `####` or stands in a box."""
    category_column: str | None = None
    """That with the category; null: all questions are of one."""
    id_column: str | None = None
    """That with an id of each question; null: there is none."""

    @property
    def columns(self) -> dict[str, str]:
        """The column of each thing that is read, by its name here; without null."""
        named = {key: getattr(self, f"{key}_column") for key in READ}
        return {key: column for key, column in named.items() if column is not None}


class FileOptions(_Divided):
    """The options of the environment `questions` with `data: FILE.jsonl`."""

    data: PathText = Field(min_length=1)
    """A file with a JSON object in each line, one `.json` array of objects, or a `.csv` or `.tsv`
    table with a header. A relative path starts in the current directory."""
    test_data: Annotated[PathText, Field(min_length=1)] | None = None
    """Another such file that is the split `test`; null: a share of `data`."""
    category_column: str | None = "category"
    """That with the category; null, or where there is none: all questions are of one."""
    id_column: str | None = "id"
    """That with an id of each question, where there are any; null: there is none."""

    @property
    def paths(self) -> Mapping[str, Path]:
        """The one file or both, by the option that names it."""
        named = {"data": self.data, "test_data": self.test_data}
        return {option: Path(path) for option, path in named.items() if path is not None}

    def files(self) -> list[Path]:
        """What is read."""
        return list(self.paths.values())

    @property
    def source(self) -> str:
        """Where the questions are from, in words."""
        return " and ".join(map(str, self.paths.values()))


class DatasetOptions(_Divided):
    """The options of the environment `questions` with a `dataset` of Hugging Face."""

    dataset: PathText = Field(min_length=1)
    """Its name, `openai/gsm8k`, or a local folder; the package `datasets` loads it."""
    subset: str | None = None
    """One of its configurations, `main`; null: the only one."""
    revision: str | None = None
    """A branch, tag or commit of the data set; null: the newest."""
    train_split: str = "train"
    """What it calls the training questions."""
    test_split: str | None = "test"
    """What it calls the test questions; null: they are a share of the training questions."""

    def files(self) -> list[Path]:
        """Those of a local folder, at most a thousand."""
        return list(itertools.islice(Path(self.dataset).rglob("*.*"), 1000))

    @property
    def source(self) -> str:
        """What is loaded, in words."""
        return f"{self.dataset} ({self.subset})" if self.subset else self.dataset


SOURCES: Mapping[str, type[QuestionOptions]] = {
    "dataset: NAME": DatasetOptions,
    "data: FILE": FileOptions,
    "data: arithmetic": ArithmeticOptions,
}
"""What says where questions are from, and the options that there are then."""
