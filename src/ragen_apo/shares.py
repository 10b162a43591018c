"""Turns in proportion to weights: who is next, so that at any time all have had their share.

No draws: of the first n turns each name has n * weight / sum of weights, rounded up or down. This
is the quota method of apportionment (Balinski and Young, "The quota method of apportionment", 1975)
taken turn by turn.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

_Item = TypeVar("_Item")


def turns_by_weight(weights: Mapping[str, float]) -> Iterator[str]:
    """The names in turn, without end. Weights are positive, and read as the decimals they print as.

    A name whose share of the turns so far, including this one, is used up has to wait. Of the
    others, the next is the name whose next turn is due first; among equals the first one.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    shares = {name: weight / total for name, weight in exact.items()}
    num_turns = dict.fromkeys(weights, 0)
    for turn in itertools.count(1):
        open_names = [name for name in shares if num_turns[name] < turn * shares[name]]
        chosen = min(open_names, key=lambda name: (num_turns[name] + 1) / shares[name])
        num_turns[chosen] += 1
        yield chosen


def interleaved(
    items: Mapping[str, Sequence[_Item]], weights: Mapping[str, float]
) -> tuple[_Item, ...]:
    """Every item once: each name's in their order, the names with any left in turns by weight."""
    waiting = {name: iter(each) for name, each in items.items()}
    remaining = {name: len(each) for name, each in items.items() if each}
    merged: list[_Item] = []
    while remaining:
        for name in turns_by_weight({name: weights[name] for name in remaining}):
            merged.append(next(waiting[name]))
            remaining[name] -= 1
            if remaining[name] == 0:
                del remaining[name]
                break
    return tuple(merged)
