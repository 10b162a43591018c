"""JSON over HTTP, one connection a request, with a deadline for the whole of it.

Consumes method, path and body; produces the decoded answer, or `RequestError` with a sentence that
says what happened. Nothing is tried twice here. Proxies of the surroundings are not used.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ragen_apo.files import parse_json
from ragen_apo.policy.api_keys import without_key
from ragen_apo.policy.hanging_up import hang_up

MAX_ANSWER_BYTES = 1 << 28
"""No answer that is of use is larger."""
_CHUNK_BYTES = 1 << 16


_LONGEST_CONNECT_SECONDS = 10.0
_PASSING = (404, 408, 409, 429)
"""Refusals that may pass: an adapter that a restarted server lacks, a timeout, too much at once."""

_UNKNOWN_ROUTE = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1 and, for policy.lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING="
    "True and --enable-lora; docs/server.md has the whole command and the version of vLLM"
)


class RequestError(Exception):
    """One attempt at a request failed; the message says what happened."""

    def __init__(
        self, message: str, *, advice: str = "", status: int | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.advice = advice or (
            "Look at the server's log; docs/server.md has the version and the options that it needs"
        )
        """What the user can do about it, if it happens again and again."""
        self.status = status
        """What the server answered, if it did."""
        self._is_final = is_final

    @property
    def is_refusal(self) -> bool:
        """Whether it is no use to ask again: the server understood and will not serve it."""
        if self._is_final:
            return True
        return self.status is not None and 400 <= self.status < 500 and self.status not in _PASSING

    @property
    def is_unknown_route(self) -> bool:
        """Whether the server does not know what was asked for."""
        return self.status == http.client.NOT_FOUND


class Request:
    """A request that another thread may break off."""

    def __init__(
        self,
        base_url: str,
        path: str,
        *,
        timeout_seconds: float,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        """GET without a body, POST with one. `path` begins with a slash.

        No error and no answer holds the key.
        """
        parts = urlsplit(base_url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        patience = min(timeout_seconds, _LONGEST_CONNECT_SECONDS)
        self._connection = kind(parts.hostname or "", parts.port, timeout=patience)
        self._path = parts.path.rstrip("/") + path
        self._body = None if body is None else json.dumps(body).encode()
        self._timeout_seconds, self._key = timeout_seconds, key
        self._socket: socket.socket | None = None
        self._is_broken_off = self._is_late = False

    def send(self) -> Any:
        """The decoded answer: a JSON value, or the text where the server sends none.

        Raises RequestError.
        """
        try:
            return self._exchange()
        except (OSError, http.client.HTTPException) as error:
            failure = self._failure(error)
        finally:
            self._connection.close()
        raise failure  # out here, without the error, which may hold what the server said

    def _failure(self, error: Exception) -> RequestError:
        if self._is_late or isinstance(error, TimeoutError):
            return RequestError(
                f"{self._path} had no whole answer within {self._timeout_seconds:g} seconds",
                advice="See whether the server hangs, and restart it if so; where it is only "
                "slow, raise rollouts.timeout_seconds or lower training.num_rows",
            )
        reason = without_key(str(error), self._key) or type(error).__name__
        return RequestError(
            f"{self._path}: the connection failed ({reason})",
            advice="Start the server (docs/server.md), or correct rollouts.base_url",
        )

    def _exchange(self) -> Any:
        deadline = time.monotonic() + self._timeout_seconds
        self._refuse_if_broken_off()
        self._connection.connect()
        self._socket = connected = self._connection.sock
        self._refuse_if_broken_off()
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        # A socket's own limit holds for each receive, and a server may send byte by byte.
        connected.settimeout(remaining)
        timer = threading.Timer(remaining, self._run_out)
        timer.daemon = True
        timer.start()
        try:
            return self._answer()
        finally:
            timer.cancel()

    def _answer(self) -> Any:
        headers = {"Accept": "application/json"}
        if self._body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        method = "GET" if self._body is None else "POST"
        self._connection.request(method, self._path, body=self._body, headers=headers)
        with self._connection.getresponse() as response:
            content = bytearray()
            # Newer Pythons close the response with its last byte.
            while not response.isclosed() and (chunk := response.read1(_CHUNK_BYTES)):
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise RequestError(f"{self._path} sends more than {MAX_ANSWER_BYTES:,} bytes")
            # What was cut off may look whole, where its length is not announced.
            self._refuse_if_broken_off()
            if self._is_late:
                raise TimeoutError
            if response.length:
                raise RequestError(f"{self._path}: {response.length} bytes of the answer lack")
            return self._decoded(response, bytes(content))

    def _refuse_if_broken_off(self) -> None:
        if self._is_broken_off:
            raise RequestError(f"{self._path} was broken off", is_final=True)

    def _decoded(self, response: http.client.HTTPResponse, content: bytes) -> Any:
        # Before anything of it is cut to length: half a key would not be found any more.
        content = without_key(content.decode("latin-1"), self._key).encode("latin-1")
        if response.status != http.client.OK:
            raise RequestError(
                f"{self._path} was answered with status {response.status}: {_reason(content)}",
                status=response.status,
                advice=self._advice(response.status),
            )
        if "json" not in response.headers.get("Content-Type", ""):
            return content.decode("utf-8", errors="replace")
        try:
            return parse_json(content)
        except ValueError as error:
            raise RequestError(f"{self._path}: the answer is not JSON ({error})") from error

    def _advice(self, status: int) -> str:
        if status == http.client.NOT_FOUND:
            return _UNKNOWN_ROUTE
        if status not in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            return ""
        if self._key is None:
            return (
                "The server wants a key, and none was sent: name the environment variable that "
                "holds it in rollouts.api_key_env"
            )
        return (
            "The server does not accept the key in the environment variable that "
            "rollouts.api_key_env names; put the one there that it was started with"
        )

    def break_off(self) -> None:
        """Ends the request from another thread; `send` fails there, and the server stops."""
        self._is_broken_off = True
        hang_up(self._socket)

    def _run_out(self) -> None:
        self._is_late = True
        hang_up(self._socket)


def _reason(content: bytes) -> str:
    """What an error answer says, in one line."""
    text = content.decode("utf-8", errors="replace")
    try:
        value = parse_json(content)
    except ValueError:
        value = None
    if isinstance(value, dict):
        found = value.get("error", value)
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    return " ".join(text.split())[:500] or "no reason given"
