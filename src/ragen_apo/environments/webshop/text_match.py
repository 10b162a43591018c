"""How alike two texts are, exactly as thefuzz's `token_set_ratio` says.

Consumes any text; produces a whole number from 0 to 100. Both texts lose the characters U+0080 to
U+00FF, everything else that is not a letter or digit becomes a space, the rest is lower-cased.
With the words both have, I, and the words only one has, A and B (each sorted and joined by
spaces), it is the largest of ratio(I A, I B), ratio(I, I A) and ratio(I, I B), where

    ratio(s, t) = 100 (1 - d(s, t) / (|s| + |t|)),   d = |s| + |t| - 2 LCS(s, t)

rounded half to even; 100 where one text's words contain the other's, 0 where a text has no word.
Source: thefuzz 0.22 on rapidfuzz 3; the prefix I is shared, so d(I A, I B) is taken as d(A, B).
"""

import functools

_DROPPED = dict.fromkeys(range(0x80, 0x100))


def process(text: str) -> str:
    """The text as the comparison sees it: lower case, letters and digits, single characters
    kept.
    """
    kept = text.translate(_DROPPED)
    return "".join(_simple_lower(c) if c.isalnum() else " " for c in kept).strip()


def _simple_lower(character: str) -> str:
    """One character for one, as rapidfuzz does it (Python lowers a dotted capital I to two)."""
    return character.lower()[0]


def common_subsequence_length(first: str, second: str) -> int:
    """The length of the longest common subsequence (Hyyro's bit-parallel form)."""
    places: dict[str, int] = {}
    for index, character in enumerate(first):
        places[character] = places.get(character, 0) | (1 << index)
    all_ones = (1 << len(first)) - 1
    state = all_ones
    for character in second:
        matches = state & places.get(character, 0)
        state = ((state + matches) | (state - matches)) & all_ones
    return len(first) - state.bit_count()


def _ratio(distance: int, length: int) -> float:
    return 100 - 100 * distance / length if length else 100.0


@functools.lru_cache(maxsize=16384)
def token_set_ratio(first: str, second: str) -> int:
    """The similarity of two texts by their sets of words, 0 to 100."""
    words_first, words_second = set(process(first).split()), set(process(second).split())
    if not words_first or not words_second:
        return 0
    both = words_first & words_second
    only_first, only_second = words_first - both, words_second - both
    if both and (not only_first or not only_second):
        return 100
    rest_first, rest_second = " ".join(sorted(only_first)), " ".join(sorted(only_second))
    num_both = len(" ".join(both))
    gap = 1 if both else 0
    length_first = num_both + gap + len(rest_first)
    length_second = num_both + gap + len(rest_second)
    longest = common_subsequence_length(rest_first, rest_second)
    distance = len(rest_first) + len(rest_second) - 2 * longest
    ratios = [_ratio(distance, length_first + length_second)]
    if both:
        ratios.append(_ratio(gap + len(rest_first), num_both + length_first))
        ratios.append(_ratio(gap + len(rest_second), num_both + length_second))
    return round(max(ratios))
