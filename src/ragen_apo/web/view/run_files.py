"""One run's files as records, read once and kept while they stay as they are.

Consumes `RunsFolder`; produces what a page needs of a run. What is kept is bounded in number, so
that a server that runs for weeks over many runs stays small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import parse_json
from ragen_apo.report.load import RunData, read_config, sections_of_today
from ragen_apo.run_directory import RunDirectory
from ragen_apo.web.view.episodes import Decode
from ragen_apo.web.view.folder import RunsFolder
from ragen_apo.web.view.growing import EpisodeIndex, Metrics, Progress, progress
from ragen_apo.web.view.token_texts import decoder, numbers, tokenizer_file

Kept = TypeVar("Kept")

NUM_RUNS = 1000
NUM_METRICS = 12
NUM_INDEXES = 6
NUM_TOKENIZERS = 2
MAX_DOCUMENT_BYTES = 1 << 24
"""Of a JSON document that is read at once; a results.json has thousands."""


class Recent(Generic[Kept]):
    """The `size` values that were asked for last."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._values: OrderedDict[Hashable, Kept] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """The value of this key, made if it is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value


class RunReader:
    """Reads the runs of a folder, for any number of threads."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self._data: Recent[RunData] = Recent(NUM_RUNS)
        self._progress: Recent[Progress] = Recent(NUM_RUNS)
        self._metrics: Recent[Metrics] = Recent(NUM_METRICS)
        self._indexes: Recent[EpisodeIndex] = Recent(NUM_INDEXES)
        self._decoders: Recent[Decode] = Recent(NUM_TOKENIZERS)
        self.computed: Recent[Any] = Recent(NUM_INDEXES)
        """What pages compute of whole files, by the state of these files."""

    def data(self, name: str) -> RunData:
        """The small files of a run, without curves and episodes.

        Raises RunDirectoryError for a run that is not there, or whose files are damaged.
        """
        run = self.folder.run(name)
        files = (run.status, run.results, run.config, run.evaluation)
        paths = [self.folder.readable(file) for file in files]
        key = (name, *(path and signature(path) for path in paths))
        return self._data.get(key, lambda: _read_data(run, *paths))

    def metrics(self, name: str, file: str = "metrics") -> Metrics:
        """The curves in a file of metrics as they are now; without rows where there is none."""
        path = self.folder.readable(getattr(self.folder.run(name), file))
        if path is None:
            return Metrics()
        metrics = self._metrics.get(_identity(path), Metrics)
        metrics.refresh(path)
        return metrics

    def progress(self, name: str, file: str = "metrics") -> Progress:
        """What a list says of a file of metrics; without a row where there is none."""
        path = self.folder.readable(getattr(self.folder.run(name), file))
        if path is None:
            return Progress({})
        return self._progress.get((path, signature(path)), lambda: progress(path))

    def episodes(
        self, name: str, file: str, *, num_episodes: int | None = None
    ) -> tuple[EpisodeIndex, Path] | None:
        """The index of `episodes` or `rollouts` with its file; None where there is none.

        With `num_episodes` reading stops once the index has this number of them.
        """
        path = self.folder.readable(getattr(self.folder.run(name), file))
        if path is None:
            return None
        index = self._indexes.get(_identity(path), EpisodeIndex)
        index.refresh(path, num_lines=num_episodes)
        return index, path

    def decoder(self, name: str) -> Decode:
        """What tells the text of the run's tokens; reads the tokenizer when it is first asked."""
        path = tokenizer_file(self.folder, self.folder.run(name))
        if path is None:
            return numbers
        key = (path, signature(path))

        def decode(token_ids: Sequence[int]) -> list[str]:
            return self._decoders.get(key, lambda: decoder(path))(token_ids)

        return decode


def _identity(path: Path) -> tuple[Path, int]:
    """Differs for a file that takes its place, so that who reads the old one may finish."""
    return path, path.stat().st_ino


def signature(path: Path) -> tuple[int, int, int]:
    """Differs if the file was written or replaced."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_data(
    run: RunDirectory,
    status: Path | None,
    results: Path | None,
    config: Path | None,
    evaluation: Path | None,
) -> RunData:
    noted = _document(status)
    configured = noted.get("configuration")
    if not isinstance(configured, dict):
        path = evaluation or config
        configured = {} if path is None else read_config(path)[1]
    return RunData(
        name=run.path.name,
        config_text="",
        config=sections_of_today(configured),
        record=noted,
        warm_start=(),
        distillation=(),
        value_report={},
        metrics=(),
        results=_document(results),
        episodes=(),
    )


def _document(path: Path | None) -> Mapping[str, Any]:
    """The object in a JSON file; empty for no file."""
    if path is None:
        return {}
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise RunDirectoryError(f"{path} is too large to be what a run writes")
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} must hold an object, got {type(value).__name__}")
    return value
