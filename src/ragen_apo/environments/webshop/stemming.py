"""Porter's stemmer with Martin Porter's own later extensions, as Lucene applies it.

Consumes a lower-case word and produces its stem. Source: M. F. Porter, "An algorithm for suffix
stripping", Program 14(3), 1980, with the departures its author published later: words of one or two
letters stay, `-bli` gives `-ble`, `-logi` gives `-log`. This is neither Snowball's `porter` (which
lacks the departures) nor `english` (Porter2). A letter outside a, e, i, o, u, y is a consonant.

In the notation of the paper a stem is [C](VC)^m[V]; `_measure` is m.
"""

import re

_VOWEL_RUN_THEN_CONSONANT = re.compile("v+c")


def _table(text: str) -> tuple[tuple[str, str], ...]:
    """Suffixes and their replacements, in the order in which they are tried."""
    rules = (rule.partition(">") for rule in text.split())
    return tuple((suffix, replacement) for suffix, _, replacement in rules)


_DOUBLE_SUFFIXES = _table("""
    ational>ate tional>tion enci>ence anci>ance izer>ize bli>ble alli>al entli>ent eli>e
    ousli>ous ization>ize ation>ate ator>ate alism>al iveness>ive fulness>ful ousness>ous
    aliti>al iviti>ive biliti>ble logi>log
""")
_ADJECTIVE_SUFFIXES = _table("icate>ic ative> alize>al iciti>ic ical>ic ful> ness>")
_LAST_SUFFIXES = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent"),
    *("sion", "tion", "ou", "ism", "ate", "iti", "ous", "ive", "ize"),
)


def _shape(word: str) -> str:
    """`v` for each vowel and `c` for each consonant; y is a vowel after a consonant."""
    shape: list[str] = []
    previous = "v"
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and bool(shape) and previous == "c")
        previous = "v" if vowel else "c"
        shape.append(previous)
    return "".join(shape)


def _measure(stem: str) -> int:
    return len(_VOWEL_RUN_THEN_CONSONANT.findall(_shape(stem)))


def _ends_double_consonant(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant other than w, x, y: the end that takes an e back (hop-e)."""
    return _shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _strip_plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    if word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def _strip_participle(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            return _restore_end(stem) if "v" in _shape(stem) else word
    return word


def _restore_end(stem: str) -> str:
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if _ends_double_consonant(stem):
        return stem if stem[-1] in "lsz" else stem[:-1]
    if _measure(stem) == 1 and _ends_short(stem):
        return stem + "e"
    return stem


def _replace_suffix(word: str, table: tuple[tuple[str, str], ...]) -> str:
    for suffix, replacement in table:
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            return stem + replacement if _measure(stem) > 0 else word
    return word


def _strip_last_suffix(word: str) -> str:
    for suffix in _LAST_SUFFIXES:
        if word.endswith(suffix):
            kept = 1 if suffix in ("sion", "tion") else 0
            stem = word[: len(word) - len(suffix) + kept]
            return stem if _measure(stem) > 1 else word
    return word


def _tidy_end(word: str) -> str:
    if word.endswith("e"):
        # Measured with its final e, as Lucene does; a vowel at the end adds nothing to m.
        measure = _measure(word)
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word


def stem(word: str) -> str:
    """The stem of a lower-case word."""
    utf16_length = (
        len(word) if word.isascii() else len(word.encode("utf-16-le", "surrogatepass")) // 2
    )
    if utf16_length <= 2:
        return word
    word = _strip_participle(_strip_plural(word))
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    if len(word) > 1:
        word = _replace_suffix(word, _DOUBLE_SUFFIXES)
    word = _replace_suffix(word, _ADJECTIVE_SUFFIXES)
    if len(word) > 1:
        word = _strip_last_suffix(word)
    return _tidy_end(word)
