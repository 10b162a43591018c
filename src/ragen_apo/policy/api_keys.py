"""Keys of servers, which come from the environment of the process alone.

No message here repeats a key, or the name of a variable: people paste keys there.
"""

from __future__ import annotations

import json
import os

from ragen_apo.addresses import problem_with_variable_name
from ragen_apo.errors import ConfigError

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
    """The text as a server said it, which may be the key that it was sent."""
    if key is None or len(key) < _MIN_SECRET_CHARACTERS:
        return text
    return text.replace(key, "[the key]")


def json_without_key(text: str, key: str | None) -> str:
    """As `without_key`, also where the text is JSON that has the key in another notation.

    JSON may write any character as an escape, as PHP writes slashes.
    """
    text = without_key(text, key)
    if key is None or "\\" not in text:
        return text
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return text
    plain = json.dumps(read)
    hidden = without_key(plain, json.dumps(key)[1:-1])
    return text if hidden == plain else hidden
