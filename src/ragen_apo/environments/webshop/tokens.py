"""Text to index terms, exactly as Anserini's English analysis on Lucene does it.

Consumes lower-case text and produces terms: Unicode word segmentation (UAX #29, Unicode 9, as in
Lucene's StandardTokenizer, emoji sequences included), possessive 's removed, 33 stop words removed,
Porter stems. Sources: Lucene's StandardTokenizerImpl grammar (rules) and Unicode's data files
(character classes). Pure ASCII text takes a short pattern, everything else the full one.

Assumption: text was lower-cased before (both documents and queries are, upstream too).
"""

import functools
from typing import Final

import regex

from ragen_apo.environments.webshop.stemming import stem

MAX_TOKEN_LENGTH = 255
"""Lucene cuts longer words into pieces of this length."""

_STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there
these they this to was will with
"""
STOP_WORDS: Final = frozenset(_STOP_WORDS.split())

_ASCII_WORD: Final = regex.compile(
    r"_*[a-zA-Z0-9](?:[a-zA-Z0-9_]|(?<=[a-zA-Z])[.:'](?=[a-zA-Z])|(?<=[0-9])[.,;'](?=[0-9]))*"
)

_BLANKS: Final = regex.compile(r"[ \t\n\r\f\v]+")
"""ASCII blanks never belong to a token."""

_PICTOGRAPHS_BASIC: Final = (
    r"\u00A9\u00AE\u203C\u2049\u2122\u2139\u2194-\u2199\u21A9-\u21AA\u231A-\u231B\u2328\u2388\u23CF"
    r"\u23E9-\u23F3\u23F8-\u23FA\u24C2\u25AA-\u25AB\u25B6\u25C0\u25FB-\u25FE\u2600-\u2605"
    r"\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714\u2716\u271D\u2721\u2728"
    r"\u2733-\u2734\u2744\u2747\u274C\u274E\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27A1"
    r"\u27B0\u27BF\u2934-\u2935\u2B05-\u2B07\u2B1B-\u2B1C\u2B50\u2B55\u3030\u303D\u3297\u3299"
)
_PICTOGRAPHS_SUPPLEMENTARY: Final = (
    r"\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F171"
    r"\U0001F17E-\U0001F17F\U0001F18E\U0001F191-\U0001F19A\U0001F1AD-\U0001F1E5"
    r"\U0001F201-\U0001F20F\U0001F21A\U0001F22F\U0001F232-\U0001F23A\U0001F23C-\U0001F23F"
    r"\U0001F249-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F\U0001F680-\U0001F6FF"
    r"\U0001F774-\U0001F77F\U0001F7D5-\U0001F7FF\U0001F80C-\U0001F80F\U0001F848-\U0001F84F"
    r"\U0001F85A-\U0001F85F\U0001F888-\U0001F88F\U0001F8AE-\U0001F8FF\U0001F90C-\U0001F93A"
    r"\U0001F93C-\U0001F945\U0001F947-\U0001FAFF\U0001FC00-\U0001FFFD"
)
"""Extended_Pictographic of Unicode's emoji-data; it holds every Emoji but digits, # and *."""


def _segmentation_pattern() -> str:
    """The grammar of UAX #29 in one pattern; a rule written `X` below carries trailing marks."""
    modifier = r"[\U0001F3FB-\U0001F3FF]"
    marks = rf"[[\p{{WB=Extend}}\p{{WB=Format}}\p{{WB=ZWJ}}]--{modifier}]*+"
    marks_in_emoji = (
        r"[[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]--[\uFE0E\uFE0F\U0001F3FB-\U0001F3FF]]*+"
    )
    marks_before_keycap = marks_in_emoji.replace("\\uFE0F", "\\uFE0F\\u20E3")
    later_letters = (
        r"[\u02C2-\u02C5\u02D2-\u02D7\u02DE\u02DF\u02E5-\u02EB\u02ED\u02EF-\u02FF"
        r"\u055A-\u055C\u055E\u058A\uA720\uA721\uA789\uA78A\uAB5B]"
    )
    letter_class = rf"[[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]--{later_letters}]"
    hebrew_class = r"\p{WB=Hebrew_Letter}"
    digit_class = r"[\p{WB=Numeric}\uFF10-\uFF19]"
    mid_both = r".'\u2018\u2019\u2024\uFE52\uFF07\uFF0E"
    mid_letter = (
        rf"[:\u00B7\u0387\u05F4\u2027\uFE13\uFE55\uFF1A{mid_both}]{marks}(?={letter_class})"
    )
    mid_digit = (
        r"[,;\u037E\u0589\u060C\u060D\u066C\u07F8\u2044\uFE10\uFE14\uFE50\uFE54\uFF0C\uFF1B"
        rf"{mid_both}]{marks}(?={digit_class})"
    )
    hebrew_quotes = rf"\"{marks}(?={hebrew_class})|'{marks}"
    letters_and_digits = (
        rf"(?:{hebrew_class}{marks}(?:{hebrew_quotes}|{mid_letter})?"
        rf"|{letter_class}{marks}(?:{mid_letter})?|{digit_class}{marks}(?:{mid_digit})?)++"
    )
    join = rf"(?:\p{{WB=ExtendNumLet}}{marks})"
    part = rf"(?:{letters_and_digits}|(?:\p{{WB=Katakana}}{marks})++)"
    word = rf"(?<!\p{{WB=ExtendNumLet}}){join}*+{part}(?:{join}++{part})*{join}*+"
    emoji_char = rf"[{_PICTOGRAPHS_BASIC}{_PICTOGRAPHS_SUPPLEMENTARY}]"
    emoji = (
        rf"(?:(?:\u200D*+\p{{Emoji_Modifier_Base}}{marks_in_emoji})?{modifier}{marks_in_emoji}"
        rf"|\u200D*+{emoji_char}{marks_in_emoji}\uFE0F?)"
    )
    emoji_sequence = (
        rf"{emoji}(?:[\U000E0020-\U000E007E]+\U000E007F|(?:(?:(?<=\u200D)|(?=\u200D)){emoji})*+)"
        rf"|[0-9\#*]{marks_before_keycap}\uFE0F?\u20E3{marks_in_emoji}"
        rf"|(?:\p{{WB=Regional_Indicator}}{marks}){{2}}"
    )
    single = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{marks}"
    return rf"{word}|{emoji_sequence}|(?:\p{{LB=SA}}{marks})+|{single}"


_WORD: Final = regex.compile(_segmentation_pattern(), regex.VERSION1)


def _tokenize_long(pattern: regex.Pattern[str], chunk: str) -> list[str]:
    """Tokens of text without blanks, however long, in linear time: looked for in short windows."""
    tokens: list[str] = []
    position = 0
    while position < len(chunk):
        match = pattern.search(chunk[position : position + 2 * MAX_TOKEN_LENGTH])
        if match is None or match.start() >= MAX_TOKEN_LENGTH:
            position += MAX_TOKEN_LENGTH
            continue
        start = position + match.start()
        token = match.group()
        if len(token) > MAX_TOKEN_LENGTH:
            window = pattern.match(chunk[start : start + MAX_TOKEN_LENGTH])
            token = window.group() if window is not None else token[:MAX_TOKEN_LENGTH]
        tokens.append(token)
        position = start + len(token)
    return tokens


def tokenize(text: str) -> list[str]:
    """The words, numbers and emoji of a text in order, as StandardTokenizer cuts them."""
    pattern = _ASCII_WORD if text.isascii() else _WORD
    if len(text) <= MAX_TOKEN_LENGTH or max(map(len, text.split()), default=0) <= MAX_TOKEN_LENGTH:
        return pattern.findall(text)
    return [token for chunk in _BLANKS.split(text) for token in _tokenize_long(pattern, chunk)]


def _without_possessive(token: str) -> str:
    if len(token) >= 2 and token[-1] in "sS" and token[-2] in "'\u2019\uff07":
        return token[:-2]
    return token


@functools.lru_cache(maxsize=65536)
def _term(token: str) -> str | None:
    """The index term of a token; None for a stop word."""
    word = _without_possessive(token).lower()
    return None if word in STOP_WORDS else stem(word)


def analyze(text: str) -> list[str]:
    """The index terms of a text, repeated as often as they occur."""
    return [term for token in tokenize(text) if (term := _term(token)) is not None]
