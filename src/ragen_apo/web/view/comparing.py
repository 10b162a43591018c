"""Two runs on the same tasks: which of them solved what.

Consumes the indexes of two evaluations; produces pairs of episodes. An evaluation that plays a task
several times is paired in its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ragen_apo.web.view.growing import EpisodeIndex


class Outcome(str, Enum):
    """What became of a task in two runs, the first named first."""

    FIRST = "first"
    """Only the first solved it."""
    SECOND = "second"
    BOTH = "both"
    NEITHER = "neither"


@dataclass(frozen=True)
class Pair:
    """A task that both have played: the numbers of its episodes in their files."""

    task_id: str
    first: int
    second: int
    outcome: Outcome


def pairs(first: EpisodeIndex, second: EpisodeIndex) -> list[Pair]:
    """All common tasks in the order of the first run."""
    numbers = {key: number for number, key in enumerate(_occurrences(second.task_ids))}
    return [
        Pair(
            task_id=key[0],
            first=number,
            second=numbers[key],
            outcome=_outcome(bool(first.successes[number]), bool(second.successes[numbers[key]])),
        )
        for number, key in enumerate(_occurrences(first.task_ids))
        if key in numbers and key[0]
    ]


def _occurrences(task_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Each task with the number of times it came up before."""
    seen: Counter[str] = Counter()
    keys: list[tuple[str, int]] = []
    for task_id in task_ids:
        keys.append((task_id, seen[task_id]))
        seen[task_id] += 1
    return keys


def _outcome(first: bool, second: bool) -> Outcome:
    if first:
        return Outcome.BOTH if second else Outcome.FIRST
    return Outcome.SECOND if second else Outcome.NEITHER
