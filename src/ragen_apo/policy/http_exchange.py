"""One request over HTTP with one time limit for its exchange, which another thread may end.

    Exchange(client, seconds=300, max_bytes=1 << 25).send("POST", url, content)

The limits of the HTTP library hold for each receive, and a server may send its headers or its
answer byte by byte. So the connection is hung up when the time is over. Until there is one, only
the client's `connect_seconds` hold, for each address of the host. Nothing is tried twice.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

import httpx2

from ragen_apo.policy.api_keys import without_key


class BrokenOffError(httpx2.HTTPError):
    """Another thread ended the request."""


class TooLargeError(httpx2.HTTPError):
    """The body is larger than any that is of use."""


def http_client(
    *, seconds: float, connect_seconds: float, key: str | None, **options: Any
) -> httpx2.Client:
    """A client for exchanges of JSON that take at most `seconds`; threads may share it.

    No connection is kept: each exchange ends its own.
    """
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(
        headers={"Content-Type": "application/json", **authorization},
        timeout=httpx2.Timeout(seconds, connect=min(seconds, connect_seconds)),
        limits=httpx2.Limits(max_keepalive_connections=0),
        follow_redirects=False,
        **options,
    )


class Exchange:
    """One request and its answer."""

    def __init__(
        self, client: httpx2.Client, *, seconds: float, max_bytes: int, key: str | None
    ) -> None:
        self._client, self._seconds = client, seconds
        self._max_bytes, self._key = max_bytes, key
        self._socket: socket.socket | None = None
        self._ended_by: httpx2.HTTPError | None = None

    def send(self, method: str, url: str, content: bytes | None) -> tuple[httpx2.Response, bytes]:
        """The answer of the server: its head, and its body without the key.

        Raises httpx2.HTTPError: ReadTimeout when the time is over, BrokenOffError after
        `break_off`, TooLargeError for more than `max_bytes`. The server may have put the key into
        the error.
        """
        late = httpx2.ReadTimeout("the answer came too slowly")
        timer = threading.Timer(self._seconds, self._end, [late])
        timer.daemon = True
        timer.start()
        try:
            self._raise_if_ended()
            received = self._receive(method, url, content)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            if isinstance(self._ended_by, BrokenOffError):
                self._raise_if_ended()
            raise  # there was nothing to hang up
        except httpx2.HTTPError:
            self._raise_if_ended()
            raise
        finally:
            timer.cancel()
        self._raise_if_ended()  # what was cut off may look whole
        return received

    def break_off(self) -> None:
        """Ends the request from another thread, also one that is not sent yet."""
        self._end(BrokenOffError("it was broken off"))

    def _receive(
        self, method: str, url: str, content: bytes | None
    ) -> tuple[httpx2.Response, bytes]:
        body, traced = bytearray(), {"trace": self._note}
        with self._client.stream(method, url, content=content, extensions=traced) as response:
            for part in response.iter_bytes():
                body += part
                if len(body) > self._max_bytes:
                    raise TooLargeError(f"an answer of more than {self._max_bytes:,} bytes")
        # Before anything of it is cut to length: half a key would not be found any more.
        text = without_key(body.decode(errors="surrogateescape"), self._key)
        return response, text.encode(errors="surrogateescape")

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        """Keeps the socket of a new connection; that of TLS takes the place of the one below it."""
        stream = info.get("return_value")
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")) and stream is not None:
            self._socket = stream.get_extra_info("socket")
            if self._ended_by:
                self._hang_up()

    def _end(self, reason: httpx2.HTTPError) -> None:
        self._ended_by = self._ended_by or reason
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                # That of TLS would change what the thread that reads has in use.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _raise_if_ended(self) -> None:
        if self._ended_by:
            raise self._ended_by from None
