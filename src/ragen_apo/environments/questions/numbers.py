r"""Numbers as people and models write them, read exactly.

    42    -1,234.50    $18 per day    3/4    1 1/2    \frac{3}{4}    25%    1.5e3    x = 7

Currency signs, the sign of percent and units are dropped, never converted: 25% is 25 and 3 km is
3. A number that letters would change (`3 million`, `7x`, `2 pi`) and one beside another number (`7
or 8`) are not read.
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 500
"""Longer texts are not read."""

_SEPARATORS = {"{,}": ",", "\\,": "", "\\!": "", "\\ ": " ", "~": " ", "\u00a0": " ", "\u202f": ""}
_SIGNS = {"\u2212": "-", "\u2013": "-", "\u2044": "/"}
_DROPPED = (
    "\\left",
    "\\right",
    "\\displaystyle",
    "\\%",
    "\\$",
    "$",
    "%",
    "\u20ac",
    "\u00a3",
    "^\\circ",
    "^{\\circ}",
    "\u00b0",
)
_UNWRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*"
    r"(?:(?P<whole>\d+)[ ]+(?P<part>\d+)[ ]*/[ ]*(?P<parts>\d+)"
    r"|(?P<top>\d+)[ ]*/[ ]*(?P<bottom>\d+)"
    r"|(?P<decimal>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?P<power>e[+-]?\d{1,3})?)"
    r"(?P<unit>[^\d]*)",
    re.ASCII | re.IGNORECASE,
)
_UNIT = re.compile(
    r"[a-z][a-z'\u00b2\u00b3-]*(?:[ /][a-z][a-z'\u00b2\u00b3-]*){0,3}", re.IGNORECASE
)
_ONE_LETTER_UNITS = frozenset("mgslhd")
_SIZES = {"dozen", "hundred", "thousand", "million", "billion", "trillion", "bn", "mn", "half"}
_NOT_UNITS = _SIZES | {"pi", "or", "and", "to", "not", "minus", "plus", "times"}


def read_number(text: str) -> Fraction | None:
    """The number that the whole text is; None where it is none, or more than one."""
    if len(text) > MAX_CHARACTERS:
        return None
    found = _NUMBER.fullmatch(_simplified(text))
    if found is None or not _is_unit(found["unit"]):
        return None
    if found["decimal"]:
        size = Fraction(found["decimal"].replace(",", "").rstrip(".") + (found["power"] or ""))
    else:
        top, bottom = int(found["part"] or found["top"]), int(found["parts"] or found["bottom"])
        if bottom == 0:
            return None
        size = int(found["whole"] or 0) + Fraction(top, bottom)
    return -size if found["sign"] == "-" else size


def unboxed(text: str) -> str:
    r"""The content of the last `\boxed{...}`; the text itself where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    start += len("\\boxed{")
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return text


def unwrapped(text: str) -> str:
    r"""The text without `\boxed{}`, `\text{}` and their like."""
    return _UNWRAPPED.sub(r"\1", unboxed(text))


def _simplified(text: str) -> str:
    """One line without LaTeX; after an equals sign, what is equal."""
    text = unwrapped(text)
    for written, meant in {**_SEPARATORS, **_SIGNS}.items():
        text = text.replace(written, meant)
    text = _FRACTION.sub(_plain_fraction, text)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    return " ".join(text.rpartition("=")[2].split())


def _plain_fraction(found: re.Match[str]) -> str:
    top, bottom = found[1] or found[3], found[2] or found[4]
    if not top.startswith("-"):
        return f" {top}/{bottom}"
    # A minus inside the fraction cannot follow a whole number.
    return f"-{top[1:]}/{bottom}"


def _is_unit(text: str) -> bool:
    text = text.strip(" .!")
    if not text:
        return True
    words = re.split(r"[ /]", text.casefold())
    if not _UNIT.fullmatch(text) or _NOT_UNITS.intersection(words):
        return False
    return len(words[0]) > 1 or words[0] in _ONE_LETTER_UNITS
