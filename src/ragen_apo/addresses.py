"""Addresses of servers, as people write them, and the names of variables with their keys.

Nothing here repeats either of them: people paste keys there, and messages end up in logs.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def problem_with_variable_name(text: str) -> str | None:
    """Why no environment variable with a key can have this name, or None; most keys could not."""
    if _VARIABLE.fullmatch(text):
        return None
    return (
        "takes the name of an environment variable, got something else; if it was the key itself, "
        "make a new key and put that into a variable"
    )


def problem_with_address(url: str) -> str | None:
    """Why `url` cannot be the root of a server's API (what follows its name), or None if it can.

    It has to be `http(s)://host[:port][/path]`, without user, password, query and fragment.
    """
    if "@" in url:
        return "holds a user name or a password, which would stand in files and messages"
    if not (url.isascii() and url.isprintable() and " " not in url):
        return "holds spaces, control characters or letters that have to be escaped"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is no URL (its host or port cannot be read)"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "has no http:// or https:// and a host"
    if parts.query or parts.fragment:
        return "has a part after ? or #, where keys are written at times; leave it out"
    return None


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an IP address, is this machine for itself alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
