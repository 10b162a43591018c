"""Hands the rows of a run's files to the trackers that its configuration names.

The files remain the authoritative record. A row goes to a tracker after it was written to its file,
and `tracking.json` records how many rows of each file every tracker has. So a resumed run continues
the same run of a tracker, and does not send again what it computes again. It first sends rows that
a tracker lacks: after a kill, after a failure of the tracker, or to a new tracker.

A tracker that fails, whatever it raised, is not used again in this attempt. Training continues.
"""

from __future__ import annotations

import contextlib
import math
import pkgutil
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ragen_apo.config.run import RunConfig
from ragen_apo.config.tracking import TrackingConfig
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.files import read_json, read_json_lines, write_json_atomically
from ragen_apo.printable import exception_in_words
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.tracking.base import Tracker, flattened
from ragen_apo.types import Trajectory

TRACKERS = {
    "tensorboard": "ragen_apo.tracking.tensorboard:TensorBoard",
    "trackio": "ragen_apo.tracking.trackio:Trackio",
    "wandb": "ragen_apo.tracking.wandb:WeightsAndBiases",
    "mlflow": "ragen_apo.tracking.mlflow:MLflow",
}
"""The class of each; its package and its extra are called as it is."""

_PASSWORD = re.compile(r"//[^/@\s]+@")


class _State(BaseModel):
    """tracking.json."""

    run_name: str
    num_rows: dict[str, dict[str, int]] = {}
    """By tracker and project, the rows that it has of each file."""

    def sent(self, tracker: str, project: str) -> dict[str, int]:
        """The rows that a project of a tracker has of each file; to be changed."""
        older = self.num_rows.pop(tracker, None)  # from before projects were told apart
        where = tracker if tracker == "tensorboard" else f"{tracker}, {project}"
        return self.num_rows.setdefault(where, older or {})


_STATE = TypeAdapter(_State)
_REPORT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_STATE_ADVICE = "Delete it: trackers then get the whole run again, under a new name"


def require_trackers(settings: TrackingConfig) -> None:
    """Raises ConfigError where the package of a tracker is not installed."""
    for name in settings.trackers:
        spec = find_spec(name)
        # A folder `wandb` in the current directory is found as well, and has no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"tracking.trackers: {name} needs a package that is not installed: pip install "
                f"'ragen-apo[{name}]', or leave {name} out"
            )


class RunTracking:
    """The trackers of one run; without any, or outside of `running`, nothing happens."""

    def __init__(self, config: RunConfig, run: RunDirectory, progress: Progress) -> None:
        self._config, self._run, self._progress = config, run, progress
        self._trackers: dict[str, Tracker] = {}
        self._state = _State(run_name="")
        self._num_written: Counter[str] = Counter()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trackers take part as long as the block lasts, and first get the rows they lack.

        Raises ConfigError where `require_trackers` does, and RunDirectoryError where tracking.json
        is damaged.
        """
        require_trackers(self._config.tracking)
        if self._config.tracking.trackers:
            self._start()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._each("finish", lambda _, tracker: tracker.finish(failed=failed))
            self._trackers.clear()

    def note(
        self, path: Path, row: Mapping[str, Any], *, episodes: Sequence[Trajectory] = ()
    ) -> None:
        """Hands over the next row of a file; `episodes` are what the row was measured on."""
        if not self._trackers:
            return
        self._send(path, row, episodes=episodes)
        self._save_state()

    def _start(self) -> None:
        path, settings = self._run.tracking_state, self._config.tracking
        if path.exists():
            self._state = read_json(path, _STATE, advice=_STATE_ADVICE)
        else:
            # Saved before a tracker knows it: whoever is killed in between goes on with it.
            folder = re.sub(r"[^\w.-]+", "-", self._run.path.resolve().name)
            self._state = _State(run_name=f"{folder[:64]}-{uuid.uuid4().hex[:8]}")
        self._save_state()
        config = self._config.model_dump(mode="json", by_alias=True)
        for name in settings.trackers:
            with self._surviving(name, "start"):
                make: type[Tracker] = pkgutil.resolve_name(TRACKERS[name])
                self._trackers[name] = make(
                    self._state.run_name,
                    config,
                    project=settings.project,
                    folder=self._run.trackers,
                )
        self._num_written.clear()
        for path in (self._run.warm_start, self._run.distillation, self._run.metrics):
            for row in read_json_lines(path):
                self._send(path, row)
        for version in self._run.reference_versions():
            path = self._run.value_report_of(version)
            if path.exists():
                self._send_report(path, version)
        self._save_state()

    def _send_report(self, path: Path, version: int) -> None:
        """No run needs it, so one that cannot be read is left out."""
        advice = f"`ragen-apo estimate-values RUN --reference {version}` writes it again"
        try:
            report = read_json(path, _REPORT, advice=advice)
        except RunDirectoryError as error:
            self._progress.say(f"tracking: Stage 1 is not sent: {error}")
        else:
            self._send(path, stage_one_row(report, version))

    def _send(
        self, path: Path, row: Mapping[str, Any], *, episodes: Sequence[Trajectory] = ()
    ) -> None:
        is_one_row = path.suffix == ".json"  # which may be written again
        self._num_written[path.name] += not (is_one_row and self._num_written[path.name])
        number = self._num_written[path.name]
        if path == self._run.metrics:
            number = row["step"]  # a damaged line may have been taken out since
        metrics, shown = numbers(row), episodes[: self._config.tracking.num_episodes]

        def send(name: str, tracker: Tracker) -> None:
            sent = self._state.sent(name, self._config.tracking.project)
            if number <= sent.get(path.name, 0):
                return
            tracker.log(row["step"], metrics)
            if shown:
                tracker.log_episodes(row["step"], shown)
            sent[path.name] = number

        self._each("log", send)

    def _each(self, doing: str, call: Callable[[str, Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._surviving(name, doing):
                call(name, tracker)

    @contextlib.contextmanager
    def _surviving(self, name: str, doing: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no tracker may stop a run
            self._trackers.pop(name, None)
            why = _PASSWORD.sub("//...@", exception_in_words(error))
            self._progress.say(
                f"tracking: {name} failed to {doing}: {why}. The run goes on without it; its own "
                "files have all metrics, and --resume of an unfinished run sends what is missing"
            )

    def _save_state(self) -> None:
        write_json_atomically(self._run.tracking_state, self._state.model_dump())


def stage_one_row(report: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The coverage under a reference, as a row of trackers: step `version` of Stage 1."""
    return {"phase": "stage_1", "step": version, **report}


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, by the name that trackers show.

    Those of Stage 2 have the names of metrics.jsonl. The phases before it, whose steps are their
    own, stand in front of theirs: `copy/loss`, `distillation/loss`, and `distillation/1/loss` for
    that of reference 1.
    """
    prefix = ""
    if "phase" in row:
        version = row.get("reference_version")
        prefix = f"{row['phase']}/{version}/" if version else f"{row['phase']}/"
    return {
        prefix + name: value
        for name, value in flattened(row, separator="/")
        if name not in ("phase", "step")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
