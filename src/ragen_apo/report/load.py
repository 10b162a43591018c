"""Reads a run's files into one record, the only source of every other module of the report.

Consumes a run directory; produces `RunData`. Files that a run may lack become empty values, a file
that is there and cannot be read is an error with its name. Numbers come through `finite`, which is
where absent fields, nulls and NaN become None.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ragen_apo.config.moved import is_of_0_1, translated
from ragen_apo.config.yaml_text import parse_yaml, read_yaml
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import cut_line, file_now, read_json, read_records
from ragen_apo.plural import counted
from ragen_apo.run_directory import RunDirectory, open_evaluated


class _Row(BaseModel, extra="allow", strict=True):
    """A JSON object; its subclasses check the parts that are lists and mappings."""


class _Turn(_Row):
    observation: str | None = None
    response: str | None = None
    thought: str | None = None
    action: str | None = None
    reward: float | None = None
    flags: list[str] | None = None


class _Episode(_Row):
    episode: int | None = None
    task: dict[str, Any] | None = None
    turns: list[_Turn] | None = None
    failure: str | None = None
    stop_reason: str | None = None
    final_observation: str | None = None


class _Failure(_Row):
    examples: list[int] | None = None


class _Results(_Row):
    split: str | None = None
    policy: str | None = None
    baselines: dict[str, _Row] | None = None
    by_category: dict[str, _Row] | None = None
    failures: dict[str, _Failure] | None = None
    pass_at_k: dict[str, float | None] | None = None


class _ValueReport(_Row):
    advice: str | None = None


@dataclass(frozen=True)
class RunData:
    """The files of one run."""

    name: str
    config: Mapping[str, Any]
    record: Mapping[str, Any]
    """`run.json`: phases with their seconds, versions."""
    results: Mapping[str, Any]
    config_text: str = ""
    """The resolved configuration as it was saved."""
    warm_start: Sequence[Mapping[str, Any]] = ()
    distillation: Sequence[Mapping[str, Any]] = ()
    value_report: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    """One row per Stage 2 step; empty when the run was not trained."""
    episodes: Sequence[Mapping[str, Any]] = ()

    @property
    def trained(self) -> bool:
        """Whether Stage 2 took at least one step, also if its rows have been lost."""
        was_there = "stage 2" in mapping(self.record.get("phases"))
        return bool(self.metrics) or (was_there and self.option("training", "max_steps") != 0)

    @property
    def distilled(self) -> bool:
        """Whether its policy is what distillation has left: Stage 2 was to make no step."""
        return bool(self.distillation) and not self.trained

    def option(self, *names: str) -> Any:
        """A key of the configuration by its sections; None where it is absent."""
        value: Any = self.config
        for name in names:
            value = mapping(value).get(name)
        return value

    @property
    def num_episodes(self) -> int:
        return int(finite(self.results.get("episodes")) or len(self.episodes))


def load_run(run_directory: Path) -> RunData:
    """Reads a run directory.

    Or the folder of an evaluation of a model behind an API. Raises RunDirectoryError when it is
    neither, has no evaluation, or a file cannot be read.
    """
    run = open_evaluated(run_directory)
    if not run.is_of_api and not run.policy.exists() and not run.results.exists():
        raise RunDirectoryError(
            f"{run_directory} has no trained policy yet, and a report is made from its evaluation. "
            f"Finish it with `{run.resume_command}`"
        )
    for file in (run.results, run.episodes):
        if not file.exists():
            raise RunDirectoryError(
                f"{run_directory} has no finished evaluation: {file} is missing, and a report "
                f"is made from it. Run `{evaluation_command(run)}` first."
            )
    config_text, config = read_config(run.api_config if run.is_of_api else run.config)
    if not (run.is_of_api or "algorithm" in config):
        raise RunDirectoryError(
            f"{run.config} has no section `algorithm`: it was emptied or cut off. Put an undamaged "
            f"copy in its place, or what {run.status} notes as `configuration`."
        )
    before = file_now(run.results)
    data = RunData(
        name="".join(c if c.isprintable() else "?" for c in run_directory.resolve().name),
        config_text=config_text,
        config=config,
        record=run.read_status(),
        warm_start=_read_rows(run.warm_start, _Row),
        distillation=_read_rows(run.distillation, _Row),
        value_report=_read_object(run.value_report, _ValueReport, "estimate-values"),
        metrics=_read_rows(run.metrics, _Row),
        results=_read_object(run.results, _Results, "evaluate"),
        episodes=_read_rows(run.episodes, _Episode),
    )
    if file_now(run.results) != before:
        raise RunDirectoryError(
            f"{run_directory} is being evaluated: its results changed while they were read. Give "
            "the command again when that has ended."
        )
    if missing := missing_episodes(run, data.results, num_episodes=len(data.episodes)):
        raise missing
    return data


def missing_episodes(
    run: RunDirectory, results: Mapping[str, Any], *, num_episodes: int
) -> RunDirectoryError | None:
    """The error for another number of episodes in their file than the results count; else None."""
    expected = finite(results.get("episodes"))
    if expected is None or num_episodes == expected:
        return None
    return RunDirectoryError(
        f"{run.episodes} has {counted(num_episodes, 'episode')}, and {run.results} counts "
        f"{int(expected)}. Put an undamaged copy in its place, or write both anew with "
        f"`{evaluation_command(run)}`."
    )


def evaluation_command(run: RunDirectory) -> str:
    """What makes the evaluation of a run, or goes on with that of a model behind an API."""
    if not run.is_of_api:
        return f"ragen-apo evaluate {shlex.quote(str(run.path))}"
    try:
        asked = mapping(read_config(run.api_config)[1].get("api"))
    except RunDirectoryError:
        asked = {}
    address = asked.get("base_url")
    options = {
        "--api-model": asked.get("model"),
        "--base-url": None if "@" in str(address) else address,  # a password may stand before it
        "--max-tokens": asked.get("max_tokens"),
        "--config": run.api_config,
        "--out": run.path,
    }
    words = [
        f"{option} {'...' if value is None else shlex.quote(str(value))}"
        for option, value in options.items()
    ]
    if extra := asked.get("extra_body"):
        words.append(f"--extra-body {shlex.quote(json.dumps(extra))}")
    return " ".join(["ragen-apo evaluate", *words])


LARGEST_DRAWN = 1e300
"""Sums and differences of larger numbers overflow."""


def finite(value: object) -> float | None:
    """A number that can be shown or drawn; None for anything else (absent, null, NaN, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON has whole numbers of any size
        return None
    return number if math.isfinite(number) else None


def pair(value: object) -> tuple[float, float] | None:
    """Two numbers in a list, such as the bounds of an interval; None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (low, high)


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one, so that optional parts can be walked."""
    return value if isinstance(value, Mapping) else {}


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """JSON values with what is neither an object nor a list changed."""
    if isinstance(value, Mapping):
        return {key: with_leaves(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_leaves(each, change) for each in value]
    return change(value)


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """The steps and values of one metric where it is a number that can be drawn; rows without a
    step are counted.
    """
    steps: list[float] = []
    values: list[float] = []
    for number, row in enumerate(rows, 1):
        value = finite(row.get(key))
        if value is not None and abs(value) <= LARGEST_DRAWN:
            step = finite(row.get("step"))
            steps.append(number if step is None else step)
            values.append(value)
    return steps, values


def read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    """A run's configuration as it was saved, and its sections in the words of today.

    Raises RunDirectoryError if the file cannot be read.
    """
    try:
        text = read_yaml(path)
        value, _ = parse_yaml(text)
    except ValueError as error:
        raise RunDirectoryError(f"{path} {error}") from error
    return text, sections_of_today(mapping(value))


def sections_of_today(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a run by any version, with the sections of this one."""
    return translated(config) if is_of_0_1(config) else config


def _read_object(path: Path, kind: type[_Row], verb: str) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    advice = f"Put an undamaged copy in its place, or write it anew with `ragen-apo {verb}`"
    checked = read_json(path, TypeAdapter(kind), advice=advice)
    return checked.model_dump(exclude_unset=True)


def _read_rows(path: Path, kind: type[_Row]) -> Sequence[Mapping[str, Any]]:
    """The rows of a file that is written to its end: what is evaluated has been trained."""
    if (damage := cut_line(path)) and kind is not _Episode:  # those are counted
        raise damage
    return [row.model_dump(exclude_unset=True) for row in read_records(path, TypeAdapter(kind))]
