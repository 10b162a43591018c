"""Trackers of our own for tests, and readers of what the real ones have written.

A reader gives the points of every metric in the order in which they were logged, and the episodes.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ragen_apo.types import Trajectory


@dataclass
class Written:
    """What a tracker has of a run."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By name, (step, value)."""
    episodes: str = ""
    """All that was written of episodes, as one text."""
    failed: list[bool] = field(default_factory=list)
    """What each attempt was said to have done in the end."""
    runs: int = 1
    """How many runs the tracker thinks there are."""
    config: dict[str, Any] = field(default_factory=dict)
    """The newest, where a reader looks."""

    def add(self, name: str, step: int, value: float) -> None:
        self.points.setdefault(name, []).append((step, round(value, 6)))


class Remembers:
    """Keeps everything in memory, by run name, also for trackers that are made later."""

    runs: ClassVar[dict[str, Written]] = {}

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        self.written = self.runs.setdefault(run_name, Written())
        self.config = config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.written.add(name, step, value)

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        self.written.episodes += f"{step}: {len(episodes)}\n"

    def finish(self, *, failed: bool) -> None:
        self.written.failed.append(failed)


class Fails(Remembers):
    """Raises at one place, named by `where`, or everywhere."""

    where: ClassVar[str] = "everywhere"
    error: ClassVar[type[BaseException]] = OSError

    def _raise(self, here: str) -> None:
        if self.where in (here, "everywhere"):
            raise self.error(f"no route to https://me:secret@tracker.example ({here})")

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        self._raise("__init__")
        super().__init__(run_name, config, project=project, folder=folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._raise("log")
        super().log(step, metrics)

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        self._raise("log_episodes")

    def finish(self, *, failed: bool) -> None:
        self._raise("finish")


def tensorboard(folder: Path, run_name: str) -> Written:
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0})
    found.Reload()
    written = Written()
    for name in found.Tags()["scalars"]:
        for point in found.Scalars(name):
            written.add(name, point.step, point.value)
    for name in found.Tags()["tensors"]:
        if name.startswith("episode "):
            texts = [each.tensor_proto.string_val[0].decode() for each in found.Tensors(name)]
            written.episodes += "".join(texts)
    return written


def trackio(folder: Path, run_name: str) -> Written:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    written = Written(runs=storage.get_runs("tests").count(run_name))
    for row in storage.get_logs("tests", run_name):
        for name, value in row.items():
            if name not in ("step", "timestamp", "episodes"):
                written.add(name, row["step"], value)
    written.episodes = json.dumps(storage.get_traces("tests", run_name))
    return written


def wandb(folder: Path, run_name: str) -> Written:
    """From the offline files, which are what `wandb sync` uploads."""
    importlib.import_module("wandb").teardown()  # waits until they are on disk
    written, names = Written(), set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        names.add(path.name)
        for record in _records_of_wandb(path):
            items = [item for item in record.history.item if len(item.nested_key) == 1]
            row = {item.nested_key[0]: item.value_json for item in items}
            values = {name: json.loads(text) for name, text in row.items() if name[0] != "_"}
            for name, value in values.items():
                axis = f"{name.rpartition('/')[0]}/step".removeprefix("/")
                if isinstance(value, int | float) and name != axis:
                    written.add(name, values[axis], value)
    assert names == {f"run-{run_name}.wandb"}
    for path in folder.glob("wandb/offline-run-*/files/media/table/*.json"):
        written.episodes += path.read_text()
    return written


def _records_of_wandb(path: Path) -> Iterator[Any]:
    """The file is a log of LevelDB with one protocol buffer a record."""
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    content, position, parts = path.read_bytes(), 7, b""
    while position < len(content):
        left = 32_768 - position % 32_768
        if left < 7:  # too little for a header
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def mlflow(folder: Path, run_name: str) -> Written:
    address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("tests").experiment_id
    runs = client.search_runs([experiment])
    written = Written(runs=len(runs))
    number = runs[0].info.run_id
    assert (runs[0].info.run_name, runs[0].info.status) == (run_name, "FINISHED")
    assert runs[0].data.params["algorithm.name"] == "apo"
    written.config = json.loads(Path(client.download_artifacts(number, "config.json")).read_text())
    for name in runs[0].data.metrics:
        for point in client.get_metric_history(number, name):
            written.add(name, point.step, point.value)
    for artifact in client.list_artifacts(number, "episodes"):
        written.episodes += Path(client.download_artifacts(number, artifact.path)).read_text()
    return written


READERS: dict[str, Callable[[Path, str], Written]] = {
    "tensorboard": tensorboard,
    "trackio": trackio,
    "wandb": wandb,
    "mlflow": mlflow,
}
