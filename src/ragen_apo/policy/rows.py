"""Rows of the generation engine: episodes in progress, and what their prompts have in common.

Row        one episode: the tokens that are in the cache, those that wait, its response
Prefix     the beginning of a prompt that another row has read already
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ragen_apo.policy.sampling import Sampling

SHARED_TOKENS = 16
"""A shorter common beginning of two prompts is read again: copying has its cost, too."""
_WORTH_A_PASS = 256
"""Rows wait until another row has read the common beginning if that saves this many tokens."""
TOKENS_PER_PASS = 4096
"""The most prompt tokens of a pass, unless one prompt alone has more; more only take memory."""
PADDED_TOKENS_PER_PASS = 8192
"""The same on a GPU, padding included."""


@dataclass(eq=False)
class Row:
    """One episode in progress."""

    slot: int
    draws: np.random.Generator
    read: list[int] = field(default_factory=list)
    """Tokens of this row whose keys and values are in the cache."""
    unread: list[int] = field(default_factory=list)
    """Tokens that the model has not read yet: a prompt, or the last token sampled."""
    sampling: Sampling | None = None
    """The response that was asked for, until it is over."""

    @property
    def length(self) -> int:
        """The number of its tokens in the cache."""
        return len(self.read)

    @property
    def to_copy(self) -> list[int]:
        """What of the prompt another row may have read: not the last token, whose logits are those
        of the first one to sample.
        """
        return self.unread[:-1]

    @property
    def is_waiting(self) -> bool:
        """Whether a prompt has to be read before the first token of the response."""
        return self.sampling is not None and not self.sampling.token_ids


class Prefix(NamedTuple):
    """The first tokens of a prompt, which the row in this slot has read."""

    length: int
    slot: int


def longest_prefix(row: Row, readers: Iterable[Row]) -> Prefix:
    """What another row has read of the prompt of a row that begins; most of it, if several."""
    prompt = row.to_copy
    found = (Prefix(num_shared(other.read, prompt), other.slot) for other in readers)
    return max(found, default=Prefix(0, 0))


def better_later(sources: Mapping[Row, Prefix]) -> list[Row]:
    """Of rows that begin, those that can copy more once others of them have been read."""
    leaders: list[Row] = []
    saved: dict[Row, int] = {}
    for row, present in sources.items():
        prompt = row.to_copy
        expected = max((num_shared(leader.unread, prompt) for leader in leaders), default=0)
        if expected - present.length >= SHARED_TOKENS:
            saved[row] = expected - present.length
        else:
            leaders.append(row)
    return list(saved) if sum(saved.values()) >= _WORTH_A_PASS else []


def num_shared(first: list[int], second: list[int]) -> int:
    """The length of the common prefix, by halving: Python compares slices fast, tokens slowly."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def read_together(rows: Sequence[Row], *, padded: bool = False) -> Iterator[list[Row]]:
    """Splits rows into passes of at most `TOKENS_PER_PASS` unread tokens, in their order.

    Rows that will be `padded` are put in the order of their lengths, so that padding is short.
    """
    most = PADDED_TOKENS_PER_PASS if padded else TOKENS_PER_PASS
    if padded:
        rows = sorted(rows, key=lambda row: len(row.unread))
    group: list[Row] = []
    num_tokens = 0
    for row in rows:
        length = len(row.unread)
        num_tokens = length * (len(group) + 1) if padded else num_tokens + length
        if group and num_tokens > most:
            yield group
            group, num_tokens = [], length
        group.append(row)
    if group:
        yield group
