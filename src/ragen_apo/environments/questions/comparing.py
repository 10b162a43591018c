"""Whether an answer is the right one.

    auto     text, then numbers where the right answer is one, else math-verify where it is
             installed and the right answer has a digit, a sign or a command of LaTeX
    number   numbers, exactly, and their units where both have one (`numbers.read_quantity`)
    text     text without regard to case, spaces and the full stop; raised digits are exponents
    math     math-verify: `x(x+1)` is `x^2+x`

An answer that is a sum is no number: `3 + 4` does not answer what 3 + 4 is, except under `math`.
"""

import importlib.metadata
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from ragen_apo.environments.questions.math_process import equal_as_mathematics
from ragen_apo.environments.questions.numbers import read_quantity, spelled_out, unwrapped
from ragen_apo.errors import ConfigError

Mode = Literal["auto", "math", "text", "number"]
RULES_VERSION = 5
"""Raise it whenever the same answer to the same question would earn something else."""
LIBRARY = "math-verify"

_MATHEMATICAL = re.compile(r"[0-9\\^_=+*/<>{}()\[\]|]|^\s*[A-Za-z]\s*$")
_DOLLAR = re.compile(r"(?<!\d)\$|\$(?!\d)")
_END_OF_SENTENCE = re.compile(r"(?:(?<=[^\W\d_]{2})[.!]+|\.+)$")
"""A full stop, and an exclamation mark behind a word: elsewhere it is a factorial."""
_DERIVATIVE = re.compile("[a-z]'+")
_ONE_CHOICE = re.compile(r"\(?([a-z])\)?")


@dataclass(frozen=True)
class Comparison:
    """A way to compare; `comparison` makes it."""

    mode: Mode
    library_version: str | None
    """Of math-verify; None where it is not used."""

    @property
    def version(self) -> str:
        """Differs where an answer might be judged otherwise."""
        library = f"-{LIBRARY}{self.library_version}" if self.library_version else ""
        return f"{RULES_VERSION}-{self.mode}{library}"

    def is_right(self, answer: str, right: str) -> bool:
        """Whether `answer` is what `right` is; no text makes it raise, hang or compute for long."""
        same_text = comparable_text(answer) == comparable_text(right)
        if self.mode == "text":
            return same_text
        if self.mode != "number" and same_text:
            return True
        if self.mode != "math" and (quantity := read_quantity(right)) is not None:
            given = read_quantity(answer)
            return given is not None and given.equals(quantity)
        if self.mode == "number" or self.library_version is None:
            return False
        if self.mode == "auto" and not _MATHEMATICAL.search(right):
            return False
        return equal_as_mathematics(spelled_out(answer), spelled_out(right))


def comparison(mode: Mode) -> Comparison:
    """The comparison of this mode; ConfigError for `math` without math-verify."""
    if mode not in ("math", "auto"):
        return Comparison(mode, None)
    try:
        return Comparison(mode, importlib.metadata.version(LIBRARY))
    except importlib.metadata.PackageNotFoundError as error:
        if mode == "auto":
            return Comparison(mode, None)
        raise ConfigError(
            "environment.compare: 'math' needs math-verify, which is not installed; run `pip "
            "install 'ragen-apo[math]'`, or choose auto, text or number"
        ) from error


def comparable_text(text: str) -> str:
    """Equal for texts that only differ in case, spaces, dollar signs or the full stop.

    A dollar sign between two digits stays: `4$2` is not 42.
    """
    plain = _DOLLAR.sub("", unwrapped(unicodedata.normalize("NFKC", spelled_out(text))))
    plain = _unquoted(" ".join(plain.casefold().split()))
    plain = _unquoted(_END_OF_SENTENCE.sub("", plain))
    choice = _ONE_CHOICE.fullmatch(plain)
    return choice[1] if choice else plain


def _unquoted(text: str) -> str:
    return text if _DERIVATIVE.fullmatch(text) else text.strip("\"' ")
