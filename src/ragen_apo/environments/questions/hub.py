"""Questions of a Hugging Face data set, or of a local folder that is one.

The package `datasets` reads them, an optional extra that is imported only here. Which files a
folder may hold, and how their names say the split (`train.jsonl`, `data/test-00000.parquet`), is
what it documents.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ragen_apo.environments.questions.options import READ, DatasetOptions
from ragen_apo.environments.questions.rows import Row, row_of
from ragen_apo.errors import ConfigError
from ragen_apo.printable import shortened


def dataset_rows(options: DatasetOptions, *, keep_columns: bool) -> list[list[Row]]:
    """The rows of the training split and, where it is named, of the test split.

    Columns that no option names are read only if they are kept.

    Raises ConfigError where `datasets` is not installed, the data set cannot be loaded, or it has
    no such split or column, and EnvironmentDataError for a row that cannot be used.
    """
    loaded, pieces = _loaded(options), []
    for kind in ("train", "test"):
        split = getattr(options, f"{kind}_split")
        if split is None:
            continue
        _check(
            f"{kind}_split",
            split,
            list(loaded),
            f"the splits of {options.source}",
            or_else="; null holds a share of the training questions out" * (kind == "test"),
        )
        columns = options.columns
        for key, column in columns.items():
            known = loaded[split].column_names
            _check(f"{key}_column", column, known, f"the columns of {options.source}")
        named = {*columns.values(), *READ}
        others = [name for name in loaded[split].column_names if keep_columns and name not in named]
        wanted = [*dict.fromkeys(columns.values()), *others]
        pieces.append(
            [
                row_of(
                    values,
                    columns,
                    location=f"{options.source}, row {number} of {split}",
                    keep_columns=keep_columns,
                )
                for number, values in _decoded(loaded[split].select_columns(wanted), options, split)
            ]
        )
    return pieces


def _loaded(options: DatasetOptions) -> Mapping[str, Any]:
    if os.path.isfile(options.dataset):
        raise ConfigError(
            f"environment.dataset: got {options.dataset!r}, which is a file; name a JSONL, JSON or "
            "CSV file as environment.data. A parquet file is read as train.parquet of a folder"
        )
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"environment.dataset: got {options.dataset!r}, which needs the package `datasets` "
            f"({error}); run `pip install 'ragen-apo[datasets]'`, or write the questions into a "
            "file and name it as environment.data"
        ) from error
    try:
        loaded: Any = datasets.load_dataset(
            options.dataset, options.subset, revision=options.revision
        )
        return dict(loaded)
    except Exception as error:
        raise ConfigError(
            f"environment.dataset: {options.source} could not be loaded. {_reason(error)}. "
            "Expected a data set of huggingface.co, where that can be reached, or a local folder; "
            "environment.subset names one of several configurations"
        ) from error


def _decoded(
    rows: Iterable[Mapping[str, Any]], options: DatasetOptions, split: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows, numbered from 1; those of pictures and sounds may fail."""
    try:
        yield from enumerate(rows, 1)
    except Exception as error:
        raise ConfigError(
            f"environment.dataset: {options.source} cannot be read, split {split}. "
            f"{_reason(error)}. Columns that are not used are not read; tools get all of them"
        ) from error


def _reason(error: Exception) -> str:
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), 500)


def _check(option: str, got: str, known: Sequence[str], what: str, or_else: str = "") -> None:
    if got not in known:
        raise ConfigError(
            f"environment.{option}: got {got!r}, expected one of {what}: {', '.join(known)}"
            f"{or_else}"
        )
