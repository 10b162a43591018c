"""Which episodes of a list, and in which order: from an index and not the episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ragen_apo.web.view.rows import EpisodeIndex

PAGE_SIZE = 50
NUM_EXAMPLES = 4
"""Episodes shown of one kind, where a page has several kinds."""
OUTCOMES = ("any", "solved", "failed")
ORDERS = ("first", "newest", "best", "worst", "longest")


@dataclass(frozen=True)
class Filters:
    """What a list is asked for."""

    outcome: str = "any"
    failure: str = ""
    order: str = "first"
    find: str = ""
    """A text that the episode contains, in any case."""


def selected(index: EpisodeIndex, path: Path, filters: Filters) -> Sequence[int]:
    """The numbers of the episodes that fit, in the order that is asked for."""
    chosen: Sequence[int] = range(len(index))
    if filters.outcome != "any":
        wanted = filters.outcome == "solved"
        chosen = [number for number in chosen if bool(index.successes[number]) is wanted]
    if filters.failure:
        chosen = [number for number in chosen if index.failures[number] == filters.failure]
    if filters.find:
        fitting = index.containing(path, filters.find)
        chosen = [number for number in chosen if number in fitting]
    if filters.order == "newest":
        return chosen[::-1]
    if filters.order in ("best", "worst"):
        is_best = filters.order == "best"
        return sorted(chosen, key=index.returns.__getitem__, reverse=is_best)
    if filters.order == "longest":
        return sorted(chosen, key=index.num_turns.__getitem__, reverse=True)
    return chosen
