"""Where a server is, and the key that it wants.

A key comes from the process's environment alone. No message here repeats an address or the name of
a variable as it was given: people paste keys into both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from ragen_apo.addresses import is_loopback, problem_with_address
from ragen_apo.errors import ConfigError
from ragen_apo.policy.api_keys import read_key

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
_OPTION = "--api-key-env (api_key_env)"


@dataclass(frozen=True)
class Address:
    """The root of a server's API, without user, password, query and fragment."""

    base_url: str

    @property
    def chat_url(self) -> str:
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
        raise ConfigError(
            f"base_url {problem}; expected http:// or https://, such as https://api.openai.com/v1 "
            "or http://127.0.0.1:8000/v1; a key is read from the environment variable "
            f"{DEFAULT_KEY_VARIABLE}, or from the one that --api-key-env (in Python: api_key_env) "
            "names"
        )
    return Address(text.removesuffix("/chat/completions").rstrip("/"))


def key_for(address: Address, *, variable: str | None) -> str | None:
    """The key in the environment variable; None if there is none to send.

    `variable` None means OPENAI_API_KEY if it is set, which is not sent unencrypted to another
    machine: it was not meant for that one. Raises ConfigError, without the key, for a variable that
    is asked for and not set, and for a value that is no key.
    """
    if variable is not None:
        return read_key(variable, option=_OPTION)
    if not address.is_private or not os.environ.get(DEFAULT_KEY_VARIABLE, "").strip():
        return None
    return read_key(DEFAULT_KEY_VARIABLE, option=_OPTION)
