"""The addresses of `ragen-apo view`, and what each answers. All only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ragen_apo.errors import RunDirectoryError
from ragen_apo.evaluation.failures import FailurePattern
from ragen_apo.report.load import finite, mapping
from ragen_apo.report.style import compact, decimal, interval, percent, signed
from ragen_apo.report.tables import failure_words
from ragen_apo.web.pages import page
from ragen_apo.web.view import curves, lists, query
from ragen_apo.web.view.comparing import Outcome, Pair, pairs
from ragen_apo.web.view.episodes import ShownEpisode, folded, shown_episode, text_of
from ragen_apo.web.view.folder import RunsFolder
from ragen_apo.web.view.growing import EpisodeIndex
from ragen_apo.web.view.lists import PAGE_SIZE, Filters
from ragen_apo.web.view.query import FILES, REFERENCE, Place
from ragen_apo.web.view.run_files import RunReader, signature
from ragen_apo.web.view.shown import algorithm_label, page_numbers, run_line, run_page
from ragen_apo.web.view.state import RunState
from ragen_apo.web.view.token_texts import decoder, tokenizer_file
from ragen_apo.web.view.value_store import (
    StoredTask,
    StoredValues,
    all_conditions,
    instructions,
    sample,
    sample_numbers,
    stored_values,
)

RUNS_PER_PAGE = 50
TURNS_PER_PAGE = 25
TEXT_PART = 40_000
"""Characters of a long text on one page."""
NUM_EXAMPLES = 4
TASK_ORDERS = ("lowest", "highest", "samples")


def view_routes(folder: RunsFolder) -> list[BaseRoute]:
    """The pages of the runs in a folder."""
    return Viewer(folder).routes()


class Viewer:
    """Answers each address from the files as they are now."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder, self._reader = folder, RunReader(folder)

    def routes(self) -> list[BaseRoute]:
        """All of them read."""
        pages = {
            "/": self.runs,
            "/run": self.run,
            "/run/live": self.live,
            "/episodes": self.episodes,
            "/episode": self.episode,
            "/text": self.text,
            "/failures": self.failures,
            "/values": self.values,
            "/samples": self.samples,
            "/compare": self.compare,
            "/side": self.side,
        }
        return [Route(path, answer, methods=["GET"]) for path, answer in pages.items()]

    def runs(self, request: Request) -> Response:
        """The list of runs."""
        find, number = query.text(request, "find"), max(1, query.number(request, "page", 1))
        names = [name for name in self._folder.names() if find.lower() in name.lower()]
        shown = names[(number - 1) * RUNS_PER_PAGE : number * RUNS_PER_PAGE]
        num_pages = max(1, -(-len(names) // RUNS_PER_PAGE))
        return _page(
            "runs",
            folder=str(self._folder.root),
            lines=[run_line(self._reader, name) for name in shown],
            num_runs=len(names),
            find=find,
            page=number,
            pages=page_numbers(number, num_pages),
        )

    def run(self, request: Request) -> Response:
        """A run: numbers, curves, episodes."""
        return _page("run", **self._run(request))

    def live(self, request: Request) -> Response:
        """The part of a run's page that changes while it trains."""
        return _page("run_live", **self._run(request))

    def _run(self, request: Request) -> dict[str, Any]:
        name = query.text(request, "run")
        record, run = self._reader.record(name), self._folder.run(name)
        return {
            "name": name,
            "shown": run_page(self._reader, name),
            "box": curves.BOX,
            "names": self._pattern_names(name),
            "examples": self._examples(name),
            "patterns": self._patterns(name, "evaluation"),
            "has": {
                "evaluation": run.episodes.exists(),
                "training": run.rollouts.exists(),
                "values": run.values.exists(),
            },
            "store": record.option("values", "store"),
        }

    def _examples(self, name: str) -> Mapping[str, Sequence[lists.EpisodeLine]]:
        """The newest, best and worst of the kept episodes of training."""
        found = self._reader.episodes(name, FILES["training"])
        if found is None or not len(found[0]):
            return {}
        index, path = found
        return {
            order: lists.episode_lines(
                index, path, lists.selected(index, path, Filters(order=order))[:NUM_EXAMPLES]
            )
            for order in ("newest", "best", "worst")
        }

    def episodes(self, request: Request) -> Response:
        """A list of episodes, filtered."""
        name, source = query.text(request, "run"), query.choice(request, "source", list(FILES))
        filters = Filters(
            outcome=query.choice(request, "outcome", lists.OUTCOMES),
            failure=query.text(request, "failure"),
            order=query.choice(request, "order", lists.ORDERS),
            find=query.text(request, "find"),
        )
        number = max(1, query.number(request, "page", 1))
        most = None if filters.needs_all else number * PAGE_SIZE + 1
        index, path = self._index(name, source, num_episodes=most)
        chosen = lists.selected(index, path, filters)
        is_whole = index.end >= path.stat().st_size
        shown = lists.page_of(index, path, chosen, page=number, is_whole=is_whole)
        return _page(
            "episodes",
            name=name,
            source=source,
            other_sources=self._sources(name),
            filters=filters,
            shown=shown,
            pages=page_numbers(number, shown.num_pages) if shown.num_pages else (),
            patterns=self._pattern_names(name),
        )

    def _sources(self, name: str) -> list[str]:
        run = self._folder.run(name)
        return [source for source, file in FILES.items() if getattr(run, file).exists()]

    def _index(
        self, name: str, source: str, *, num_episodes: int | None = None
    ) -> tuple[EpisodeIndex, Path]:
        found = self._reader.episodes(name, FILES[source], num_episodes=num_episodes)
        if found is None:
            advice = {
                "evaluation": f"`ragen-apo evaluate {name}` makes one",
                "training": "runs before version 0.3 and those with `training.keep_episodes 0` "
                "keep none of training",
            }
            raise RunDirectoryError(f"{name} has no episodes of {source}; {advice[source]}")
        return found

    def _row(self, place: Place) -> Mapping[str, Any]:
        """An episode as it is stored. Raises HTTPException where there is none."""
        row: Mapping[str, Any] | None = None
        if place.source == REFERENCE:
            path = self._store(place.run)
            row = sample(path, place.conditions, place.task, place.number)
        else:
            index, path = self._index(place.run, place.source, num_episodes=place.number + 1)
            if place.number < len(index):
                row = index.read(path, [place.number])[0]
        if row is None:
            raise HTTPException(404, f"there is no such episode in {place.run}")
        return row

    def _shown(self, place: Place) -> ShownEpisode:
        run, record = self._folder.run(place.run), self._reader.record(place.run)
        has_values = place.source == "training"
        v_star = None
        if place.source == REFERENCE:
            stored = self._stored(place.run, place.conditions)
            v_star = next((t.v_star for t in stored.tasks if t.task_id == place.task), None)
        return shown_episode(
            self._row(place),
            decode=decoder(tokenizer_file(self._folder, run)),
            beta2=finite(record.option("algorithm", "beta2")) if has_values else None,
            v_star=v_star,
            normalized=record.option("algorithm", "length_normalization") == "tokens",
        )

    def episode(self, request: Request) -> Response:
        """An episode turn by turn."""
        place = query.place(request)
        shown, number = self._shown(place), max(1, query.number(request, "page", 1))
        start = (number - 1) * TURNS_PER_PAGE
        has_next = place.source != REFERENCE
        if has_next:
            index, _ = self._index(place.run, place.source, num_episodes=place.number + 2)
            has_next = place.number + 1 < len(index)
        return _page(
            "episode",
            name=place.run,
            place=place,
            episode=shown,
            turns=shown.turns[start : start + TURNS_PER_PAGE],
            page=number,
            pages=page_numbers(number, max(1, -(-len(shown.turns) // TURNS_PER_PAGE))),
            shade=query.choice(request, "shade", ["surprise", "change"]),
            words=self._words(place.run, shown.failure),
            has_next=has_next,
            beta2=self._reader.record(place.run).option("algorithm", "beta2"),
        )

    def text(self, request: Request) -> Response:
        """A long text, a part at a time."""
        place, field = query.place(request), query.text(request, "field")
        number, turn = max(1, query.number(request, "page", 1)), query.number(request, "turn")
        whole = text_of(self._row(place), field, turn)
        if whole is None:
            raise HTTPException(404, f"the episode has no such text: {field!r:.40}")
        start = (number - 1) * TEXT_PART
        return _page(
            "text",
            name=place.run,
            place=place,
            field=field,
            turn=turn,
            part=whole[start : start + TEXT_PART],
            num_characters=len(whole),
            page=number,
            pages=page_numbers(number, max(1, -(-len(whole) // TEXT_PART))),
        )

    def failures(self, request: Request) -> Response:
        """The patterns of failure, each with what it means and how often it came."""
        name, source = query.text(request, "run"), query.choice(request, "source", list(FILES))
        patterns = self._patterns(name, source)
        examples: dict[str, Sequence[lists.EpisodeLine]] = {}
        index, path = self._index(name, source)
        for pattern, _, count, _ in patterns:
            if count:
                chosen = lists.selected(index, path, Filters(failure=pattern))
                examples[pattern] = lists.episode_lines(index, path, chosen[:NUM_EXAMPLES])
        return _page(
            "failures",
            name=name,
            source=source,
            other_sources=self._sources(name),
            patterns=patterns,
            examples=examples,
            num_episodes=len(index),
        )

    def _patterns(self, name: str, source: str) -> list[tuple[str, Any, int, float]]:
        """Pattern, its words, episodes and share; the most frequent first, without the absent."""
        record = self._reader.record(name)
        if source == "evaluation":
            noted = mapping(record.data.results.get("failures"))
            counts = {
                str(pattern): int(finite(mapping(each).get("count")) or 0)
                for pattern, each in noted.items()
            }
            total = record.data.num_episodes
        else:
            index, _ = self._index(name, source)
            counts = Counter(failure for failure in index.failures if failure)
            total = len(index)
        ordered = sorted(counts.items(), key=lambda each: -each[1])
        return [
            (pattern, failure_words(record.data, pattern), count, count / max(1, total))
            for pattern, count in ordered
            if count
        ]

    def _words(self, name: str, pattern: str | None) -> Any:
        return pattern and failure_words(self._reader.record(name).data, pattern)

    def _pattern_names(self, name: str) -> dict[str, str]:
        data = self._reader.record(name).data
        return {each.value: failure_words(data, each.value).name for each in FailurePattern}

    def _store(self, name: str) -> Path:
        path = self._folder.readable(self._folder.run(name).values)
        if path is None:
            elsewhere = self._reader.record(name).option("values", "store")
            reason = f"; its values are those of {elsewhere}" if elsewhere else ""
            raise RunDirectoryError(f"{name} has no value store of its own{reason}")
        return path

    def _stored(self, name: str, digest: str) -> StoredValues:
        path = self._store(name)
        beta = finite(self._reader.record(name).option("values", "beta1"))
        beta = 0.5 if beta is None or beta < 0 else beta
        journal = path.with_name(f"{path.name}-wal")
        key = (path, digest, beta, signature(path), journal.exists() and signature(journal))
        return self._reader.computed.get(key, lambda: stored_values(path, digest, beta=beta))

    def values(self, request: Request) -> Response:
        """The tasks of the value store by V*."""
        name, number = query.text(request, "run"), max(1, query.number(request, "page", 1))
        order, path = query.choice(request, "order", TASK_ORDERS), self._store(name)
        conditions = all_conditions(path)
        digest = query.text(request, "conditions") or next(iter(conditions), "")
        stored = self._stored(name, digest) if digest else None
        tasks = _ordered(stored.tasks if stored else (), order)
        shown = tasks[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        return _page(
            "values",
            name=name,
            conditions=conditions,
            digest=digest,
            stored=stored,
            order=order,
            orders=TASK_ORDERS,
            tasks=shown,
            instructions=instructions(path, digest, [task.task_id for task in shown]),
            num_tasks=len(tasks),
            page=number,
            pages=page_numbers(number, max(1, -(-len(tasks) // PAGE_SIZE))),
        )

    def samples(self, request: Request) -> Response:
        """The samples of one task."""
        name, task = query.text(request, "run"), query.text(request, "task")
        digest, path = query.text(request, "conditions"), self._store(name)
        stored = self._stored(name, digest)
        found = next((each for each in stored.tasks if each.task_id == task), None)
        if found is None:
            raise HTTPException(404, f"the value store of {name} has no such task")
        places = [
            (Place(name, REFERENCE, index, digest, task), value, success, num_turns)
            for index, value, success, num_turns in sample_numbers(path, digest, task)
        ]
        return _page(
            "samples",
            name=name,
            digest=digest,
            task=found,
            instruction=folded(instructions(path, digest, [task])[task]),
            samples=places,
            beta1=stored.coverage.get("beta1"),
        )

    def compare(self, request: Request) -> Response:
        """Two runs on the same tasks."""
        first, second = query.text(request, "a"), query.text(request, "b")
        names = self._evaluated()
        if not first or not second:
            return _page("compare_choose", names=names, a=first, b=second)
        number = max(1, query.number(request, "page", 1))
        wanted = query.choice(request, "outcome", ["any", *(each.value for each in Outcome)])
        found = self._pairs(first, second)
        chosen = [each for each in found if wanted in ("any", each.outcome.value)]
        shown = chosen[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        index, path = self._index(first, "evaluation")
        other, other_path = self._index(second, "evaluation")
        return _page(
            "compare",
            a=first,
            b=second,
            names=names,
            labels=[algorithm_label(self._reader.record(name)) for name in (first, second)],
            counts=Counter(each.outcome.value for each in found),
            num_tasks=len(found),
            num_shown=len(chosen),
            outcome=wanted,
            rows=list(
                zip(
                    lists.episode_lines(index, path, [each.first for each in shown]),
                    lists.episode_lines(other, other_path, [each.second for each in shown]),
                    strict=True,
                )
            ),
            page=number,
            pages=page_numbers(number, max(1, -(-len(chosen) // PAGE_SIZE))),
        )

    def _evaluated(self) -> list[str]:
        return [n for n in self._folder.names() if self._folder.run(n).episodes.exists()]

    def _pairs(self, first: str, second: str) -> list[Pair]:
        index, path = self._index(first, "evaluation")
        other, other_path = self._index(second, "evaluation")
        key = ("pairs", path, signature(path), other_path, signature(other_path))
        return self._reader.computed.get(key, lambda: pairs(index, other))

    def side(self, request: Request) -> Response:
        """The episodes of two runs on one task, side by side."""
        first = Place(query.text(request, "a"), "evaluation", query.number(request, "first"))
        second = Place(query.text(request, "b"), "evaluation", query.number(request, "second"))
        shown = [self._shown(place) for place in (first, second)]
        if shown[0].task_id != shown[1].task_id:
            raise HTTPException(400, "these are episodes of two different tasks")
        return _page(
            "side",
            sides=list(zip((first, second), shown, strict=True)),
            most_turns=TURNS_PER_PAGE,
            words=[
                self._words(p.run, s.failure) for p, s in zip((first, second), shown, strict=True)
            ],
        )


def _ordered(tasks: Sequence[StoredTask], order: str) -> Sequence[StoredTask]:
    """The tasks, which come with the lowest V* first."""
    if order == "highest":
        return tasks[::-1]
    if order == "samples":
        return sorted(tasks, key=lambda task: -task.num_samples)
    return tasks


def _page(template: str, **context: Any) -> Response:
    tools = {
        "url": query.url,
        "percent": percent,
        "signed": signed,
        "decimal": decimal,
        "compact": compact,
        "interval": interval,
        "RunState": RunState,
    }
    return page(f"view/{template}.html", {**tools, **context})
