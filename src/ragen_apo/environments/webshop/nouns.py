"""Which words of a title name things: the rule behind the type reward, exchangeable.

A noun rule consumes a title and produces its nouns, lower-cased, in order, with repeats.

- `spacy_nouns` asks spaCy's part-of-speech tagger, as upstream does. It needs spaCy and its model.
- `rule_nouns` needs no model. It takes words of two or more letters, except function words, common
  adjectives, and words for colours and sizes.
- `every_word` takes every word, as in the recorded episodes.
"""

import functools
import re
import threading
from collections.abc import Callable
from typing import Any, Final

from ragen_apo.environments.webshop.colors import COLOR_WORDS
from ragen_apo.errors import EnvironmentDataError

NounRule = Callable[[str], tuple[str, ...]]

SPACY_MODEL = "en_core_web_sm"
_NOUN_TAGS = frozenset({"NOUN", "PROPN", "PNOUN"})
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
_one_at_a_time = threading.Lock()
"""Texts add to the vocabulary that spaCy's models share."""

_FUNCTION_WORDS_AND_ADJECTIVES = """
a about above after all an and any are as at be been before below but by can each every for from
has have her his how if in into is it its just more most my new no not of off on one only or
other our out over own per she so some such than that the their them then there these they this
those to too two under until up very via was we were what when which while who will with without
you your three four five six seven eight nine ten adjustable automatic available beautiful best
big bright casual cheap classic clean comfortable compatible complete cool cordless cute deep
durable easy elastic elegant extra fashionable fast fine flat flexible foldable free fresh full
funny great handmade heavy high hot large lightweight little long loose low magnetic medium mini
modern multi natural non organic original perfect plus portable premium professional pure quick
regular removable reusable round sexy sharp short simple slim small smart soft solid special
stylish super sweet thick thin tiny traditional ultra unique universal vintage warm waterproof
wide wireless xl xs xxl xxxl inch inches ft oz ml cm mm lb lbs pcs pc
"""
_NOT_NOUNS: Final = frozenset(COLOR_WORDS) | frozenset(_FUNCTION_WORDS_AND_ADJECTIVES.split())


def every_word(title: str) -> tuple[str, ...]:
    """Every whitespace-separated word, whatever it is."""
    return tuple(title.lower().split())


def rule_nouns(title: str) -> tuple[str, ...]:
    """Words of letters without function words, common adjectives, colours, sizes and units."""
    words = (match.group().lower() for match in _WORD.finditer(title))
    return tuple(word for word in words if len(word) > 1 and word not in _NOT_NOUNS)


@functools.cache
def spacy_model() -> Any:
    """SpaCy's model, loaded once; raises EnvironmentDataError where it is not installed."""
    try:
        import spacy  # pyright: ignore[reportMissingImports]

        return spacy.load(SPACY_MODEL)
    except (ImportError, OSError) as error:
        raise EnvironmentDataError(
            f"the noun rule 'spacy' needs spaCy and its model {SPACY_MODEL}: {error}; run `pip "
            f"install spacy` and `python -m spacy download {SPACY_MODEL}`, or choose the noun rule "
            "'rule'"
        ) from error


def spacy_nouns(title: str) -> tuple[str, ...]:
    """The tokens that spaCy tags as nouns or proper nouns, as upstream has it."""
    with _one_at_a_time:
        tagged = [(token.text.lower(), token.pos_) for token in spacy_model()(title)]
    return tuple(word for word, tag in tagged if tag in _NOUN_TAGS)


NOUN_RULES: Final[dict[str, NounRule]] = {
    "rule": rule_nouns,
    "words": every_word,
    "spacy": spacy_nouns,
}
