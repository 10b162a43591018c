"""Questions of a Hugging Face data set, or of a local folder that is one.

The package `datasets` reads them, an optional extra that is imported only here. Which files a
folder may hold, and how their names say the split (`train.jsonl`, `data/test-00000.parquet`), is
what it documents.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_apo.environments.questions.rows import Columns, Row, row_of
from ragen_apo.errors import ConfigError
from ragen_apo.printable import shortened


@dataclass(frozen=True)
class DatasetName:
    """What is loaded."""

    path: str
    """Of the hub, `openai/gsm8k`, or of a folder."""
    subset: str | None
    revision: str | None

    def __str__(self) -> str:
        return f"{self.path} ({self.subset})" if self.subset else self.path


@functools.lru_cache(maxsize=4)
def dataset_rows(
    name: DatasetName, columns: Columns, splits: tuple[str, ...]
) -> Mapping[str, tuple[Row, ...]]:
    """The rows of each of the data set's splits that is asked for.

    Raises ConfigError where `datasets` is not installed, the data set cannot be loaded, or it has
    no such split or column, and EnvironmentDataError for a row that cannot be used.
    """
    loaded = _loaded(name)
    for option, split in zip(("train_split", "test_split"), splits, strict=False):
        _check(option, split, list(loaded), f"the splits of {name}")
    for option, column in _named(columns):
        for split in splits:
            _check(option, column, loaded[split].column_names, f"the columns of {name}")
    return {
        split: tuple(
            row_of(values, columns, location=f"{name}, row {number} of {split}")
            for number, values in enumerate(loaded[split], 1)
        )
        for split in splits
    }


def _loaded(name: DatasetName) -> Mapping[str, Any]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"environment.dataset: got {name.path!r}, which needs the package `datasets` "
            f"({error}); run `pip install 'ragen-apo[datasets]'`, or write the questions into a "
            "file and name it as environment.data"
        ) from error
    try:
        loaded: Any = datasets.load_dataset(name.path, name.subset, revision=name.revision)
        return dict(loaded)
    except Exception as error:
        reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 500)
        raise ConfigError(
            f"environment.dataset: {name} could not be loaded. {reason}. Expected a data set of "
            "huggingface.co, where that can be reached, or a local folder; environment.subset "
            "names one of several configurations"
        ) from error


def _named(columns: Columns) -> list[tuple[str, str]]:
    options = {
        "question_column": columns.question,
        "answer_column": columns.answer,
        "category_column": columns.category,
        "id_column": columns.name,
    }
    return [(option, column) for option, column in options.items() if column is not None]


def _check(option: str, got: str, known: Sequence[str], what: str) -> None:
    if got not in known:
        raise ConfigError(
            f"environment.{option}: got {got!r}, expected one of {what}: {', '.join(known)}"
        )
