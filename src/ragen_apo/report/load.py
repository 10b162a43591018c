"""Reads what a run has written into one record; every other module of the report reads only that.

Consumes a run directory; produces `RunData`. Files that a run may lack become empty values, a file
that is there and cannot be read is an error with its name. Numbers come through `finite`, which is
where absent fields, nulls and NaN become None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_apo.config.yaml_text import parse_yaml
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import open_run


@dataclass(frozen=True)
class RunData:
    """Everything that a report shows of one run."""

    name: str
    config_text: str
    """The resolved configuration as it was saved."""
    config: Mapping[str, Any]
    record: Mapping[str, Any]
    """`run.json`: phases with their seconds, versions."""
    warm_start: Sequence[Mapping[str, Any]]
    value_report: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    """One row per Stage 2 step; empty when the run was not trained."""
    results: Mapping[str, Any]
    episodes: Sequence[Mapping[str, Any]]

    @property
    def trained(self) -> bool:
        """Whether Stage 2 took at least one step."""
        return bool(self.metrics)

    @property
    def num_episodes(self) -> int:
        """The number of evaluated episodes."""
        return int(finite(self.results.get("episodes")) or len(self.episodes))


def load_run(run_directory: Path) -> RunData:
    """Reads a run directory.

    Raises RunDirectoryError when it is no run, has no evaluation, or a file cannot be read.
    """
    run = open_run(run_directory)
    for file in (run.results, run.episodes):
        if not file.exists():
            raise RunDirectoryError(
                f"{run_directory} has no finished evaluation: {file} is missing, and a report "
                f"is made from it. Run `ragen-apo evaluate {run_directory}` first."
            )
    config_text, config = _read_config(run.config)
    return RunData(
        name=run_directory.resolve().name,
        config_text=config_text,
        config=config,
        record=_read_object(run.status),
        warm_start=_read_rows(run.warm_start),
        value_report=_read_object(run.value_report),
        metrics=_read_rows(run.metrics),
        results=_read_object(run.results),
        episodes=_read_rows(run.episodes),
    )


def finite(value: object) -> float | None:
    """A number that can be shown or drawn; None for anything else (absent, null, NaN, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one, so that optional parts can be walked."""
    return value if isinstance(value, Mapping) else {}


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """The steps and values of one metric where it is a number; rows without a step are counted."""
    steps: list[float] = []
    values: list[float] = []
    for number, row in enumerate(rows, 1):
        value = finite(row.get(key))
        if value is not None:
            step = finite(row.get("step"))
            steps.append(number if step is None else step)
            values.append(value)
    return steps, values


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    text = _read_text(path)
    try:
        return text, mapping(parse_yaml(text)[0])
    except ValueError as error:
        raise RunDirectoryError(f"{path} {error}") from error


def _read_object(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RunDirectoryError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_rows(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        return read_json_lines(path)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
