r"""Numbers as people and models write them, read exactly.

    42    -1,234.50    $18 per day    3/4    1 1/2    \frac{3}{4}    25%    1.5e3    x = 7

Currency signs and those of percent and degrees are dropped before and behind the number, units are
kept apart from it; neither is ever converted: 25% is 25. A number that letters would change (`3
million`, `7x`, `2ab`, `2 pi`, `5 squared`) and one beside another number (`7 or 8`, `4%2`) are not
read. A word of one or two letters, and one of three that is joined to the number, is a unit only if
it is a known one: `5cm`, and not `2xy`.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 500
"""Longer texts are not read."""

_SEPARATORS = {"{,}": ",", "\\,": "", "\\!": "", "\\ ": " ", "~": " ", "\u00a0": " ", "\u202f": ""}
_SIGNS = {"\u2212": "-", "\u2013": "-", "\u2044": "/"}
_COMMANDS = re.compile(r"\\(?:left|right|displaystyle)")
_MARK = r"(?:\\%|\\\$|[$%\u20ac\u00a3\u00b0]|\^\\circ|\^\{\\circ\})"
_ENDS = re.compile(rf"^(?:{_MARK}|\s)+|(?:{_MARK}|[\s.])+$")
_ONE_CHARACTER_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_RAISED = re.compile("(?<=[\\w)\\]}])[\u207b\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+")
_LOWERED = re.compile("(?<=[\\w)])[\u2080-\u2089]+")
_EQUALS = re.compile(r"(?<![<>!~])=")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CALL = re.compile(r"\b[A-Za-z]\([^()]*\)")
_UNKNOWN = re.compile(r"(?<!\d )(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_COMPUTED = re.compile(r"[\d+*/^-]")
_BOXED, _FBOX = re.compile(r"\\boxed\s*\{"), re.compile(r"\\fbox\s*\{")
_BOX_WITHOUT_BRACES = re.compile(r"\\boxed\s+(?:([^\s$][^$\n]*)\$|(-?[\d.,/]*\d)(?=[\s.,]|$))")
_FORMULA = re.compile(r"(?<!\\)\\[()\[\]]")
_BOLD = re.compile(r"(?<![\w*])(\*{2,3})([^*\s](?:[^*]*[^*\s])?)\1(?![\w*])")
_UNWRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_NUMBER = re.compile(
    rf"(?:{_MARK}|\s)*(?P<sign>[+-]?)(?:{_MARK}|\s)*"
    r"(?:(?P<whole>\d+)[ ]+(?P<part>\d+)[ ]*/[ ]*(?P<parts>\d+)"
    r"|(?P<top>\d+)[ ]*/[ ]*(?P<bottom>\d+)"
    r"|(?P<decimal>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?P<power>e[+-]?\d{1,3})?)"
    r"(?P<unit>[^\d]*)",
    re.ASCII | re.IGNORECASE,
)
_UNIT = re.compile(
    r"[a-z][a-z'\u00b2\u00b3-]*(?:[ /][a-z][a-z'\u00b2\u00b3-]*){0,3}", re.IGNORECASE
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHORT_UNITS = _words(
    "m g s l h d am pm km cm mm nm ft in yd mi kg mg lb lbs oz ml cl dl ms hz kw mw kb mb gb tb kj "
    "kwh yr yrs mo mos wk wks day hr hrs min mins sec secs mph kph kmh rpm sq cu pt qt gal cup hp "
    "db ma kv ha cc px cal bit deg rad usd eur rs yo st nd rd th"
)
_SHORT_WORDS = _words("a an as at by he if in it my of on so up us we")
_NOT_UNITS = _words(
    "dozen hundred thousand million billion trillion bn mn half halve third fourth fifth sixth "
    "seventh eighth ninth tenth hundredth thousandth or and to not no is are was minus plus time "
    "over divided multiplied sqrt sin cos tan cot log ln exp pi alpha beta gamma delta epsilon "
    "theta lambda mu phi rho sigma tau omega"
)
_NOT_FIRST = _words("a squared cubed factorial choose mod modulo")
_FUNCTION = re.compile("(?:sin|cos|tan|cot|sqrt|log|ln|exp|pi)[a-z]")


@dataclass(frozen=True)
class Quantity:
    """A number and the words behind it."""

    number: Fraction
    unit: str
    """In lower case; empty where there is none."""

    def equals(self, other: "Quantity") -> bool:
        """The same number, and the same unit if both have one."""
        has_units = bool(self.unit and other.unit)
        return self.number == other.number and (not has_units or self.unit == other.unit)


def read_quantity(text: str) -> Quantity | None:
    """What the whole text is: one number, perhaps with a unit; None where it is anything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    found = _NUMBER.fullmatch(_simplified(text))
    if found is None:
        return None
    unit = _ENDS.sub("", found["unit"]).casefold()
    if not _is_unit(unit, is_joined=found["unit"][:1].isalpha()):
        return None
    if found["decimal"]:
        size = Fraction(found["decimal"].replace(",", "").rstrip(".") + (found["power"] or ""))
    else:
        top, bottom = int(found["part"] or found["top"]), int(found["parts"] or found["bottom"])
        if bottom == 0:
            return None
        size = int(found["whole"] or 0) + Fraction(top, bottom)
    return Quantity(-size if found["sign"] == "-" else size, unit)


def unboxed(text: str) -> str:
    r"""The content of the last `\boxed{...}`, else of `\boxed 5` or `\fbox{...}`; else the text."""
    for box in (_BOXED, _BOX_WITHOUT_BRACES, _FBOX):
        *_, last = [None, *box.finditer(text)]
        if last and box is _BOX_WITHOUT_BRACES:
            return (last[1] or last[2]).strip()
        if last and (content := _to_closing_brace(text[last.end() :])) is not None:
            return content
    return text


def _to_closing_brace(text: str) -> str | None:
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return None


def formula_in(text: str) -> str:
    r"""The text without `\boxed{}`, the signs of a formula (`\(42\)`, `\[42\]`) and of bold text
    (`**42**`).
    """
    return _FORMULA.sub(" ", _BOLD.sub(r"\2", unboxed(text))).strip()


def unwrapped(text: str) -> str:
    r"""The same, without `\text{}` and its like."""
    return _UNWRAPPED.sub(r"\1", formula_in(text))


def spelled_out(text: str) -> str:
    """With fractions, raised and lowered digits in ASCII: `1 1/2`, `10^3`, `x_1`.

    Unicode's own normalisation makes such digits like the others: ten to the third would be 103.
    """
    text = _with_plain_fractions(text)
    text = _RAISED.sub(lambda found: f"^{_ascii_digits(found[0])}", text)
    return _LOWERED.sub(lambda found: f"_{_ascii_digits(found[0])}", text)


def _with_plain_fractions(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        return " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/")

    return _ONE_CHARACTER_FRACTION.sub(plain, text)


def _ascii_digits(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _simplified(text: str) -> str:
    """One line without LaTeX; after an equals sign, what is equal."""
    text = _with_plain_fractions(unwrapped(text))
    for written, meant in {**_SEPARATORS, **_SIGNS}.items():
        text = text.replace(written, meant)
    text = _FRACTION.sub(_plain_fraction, text)
    text = _COMMANDS.sub(" ", text)
    *before, last = _EQUALS.split(text)
    return text if any(map(_is_equation, before)) else " ".join(last.split())


def _is_equation(left: str) -> bool:
    """Whether what stands before an equals sign computes with an unknown, as in `2x = 7`."""
    plain = _CALL.sub("", _COMMAND.sub("", left))
    return bool(_UNKNOWN.search(plain) and _COMPUTED.search(plain))


def _plain_fraction(found: re.Match[str]) -> str:
    top, bottom = found[1] or found[3], found[2] or found[4]
    if not top.startswith("-"):
        return f" {top}/{bottom}"
    # A minus inside the fraction cannot follow a whole number.
    return f"-{top[1:]}/{bottom}"


def _is_unit(text: str, *, is_joined: bool) -> bool:
    """Whether the words behind a number, or joined to it, leave the number what it is."""
    if not text:
        return True
    if not _UNIT.fullmatch(text):
        return False
    first, *_ = words = [word.rstrip("\u00b2\u00b3") for word in re.split(r"[ /]", text)]
    if any({word, word.removesuffix("s")} & _NOT_UNITS for word in words) or first in _NOT_FIRST:
        return False
    if any(len(word) < 3 and word not in _SHORT_UNITS | _SHORT_WORDS for word in words):
        return False
    is_known = first in _SHORT_UNITS
    return is_known or not is_joined or (len(first) > 3 and not _FUNCTION.match(first))
