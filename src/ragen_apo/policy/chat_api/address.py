"""Where a server is, and the key that it wants.

A key comes from the process's environment alone. No message here repeats an address or the name of
a variable as it was given: people paste keys into both.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ragen_apo.addresses import is_loopback, problem_with_address
from ragen_apo.errors import ConfigError

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
MIN_SECRET_CHARACTERS = 8
"""A shorter key is a word such as EMPTY, which servers without keys are given."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLE = "such as https://api.openai.com/v1 or http://127.0.0.1:8000/v1"
_KEYS = (
    f"a key is read from the environment variable {DEFAULT_KEY_VARIABLE}, or from the one that "
    "--api-key-env (in Python: api_key_env) names"
)


@dataclass(frozen=True)
class Address:
    """The root of a server's API, without user, password, query and fragment."""

    base_url: str

    @property
    def chat_url(self) -> str:
        """Where chat completions are asked for."""
        return f"{self.base_url}/chat/completions"

    @property
    def server(self) -> str:
        """Host and port, for people."""
        return urlsplit(self.base_url).netloc

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        return is_loopback(urlsplit(self.base_url).hostname or "")

    @property
    def is_private(self) -> bool:
        """Whether nobody on the way can read along: encrypted, or on this machine."""
        return self.is_local or urlsplit(self.base_url).scheme == "https"


def read_address(base_url: str) -> Address:
    """The address in a URL. Raises ConfigError, which does not repeat the URL."""
    text = base_url.strip().rstrip("/")
    if problem := problem_with_address(text):
        raise ConfigError(f"base_url {problem}; expected http:// or https://, {_EXAMPLE}; {_KEYS}")
    return Address(text.removesuffix("/chat/completions").rstrip("/"))


def key_for(address: Address, *, variable: str | None) -> str | None:
    """The key in the environment variable; None if there is none to send.

    `variable` None means OPENAI_API_KEY if it is set, which is not sent unencrypted to another
    machine: it was not meant for that one. Raises ConfigError, without the key, for a variable that
    is asked for and not set, and for a value that is no key.
    """
    if variable is not None and not _VARIABLE.fullmatch(variable):
        raise ConfigError(
            "--api-key-env (api_key_env) takes the name of an environment variable, got something "
            "else; if it was the key itself, make a new key and put that into a variable"
        )
    value = os.environ.get(variable or DEFAULT_KEY_VARIABLE, "").strip()
    if not value:
        if variable is None:
            return None
        raise ConfigError(
            "the environment variable that --api-key-env (api_key_env) names is not set in this "
            "process, or is empty; export it first, or leave the option out if the server wants no "
            "key"
        )
    if not (value.isascii() and value.isprintable() and " " not in value):
        raise ConfigError(
            "the environment variable with the API key holds spaces, line breaks or characters "
            "that no key has; set it to the key alone"
        )
    return None if variable is None and not address.is_private else value
