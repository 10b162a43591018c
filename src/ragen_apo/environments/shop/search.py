"""Free-text search over product titles by token overlap.

Text is normalised (lower case, no punctuation, singular, synonyms) to a set of tokens; a product
matches when it shares a token with the query. Best first: most shared tokens, then fewest title
tokens that were not asked for, then the smaller id. So the full words of a title always find that
title first, as long as no two titles have the same tokens.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "sneaker": ("running", "shoe"),
    "rucksack": ("backpack",),
    "couch": ("sofa",),
    "carpet": ("rug",),
    "drape": ("curtain",),
    "cushion": ("pillow",),
    "jumper": ("sweater",),
    "trouser": ("pant",),
    "tee": ("shirt",),
    "cup": ("mug",),
    "skillet": ("pan",),
    "earphone": ("headphone",),
    "smartphone": ("phone",),
    "wristwatch": ("watch",),
    "cap": ("hat",),
    "handbook": ("guide",),
    "diary": ("journal",),
    "retro": ("vintage",),
    "contemporary": ("modern",),
    "lightweight": ("light",),
    "luxury": ("premium",),
    "cordless": ("wireless",),
}
"""Replacements of singular words, the same for titles and queries."""

MAX_QUERY_CHARACTERS = 400
"""Longer queries are read up to here, so that no text makes a search slow."""

_MAX_CACHED_QUERIES = 50_000
_WORD = re.compile(r"[a-z0-9]+")


def singular(word: str) -> str:
    """A crude singular, the same for titles and queries: `watches` gives `watch`."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def normalise(text: str) -> frozenset[str]:
    """The tokens by which a text is found; none for text without ASCII letters or digits."""
    tokens: list[str] = []
    for word in _WORD.findall(text.lower()):
        stem = singular(word)
        tokens += SYNONYMS.get(stem, (stem,))
    return frozenset(tokens)


class SearchIndex:
    """An inverted index from token to product ids; answers are cached by normalised query."""

    def __init__(self, titles: Iterable[tuple[int, str]]) -> None:
        self._num_tokens: dict[int, int] = {}
        self._products_of_token: dict[str, list[int]] = {}
        self._cache: dict[frozenset[str], tuple[int, ...]] = {}
        for product_id, title in titles:
            tokens = normalise(title)
            self._num_tokens[product_id] = len(tokens)
            for token in sorted(tokens):
                self._products_of_token.setdefault(token, []).append(product_id)

    def search(self, query: str) -> tuple[int, ...]:
        """The ids of all matching products, best first."""
        tokens = normalise(query[:MAX_QUERY_CHARACTERS]).intersection(self._products_of_token)
        found = self._cache.get(tokens)
        if found is None:
            found = self._rank(tokens)
            if len(self._cache) < _MAX_CACHED_QUERIES:
                self._cache[tokens] = found
        return found

    def _rank(self, tokens: frozenset[str]) -> tuple[int, ...]:
        num_shared = Counter(
            product_id for token in tokens for product_id in self._products_of_token[token]
        )
        return tuple(
            sorted(
                num_shared,
                key=lambda product: (
                    -num_shared[product],
                    self._num_tokens[product] - num_shared[product],
                    product,
                ),
            )
        )
