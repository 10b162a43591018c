"""The vocabulary of the generated catalogue: kinds of products, brands, features, options.

It lies in generated_words.yaml; this module reads it once.
"""

from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import yaml


@dataclass(frozen=True)
class Kind:
    """One kind of product."""

    query: str
    category: str
    path: tuple[str, ...]
    nouns: tuple[str, ...]
    materials: tuple[str, ...]
    features: tuple[str, ...]
    price_range: tuple[float, float]
    sizes: str = ""
    """The name of a list in SIZES; empty: the kind has no sizes."""


def _frozen(value: Any) -> Any:
    """Lists as tuples."""
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_FILE = resources.files("ragen_apo.environments.webshop") / "generated_words.yaml"
_WORDS: Final = _frozen(yaml.safe_load(_FILE.read_text(encoding="utf-8")))

BRANDS: Final[tuple[str, ...]] = _WORDS["brands"]
ADJECTIVES: Final[tuple[str, ...]] = _WORDS["adjectives"]
AUDIENCES: Final[tuple[str, ...]] = _WORDS["audiences"]
COLORS: Final[tuple[str, ...]] = _WORDS["colors"]
PATTERNS: Final[tuple[str, ...]] = _WORDS["patterns"]
CLOSINGS: Final[tuple[str, ...]] = _WORDS["closings"]
SIZES: Final[dict[str, tuple[str, ...]]] = _WORDS["sizes"]
KINDS: Final = tuple(Kind(**kind) for kind in _WORDS["kinds"])
