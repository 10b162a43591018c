"""Which of a list's items this rank takes next; all ranks have the list.

    static    every size-th one, whatever the others do: the same every time
    dynamic   the next one that nobody has taken, by a counter in the ranks' store: a rank that is
              fast, or whose items are short, takes more (self-scheduling)

Every item is taken once, by one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragen_apo.choices import EpisodeSchedule
from ragen_apo.distributed.ranks import Ranks


class WorkQueue:
    """Hands out the indices of a list in ascending order. Used up before the next meeting."""

    def __init__(self, ranks: Ranks, length: int, *, schedule: EpisodeSchedule, what: str) -> None:
        self._ranks, self._length, self._what = ranks, length, what
        self._is_dynamic = schedule == "dynamic" and ranks.size > 1
        self._own = range(0) if self._is_dynamic else range(length)[ranks.share]
        self.is_empty = length == 0 if self._is_dynamic else not self._own
        self.width = -(-length // ranks.size)
        """The most items that a rank should have at a time, so that it leaves the others theirs."""

    def take(self, most: int) -> Sequence[int]:
        """The next indices for this rank, at most `most`; none once the list is used up."""
        if self.is_empty or most <= 0:
            return range(0)
        if not self._is_dynamic:
            taken, self._own = self._own[:most], self._own[most:]
            self.is_empty = not self._own
            return taken
        drawn = self._ranks.draw(most, self._what)
        self.is_empty = drawn.stop >= self._length
        return range(self._length)[drawn.start : drawn.stop]
