"""Foreign text for a terminal: characters that steer it or are invisible become visible escapes.

Foreign text comes from environments, catalogues, models and exceptions of foreign code. Tokens,
episodes and recordings keep the text as it is; only output for people goes through here.
"""

import functools
import os
import reprlib
import sysconfig
import traceback
import unicodedata
from pathlib import Path

from ragen_apo.errors import RagenApoError
from ragen_apo.plural import counted

_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control characters (C1 too), invisible ones such as bidirectional overrides, lone surrogates, and
line breaks that some programs follow and others do not."""
_HARMLESS = "\n\t\u200c\u200d"
"""Line breaks, tabs, and the joiners of Persian words and of emoji."""
_EXCEPTIONS = reprlib.Repr()
_EXCEPTIONS.maxother = 300


def printable(text: str) -> str:
    """The text, with an escape that Python would read for each character that steers a terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _STEERING:
        return character
    return character.encode("unicode_escape").decode("ascii")


def shortened(text: str, max_characters: int) -> str:
    """The text; if it is too long, its beginning and the number of characters left out."""
    if len(text) <= max_characters:
        return text
    left_out = len(text) - max_characters
    return f"{text[:max_characters]} ... ({counted(left_out, 'more character')})"


def exception_in_words(error: BaseException) -> str:
    """Type and message of an exception in bounded length, also where its own `repr` raises.

    Of one of ours the message alone, which is a sentence.
    """
    if isinstance(error, RagenApoError):
        return shortened(" ".join(Exception.__str__(error).split()), 300)
    if isinstance(error, OSError):  # the file is in its text alone
        return f"{type(error).__name__} ({shortened(OSError.__str__(error), 300)})"
    if isinstance(error, SyntaxError) and isinstance(error.msg, str):
        return f"{type(error).__name__} ({shortened(error.msg, 300)}, line {error.lineno})"
    return _EXCEPTIONS.repr(error)


def raised_in_words(error: BaseException) -> str:
    """As `exception_in_words`, with the file and line where it was raised.

    If a library raised it, the line that called the library is named: the reader can change that.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frames = [each for each in frames if not _is_of_library(each.filename)] or frames
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{exception_in_words(error)}{where}"


def _is_of_library(file: str) -> bool:
    # Compiled code names its source, which is not here: numpy/random/mtrand.pyx.
    return file.startswith(_libraries()) or file.endswith((".pyx", ".pxd", ".pxi"))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """What files begin with that their reader did not write: Python's, installed ones, ours."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), str(Path(__file__).parent)]
    return (*(os.path.join(folder, "") for folder in folders), "<frozen ")
