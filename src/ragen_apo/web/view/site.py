"""The runs of a folder for all pages: their files as records, with episodes, patterns and values.

Consumes `RunsFolder`. What is read is kept until the file changes, and bounded in number, so that a
server that runs for weeks over many runs stays small. For any number of threads.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from ragen_apo.environments.base import PatternWords
from ragen_apo.errors import RunDirectoryError
from ragen_apo.evaluation.failures import FailurePattern
from ragen_apo.files import File, cut_line, ends_whole, file_now, read_json
from ragen_apo.report.api_model import api_model
from ragen_apo.report.load import (
    RunData,
    evaluation_command,
    finite,
    mapping,
    missing_episodes,
    read_config,
    sections_of_today,
)
from ragen_apo.report.tables import failure_rows, failure_words
from ragen_apo.web.view.episodes import (
    Decode,
    ShownEpisode,
    StoredEpisode,
    sampled_episode,
    shown_episode,
)
from ragen_apo.web.view.folder import RunsFolder
from ragen_apo.web.view.query import FILES, REFERENCE, EpisodeKey
from ragen_apo.web.view.rows import EpisodeIndex, Progress, num_answers, progress, read_rows
from ragen_apo.web.view.state import RunState, state_of
from ragen_apo.web.view.token_texts import FILE as TOKENIZER
from ragen_apo.web.view.token_texts import MAX_BYTES, decoder, numbers
from ragen_apo.web.view.value_store import StoredValues, stored_values, trajectories

DEFAULT_BETA1 = 0.5
NUM_RUNS = 1000
NUM_METRICS = 6
NUM_INDEXES = 6
NUM_TOKENIZERS = 2
_DOCUMENT = TypeAdapter(dict[str, Any])
_BASELINES = {"mean": "mean of the reference", "zero": "baseline"}
"""What an ablation subtracts in place of V*."""


class Site:
    """The runs of a folder."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self._data = lru_cache(NUM_RUNS)(_read_data)
        self._progress = lru_cache(NUM_RUNS)(lambda file: progress(read_rows(file.path)))
        self._answers = lru_cache(NUM_RUNS)(lambda file: num_answers(file.path))
        self._rows = lru_cache(NUM_METRICS)(lambda file: read_rows(file.path))
        self._indexes = lru_cache(NUM_INDEXES)(lambda path, inode: EpisodeIndex())
        self._decoders = lru_cache(NUM_TOKENIZERS)(lambda file: decoder(file.path))
        self._values = lru_cache(NUM_INDEXES)(
            lambda file, journal, digest, beta: stored_values(file.path, digest, beta=beta)
        )

    def _file(self, path: Path) -> File | None:
        """A file that may be read; None where there is none. Raises as `RunsFolder.readable`."""
        readable = self.folder.readable(path)
        return None if readable is None else file_now(readable)

    def data(self, name: str) -> RunData:
        """The small files of a run, without curves and episodes.

        Raises RunDirectoryError for a run that is not there, or whose files are damaged.
        """
        run = self.folder.run(name)
        files = (run.status, run.results, run.config, run.api_config)
        return self._data(run.path.name, *map(self._file, files))

    def rows(self, name: str, file: str = "metrics") -> Sequence[Mapping[str, Any]]:
        """The rows of a file of metrics; none where there is no file."""
        found = self._file(getattr(self.folder.run(name), file))
        return () if found is None else self._rows(found)

    def progress(self, name: str, file: str = "metrics") -> Progress:
        """What a list says of a file of metrics."""
        found = self._file(getattr(self.folder.run(name), file))
        return Progress({}) if found is None else self._progress(found)

    def num_answers(self, name: str) -> tuple[int, int]:
        """How many answers a model behind an API has given, and in how many episodes."""
        found = self._file(self.folder.run(name).answers)
        return (0, 0) if found is None else self._answers(found)

    def decoder(self, name: str) -> Decode:
        """What tells the text of a run's tokens; all its models share a tokenizer."""
        run = self.folder.run(name)
        for model in (run.policy, run.distilled, run.reference(0), run.initial):
            file = self._file(model / TOKENIZER)
            if file is not None and file.size <= MAX_BYTES:
                break
        else:
            return numbers

        def decode(token_ids: Sequence[int]) -> list[str]:
            return self._decoders(file)(token_ids)  # read when it is first asked

        return decode

    def sources(self, name: str) -> list[str]:
        """Which episodes the run has: of its evaluation, of training."""
        run = self.folder.run(name)
        return [source for source, file in FILES.items() if os.path.exists(getattr(run, file))]

    def index(
        self, name: str, source: str, *, num_episodes: int | None = None
    ) -> tuple[EpisodeIndex, Path]:
        """The index of its episodes, and their file.

        With `num_episodes` reading stops once the index has this number of them. Raises
        RunDirectoryError for no file.
        """
        run = self.folder.run(name)
        file = self._file(getattr(run, FILES[source]))
        if file is None:
            advice = (
                "a run of an earlier version keeps none, nor does one with "
                "`training.keep_episodes 0`"
            )
            if source == "evaluation":
                self._file(run.api_config)  # the command is made of it
                advice = f"`{evaluation_command(run)}` makes one"
            raise RunDirectoryError(f"{name} has no episodes of {source}; {advice}")
        # A file that takes its place has an index of its own: who reads the old one may finish.
        index = self._indexes(file.path, file.inode)
        index.refresh(file.path, num_episodes=num_episodes)
        return index, file.path

    def episode(self, key: EpisodeKey) -> StoredEpisode:
        """An episode as it is stored. Raises HTTPException where there is none."""
        if key.source == REFERENCE:
            samples = trajectories(self.store(key.run).path, key.conditions, key.task)
            if key.number in samples:
                return sampled_episode(samples[key.number], number=key.number)
        else:
            index, path = self.index(key.run, key.source, num_episodes=key.number + 1)
            if key.number < len(index):
                return index.read(path, [key.number])[key.number]
        raise HTTPException(404, f"there is no such episode in {key.run}")

    def shown(self, key: EpisodeKey) -> ShownEpisode:
        """An episode with tokens, values and residuals."""
        stored, data = self.episode(key), self.data(key.run)
        v_star = None
        if key.source == REFERENCE:
            tasks = self.stored(key.run, key.conditions).tasks
            v_star = next((each.v_star for each in tasks if each.task_id == key.task), None)
        has_values = key.source == "training"
        baseline = data.option("values", "baseline")
        return shown_episode(
            stored,
            decode=self.decoder(key.run),
            beta2=finite(data.option("algorithm", "beta2")) if has_values else None,
            v_star=v_star,
            value_name=_BASELINES.get(baseline, "V*") if has_values else "V*",
            normalized=data.option("algorithm", "length_normalization") == "tokens",
            reads_whole=api_model(data) is not None,
        )

    def num_episodes(self, name: str, source: str) -> int:
        """How many episodes there are, also if the file has lost some of them."""
        counted = finite(self.data(name).results.get("episodes"))
        if source == "evaluation" and counted is not None:
            return int(counted)
        return len(self.index(name, source)[0])

    def damage(self, name: str, *, num_episodes: int | None = None) -> list[str]:
        """What the files of a run that is over have lost, in the words of the report.

        `num_episodes` is the number of episodes in the file of its evaluation, if the page has
        counted them; else they are counted where the file is empty or its end is cut off.
        """
        run = self.folder.run(name)
        if state_of(run) not in (RunState.EVALUATED, RunState.TRAINED):
            return []
        rows = map(self._file, (run.metrics, run.distillation, run.warm_start))
        found = [cut_line(file.path) for file in rows if file is not None]
        episodes, results = self._file(run.episodes), self.data(name).results
        if episodes is not None and results:
            if num_episodes is None and not (episodes.size and ends_whole(episodes.path)):
                num_episodes = len(self.index(name, "evaluation")[0])
            if num_episodes is not None:
                found.append(missing_episodes(run, results, num_episodes=num_episodes))
        return [str(each) for each in found if each is not None]

    def patterns(self, name: str, source: str) -> list[tuple[str, PatternWords, int, float]]:
        """Pattern, its words, episodes and share; the most frequent first, without the absent."""
        data = self.data(name)
        if source == "evaluation":
            counts = Counter({row.pattern: row.count for row in failure_rows(data)})
        else:
            index, _ = self.index(name, source)
            counts = Counter(filter(None, index.failures))
        total = self.num_episodes(name, source) if counts else 0
        return [
            (pattern, failure_words(data, pattern), count, count / max(1, total))
            for pattern, count in counts.most_common()
            if count
        ]

    def pattern_names(self, name: str) -> dict[str, str]:
        """What each pattern is called in this run's environment."""
        data = self.data(name)
        return {each.value: failure_words(data, each.value).name for each in FailurePattern}

    def words(self, name: str, pattern: str | None) -> PatternWords | None:
        """A pattern in the words of this run's environment; None for none."""
        return failure_words(self.data(name), pattern) if pattern else None

    def store(self, name: str) -> File:
        """The run's value store. Raises RunDirectoryError where it has none of its own."""
        file = self._file(self.folder.run(name).values)
        if file is None:
            elsewhere = self.data(name).option("values", "store")
            reason = f"; its values are those of {elsewhere}" if elsewhere else ""
            raise RunDirectoryError(f"{name} has no value store of its own{reason}")
        return file

    def stored(self, name: str, digest: str) -> StoredValues:
        """What the store has under these conditions, at the run's beta."""
        file, beta = self.store(name), finite(self.data(name).option("values", "beta1"))
        beta = DEFAULT_BETA1 if beta is None or beta < 0 else beta
        journal = file.path.with_name(f"{file.path.name}-wal")
        return self._values(file, file_now(journal), digest, beta)


def _read_data(
    name: str,
    status: File | None,
    results: File | None,
    config: File | None,
    evaluation: File | None,
) -> RunData:
    noted, settings = _document(status), evaluation or config
    configured = noted.get("configuration")
    may_have_changed = (finite(noted.get("attempts")) or 0) > 1  # as one that was resumed may
    if settings is not None and not isinstance(configured, dict):
        configured = read_config(settings.path)[1]
    elif settings is not None and may_have_changed:
        with contextlib.suppress(RunDirectoryError):  # a damaged one: there is a copy at hand
            configured = read_config(settings.path)[1]
    return RunData(
        name=name,
        config=sections_of_today(mapping(configured)),
        record=noted,
        results=_document(results),
    )


def _document(file: File | None) -> Mapping[str, Any]:
    advice = "Put an undamaged copy in its place"
    return {} if file is None else read_json(file.path, _DOCUMENT, advice=advice)
