"""How alike two texts are, exactly as thefuzz 0.22 says, by the library under it, rapidfuzz.

Both texts lose the characters U+0080 to U+00FF, everything else that is not a letter or digit
becomes a space, the rest is lower-cased. 100 where one text's words contain the other's, 0 where a
text has no word.
"""

import functools

from rapidfuzz import fuzz, utils

_DROPPED = dict.fromkeys(range(0x80, 0x100))


def process(text: str) -> str:
    """The text as the comparison sees it."""
    return utils.default_process(text.translate(_DROPPED))


@functools.lru_cache(maxsize=16384)
def token_set_ratio(first: str, second: str) -> int:
    """The similarity of two texts by their sets of words, 0 to 100, rounded half to even."""
    return round(fuzz.token_set_ratio(first, second, processor=process))
