"""Two runs on the same tasks: which of them solved what.

Consumes the indexes of two evaluations; produces pairs of episodes. An evaluation that plays a task
several times is paired in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ragen_apo.web.view.growing import EpisodeIndex


class Outcome(str, Enum):
    """What became of a task in two runs, the first named first."""

    FIRST = "first"
    """Only the first solved it."""
    SECOND = "second"
    BOTH = "both"
    NEITHER = "neither"


class Pair(NamedTuple):
    """A task that both have played: the numbers of its episodes in their files."""

    task_id: str
    first: int
    second: int
    outcome: Outcome


def pairs(first: EpisodeIndex, second: EpisodeIndex) -> list[Pair]:
    """All common tasks in the order of the first run."""
    numbers = {key: number for number, key in enumerate(_occurrences(second.task_ids))}
    found: list[Pair] = []
    for number, key in enumerate(_occurrences(first.task_ids)):
        other = numbers.get(key)
        if other is not None and key[0]:
            outcome = _outcome(bool(first.successes[number]), bool(second.successes[other]))
            found.append(Pair(task_id=key[0], first=number, second=other, outcome=outcome))
    return found


def _occurrences(task_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Each task with the number of times it came up before."""
    seen: dict[str, int] = {}
    keys: list[tuple[str, int]] = []
    for task_id in task_ids:
        before = seen.get(task_id, 0)
        keys.append((task_id, before))
        seen[task_id] = before + 1
    return keys


def _outcome(first: bool, second: bool) -> Outcome:
    if first:
        return Outcome.BOTH if second else Outcome.FIRST
    return Outcome.SECOND if second else Outcome.NEITHER
