"""Ending a request from another thread than the one that waits for its answer."""

from __future__ import annotations

import contextlib
import socket


def hang_up(connected: socket.socket | None) -> None:
    """Ends a connection, if there is one: its thread reads no more, and the server stops."""
    if connected is not None:
        with contextlib.suppress(OSError):  # it has ended by itself
            # That of TLS would change what the thread that reads has in use.
            socket.socket.shutdown(connected, socket.SHUT_RDWR)
