"""Lists of episodes: filtered, ordered, and cut into pages, from an index and not the episodes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_apo.report.load import mapping
from ragen_apo.web.view.episodes import Folded, folded
from ragen_apo.web.view.growing import EpisodeIndex
from ragen_apo.web.view.query import Page

PAGE_SIZE = 50
NUM_EXAMPLES = 4
"""Episodes shown of one kind, where a page has several kinds."""
OUTCOMES = ("any", "solved", "failed")
ORDERS = ("first", "newest", "best", "worst", "longest")
MAX_INSTRUCTION_CHARACTERS = 240


@dataclass(frozen=True)
class Filters:
    """What a list is asked for."""

    outcome: str = "any"
    failure: str = ""
    order: str = "first"
    find: str = ""
    """A text that the episode contains, in any case."""

    @property
    def needs_all(self) -> bool:
        """Whether the whole file has to be known to make the first page."""
        return self != Filters()


@dataclass(frozen=True)
class EpisodeLine:
    """An episode in a list."""

    number: int
    """In the file, from 0."""
    instruction: Folded
    category: str
    success: bool
    failure: str
    episode_return: float
    num_turns: int
    step: int


@dataclass(frozen=True)
class ListPage:
    """One page of a list."""

    lines: tuple[EpisodeLine, ...]
    total: int | None
    """Of all pages; None where the file was not read to its end yet."""
    has_more: bool


def selected(index: EpisodeIndex, path: Path, filters: Filters) -> Sequence[int]:
    """The numbers of the episodes that fit, in the order that is asked for."""
    chosen: Sequence[int] = range(len(index))
    if filters.outcome != "any":
        wanted = filters.outcome == "solved"
        chosen = [number for number in chosen if bool(index.successes[number]) is wanted]
    if filters.failure:
        chosen = [number for number in chosen if index.failures[number] == filters.failure]
    if filters.find:
        fitting = containing(index, path, filters.find)
        chosen = [number for number in chosen if number in fitting]
    if filters.order == "newest":
        return chosen[::-1]
    if filters.order in ("best", "worst"):
        is_best = filters.order == "best"
        return sorted(chosen, key=index.returns.__getitem__, reverse=is_best)
    if filters.order == "longest":
        return sorted(chosen, key=index.num_turns.__getitem__, reverse=True)
    return chosen


def containing(index: EpisodeIndex, path: Path, text: str) -> set[int]:
    """The episodes whose line has this text, as JSON writes it, in any case."""
    needle = json.dumps(text)[1:-1].lower().encode()
    found: set[int] = set()
    for first, lines in index.stretches(path):
        content, start = lines.lower(), index.offsets[first]
        position = content.find(needle)
        while position >= 0:
            number = bisect_right(index.offsets, start + position) - 1
            found.add(number)
            # One is enough: the next place is looked for in the next episode.
            after = index.offsets[number + 1] - start if number + 1 < len(index) else len(content)
            position = content.find(needle, after)
    return found


def page_of(
    index: EpisodeIndex, path: Path, chosen: Sequence[int], page: Page, *, is_whole: bool
) -> ListPage:
    """A page of these episodes. `is_whole`: the index has the whole file."""
    return ListPage(
        lines=tuple(episode_lines(index, path, page.of(chosen))),
        total=len(chosen) if is_whole else None,
        has_more=page.start + page.size < len(chosen),
    )


def episode_lines(index: EpisodeIndex, path: Path, numbers: Sequence[int]) -> list[EpisodeLine]:
    """These episodes as lines."""
    rows = index.read(path, numbers)
    return [_line(index, number, row) for number, row in zip(numbers, rows, strict=True)]


def _line(index: EpisodeIndex, number: int, row: dict[str, Any]) -> EpisodeLine:
    task = mapping(row.get("task"))
    return EpisodeLine(
        number=number,
        instruction=folded(task.get("instruction"), MAX_INSTRUCTION_CHARACTERS),
        category=folded(task.get("category"), 60).text,
        success=bool(index.successes[number]),
        failure=index.failures[number],
        episode_return=index.returns[number],
        num_turns=index.num_turns[number],
        step=index.steps[number],
    )
