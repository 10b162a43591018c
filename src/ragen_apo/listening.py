"""Servers of this package: where they listen, who may connect, and how they end.

By default a server answers only this machine, and no page of another site. It recognises such a
page in two ways. If the page's name was made to point here (DNS rebinding), `Host` has the page's
name. If the page tries to change anything, `Origin` has it. A server that other machines can reach
asks for a token.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ragen_apo.addresses import is_loopback
from ragen_apo.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")
NUM_TOKEN_BYTES = 24


def names_instead_of(host_header: str, *, host: str, token: str | None) -> str:
    """What a server at `host` is called, where a header `Host` calls it something else.

    Empty where it may say that: anything with a token, without which nobody gets anything.
    """
    names = {host, *LOOPBACK_NAMES}
    try:
        is_right = token is not None or urlsplit(f"//{host_header}").hostname in names
    except ValueError:
        is_right = False
    return "" if is_right else ", ".join(sorted(names))


def is_own_origin(origin: str, host_header: str | None) -> bool:
    """Whether a header `Origin` names the server that `Host` names."""
    try:
        return urlsplit(origin).netloc == host_header
    except ValueError:
        return False


def is_secret(given: str, secret: str) -> bool:
    """Whether they are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code in errno.errorcode else str(error)
        raise ConfigError(
            f"cannot listen on {in_address(host)}:{port}: {reason}. Give another --port (0 takes a "
            "free one), or as --host an address of this machine"
        ) from error


def answer_until_interrupted(
    make_app: Callable[[str | None], ASGIApp],
    *,
    host: str,
    port: int,
    announce: Callable[[int, str | None], None],
    **options: Any,
) -> None:
    """Answers until Ctrl-C; port 0 takes a free one.

    `make_app` gets a fresh token where others than this machine can connect, None elsewhere;
    `announce` gets the port once it is listened on, and the token. `options` are uvicorn's. Raises
    ConfigError where the address cannot be had.
    """
    import uvicorn

    token = None if is_loopback(host) else secrets.token_urlsafe(NUM_TOKEN_BYTES)
    app = make_app(token)
    with _listening(host, port) as listener:
        announce(listener.getsockname()[1], token)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            **options,
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def in_address(host: str) -> str:
    """The host as an address has it."""
    return f"[{host}]" if ":" in host else host
