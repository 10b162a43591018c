"""Keys of servers, which come from the environment of the process alone.

No message here repeats a key, or the name of a variable: people paste keys there.
"""

from __future__ import annotations

import functools
import os
import re

from ragen_apo.addresses import problem_with_variable_name
from ragen_apo.errors import ConfigError

_NO_KEY = "[the key]"
_MIN_SECRET_CHARACTERS = 8
"""A shorter key is a word such as EMPTY, which servers without keys are given."""


def read_key(variable: str, *, option: str) -> str:
    """The key in an environment variable that the user names with `option`.

    Raises ConfigError, without the key, for a variable that is not set, and for a value that is no
    key.
    """
    if problem := problem_with_variable_name(variable):
        raise ConfigError(f"{option} {problem}")
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(
            f"the environment variable that {option} names is not set in this process, or is "
            "empty; export it first, or leave the option out if the server wants no key"
        )
    if not (value.isascii() and value.isprintable() and " " not in value):
        raise ConfigError(
            "the environment variable with the API key holds spaces, line breaks or characters "
            "that no key has; set it to the key alone"
        )
    return value


def without_key(text: str, key: str | None) -> str:
    """The text as a server said it, which may be the key that it was sent.

    Also where it is JSON that writes characters as escapes, as PHP does with slashes.
    """
    if key is None or len(key) < _MIN_SECRET_CHARACTERS:
        return text
    plain = text.replace(key, _NO_KEY)
    return _with_escapes(key).sub(_NO_KEY, plain) if "\\" in plain else plain


@functools.cache
def _with_escapes(key: str) -> re.Pattern[str]:
    """The key with backslashes before characters, or with numbers in their place, as JSON may.

    Some backslashes at most, as JSON in JSON has: of all, each would be looked at from each.
    """
    written = (rf"(?:\\{{0,8}}{re.escape(each)}|\\{{1,8}}u(?i:{ord(each):04x}))" for each in key)
    return re.compile("".join(written))
