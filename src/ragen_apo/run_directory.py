"""The paths of a run's files, for all that write or read them.

config.yaml        the resolved configuration          run.json            versions, seconds
initial/           the untrained policy                references/N/       reference N, from 0
warm_start.jsonl   its curves                          values.sqlite       every Stage 1 trajectory
recordings.jsonl   demonstrations by people
value_report.json  coverage of Stage 1                 values.csv          V* of each task
distillation.jsonl its curve                           distilled/          the policy after it
metrics.jsonl      one row a Stage 2 step              rollouts.jsonl      some of its episodes
checkpoints/       to resume from                      policy/             the trained policy
adapter/           its adapters, as peft writes them
evaluation/        results.json, episodes.jsonl        report/             for people
earlier/step-N/    the last four of a run that went on after its last step N
tracking.json      what trackers have of the run       trackers/           what they write

Of the evaluation of a model behind an API there are evaluation/, report/, run.json and
evaluation.yaml    its resolved configuration          answers.jsonl       every answer
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from ragen_apo.config.load import read_values
from ragen_apo.config.references import asks_for_trust
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.files import (
    locked,
    make_directory,
    partial_files,
    partial_path,
    read_json,
    remove,
    remove_partial_files,
    write_json_atomically,
    write_json_lines_atomically,
    write_text_atomically,
)


class _Phase(BaseModel, extra="allow"):
    seconds: float


class _Status(BaseModel, extra="allow"):
    """The parts of run.json that are read back; the rest is for people."""

    phases: dict[str, _Phase] = {}
    peak_memory_bytes: int = 0
    stage_one_tokens: list[int] | None = None
    mixed_precision: Literal["none", "bfloat16"] | None = None


_STATUS = TypeAdapter(_Status)
_STATUS_ADVICE = (
    "It says what the run was started with, so that no other run is mixed into it: put an "
    "undamaged copy in its place, or start another run"
)


class _File:
    """The path of a file in a run, as an attribute of the run."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, run: RunDirectory, _: type[RunDirectory]) -> Path:
        return run.path.joinpath(*self._parts)


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run's files."""

    path: Path

    config = _File("config.yaml")
    status = _File("run.json")
    lock = _File(".lock")
    initial = _File("initial")
    warm_start = _File("warm_start.jsonl")
    recordings = _File("recordings.jsonl")
    values = _File("values.sqlite")
    value_report = _File("value_report.json")
    distillation = _File("distillation.jsonl")
    distilled = _File("distilled")
    metrics = _File("metrics.jsonl")
    rollouts = _File("rollouts.jsonl")
    checkpoints = _File("checkpoints")
    best = _File("best")
    adapter = _File("adapter")
    policy = _File("policy")
    results = _File("evaluation", "results.json")
    episodes = _File("evaluation", "episodes.jsonl")
    api_config = _File("evaluation.yaml")
    answers = _File("answers.jsonl")
    report = _File("report")
    tracking_state = _File("tracking.json")
    trackers = _File("trackers")

    @property
    def is_of_api(self) -> bool:
        """Whether it is no run but the evaluation of a model behind an API."""
        return self.api_config.is_file()

    @property
    def has_begun(self) -> bool:
        """Whether there are results that a later attempt continues from."""
        return any(path.exists() for path in (self.initial, self.reference(0), self.checkpoints))

    def value_report_of(self, version: int) -> Path:
        """Coverage of Stage 1 under reference `version`; `value_report` is that of version 0."""
        return self.value_report if version == 0 else self.path / f"value_report_{version}.json"

    def value_table_of(self, version: int) -> Path:
        """V* of each training task under reference `version`, for people."""
        return self.path / ("values.csv" if version == 0 else f"values_{version}.csv")

    def reference(self, version: int) -> Path:
        """The folder of a reference policy; version 0 is the warm-started one."""
        return self.path / "references" / str(version)

    def earlier(self, step: int) -> Path:
        """Where the results are of a run that went on after `step`, once its last."""
        return self.path / "earlier" / f"step-{step:06d}"

    def reference_versions(self) -> list[int]:
        """Of the references that are there, from the first to the newest."""
        folders = self.reference(0).parent.glob("*")
        return sorted(int(each.name) for each in folders if each.name.isdecimal())

    def read_status(self) -> dict[str, Any]:
        """The content of run.json; empty before the first phase is over."""
        if not self.status.exists():
            return {}
        status = read_json(self.status, _STATUS, advice=_STATUS_ADVICE)
        return status.model_dump(exclude_unset=True)

    def note(self, **values: Any) -> None:
        """Puts values into run.json, in place of those with the same names."""
        write_json_atomically(self.status, self.read_status() | values)

    def add_seconds(self, phase: str, seconds: float, **parts: float) -> None:
        """Notes how long a phase took, added up over interrupted attempts, and parts of that."""
        phases = self.read_status().get("phases", {})
        entry = phases.setdefault(phase, {"seconds": 0.0})
        for name, spent in {"seconds": seconds, **parts}.items():
            entry[name] = round(entry.get(name, 0.0) + spent, 3)
        self.note(phases=phases)

    @property
    def resume_command(self) -> str:
        """What goes on with training, for messages; it trusts what the run asks trust for."""
        try:
            trusts = asks_for_trust(read_values(self.config)[0])
        except ConfigError:
            trusts = False
        trust = " --trust-remote-code" if trusts else ""
        return f"ragen-apo train --run-dir {shlex.quote(str(self.path))} --resume{trust}"

    def write_evaluation(
        self, results: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replaces both files; where it is killed, there are no results, never those of others."""
        written = partial_path(self.episodes)
        write_json_lines_atomically(written, episodes)
        self.results.unlink(missing_ok=True)
        written.replace(self.episodes)
        write_json_atomically(self.results, results)

    def remove_leftovers(self) -> None:
        """Removes what killed writers left half written; for whoever holds the lock."""
        folders = (self.path, self.reference(0).parent, self.best, self.results.parent, self.report)
        for folder in folders:
            remove_partial_files(folder)

    def locked(self) -> AbstractContextManager[None]:
        """Refuses a second process that would train or evaluate the same run."""
        reason = f"another process is working on {self.path}; wait for it or stop it first."
        return locked(self.lock, RunDirectoryError(reason))


def create_run(path: Path, *, config_yaml: str) -> RunDirectory:
    """A new run directory that holds its configuration.

    Raises RunDirectoryError if the directory exists and is not empty, or if another process makes
    it at this moment; nothing in it is touched. Half a configuration, which a start that was killed
    has left, is removed.
    """
    run = RunDirectory(path)
    _require_free(run)
    make_directory(path)
    with run.locked():
        _require_free(run)
        remove_partial_files(path)
        write_text_atomically(run.config, config_yaml)
    return run


def _require_free(run: RunDirectory) -> None:
    path, half_configs = run.path, partial_files(run.path, name=run.config.name)
    if path.exists() and (not path.is_dir() or {*path.iterdir()} - {run.lock, *half_configs}):
        way_out = "It is no run. Choose another --run-dir, such as runs/mine"
        if run.config.exists():
            way_out = (
                "Continue that run with --resume (in Python: resume=True), or choose another "
                "--run-dir"
            )
        raise RunDirectoryError(
            f"{path} exists already and is not an empty directory. {way_out}; nothing was changed."
        )


def clear_failed_start(run: RunDirectory, *, keep_directory: bool) -> None:
    """Removes a run that ended before it computed anything, so that its name is free again.

    Everything else in the directory is left alone, and then the directory itself as well. So is a
    run that another process works on.
    """
    # Without config.yaml nothing goes on with what a kill in here would leave.
    first = (run.status, run.config, run.lock)
    if not run.path.is_dir():
        return
    with contextlib.suppress(RunDirectoryError), run.locked():
        if not run.read_status().get("attempts"):  # refused when the model had been built
            first = (run.recordings, run.initial, *first)
        if not {*run.path.iterdir()} <= {*first}:
            return
        for path in first:
            remove(path)
        if not keep_directory:
            run.path.rmdir()


def open_run(path: Path) -> RunDirectory:
    """An existing run. Raises RunDirectoryError if there is none."""
    run = RunDirectory(path)
    if run.config.is_file():
        return run
    if run.is_of_api:
        raise RunDirectoryError(
            f"{path} is no run but the evaluation of a model behind an API, which `ragen-apo "
            "report`, `view` and `serve shop --run` read; to play more episodes, give `ragen-apo "
            "evaluate --api-model` again."
        )
    missing = run.config.absolute() if path.exists() else f"folder {path.absolute()}"
    raise RunDirectoryError(
        f"{path} is not a run: there is no {missing}. Expected a directory made by "
        "`ragen-apo train --run-dir`."
    )


def open_evaluated(path: Path) -> RunDirectory:
    """What may hold an evaluation: a run, or an evaluation of a model behind an API."""
    run = RunDirectory(path)
    return run if run.is_of_api else open_run(path)
