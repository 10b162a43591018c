"""One time limit for a whole request, whichever part of it the server draws out.

The limits of the HTTP library hold for each receive, and a server may send its headers or its
answer byte by byte.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

from ragen_apo.policy.hanging_up import hang_up


class Deadline:
    """Hangs the connection of one request up when its time is over; a context manager.

    The request gets `note` as its extension `trace` and a connection of its own.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Keeps the socket of a new connection; that of TLS takes the place of the one below it."""
        stream = info.get("return_value")
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")) and stream is not None:
            self._socket = stream.get_extra_info("socket")
            if self.is_over:
                hang_up(self._socket)

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.is_over = True
        hang_up(self._socket)
