"""What is asked of a server: JSON over HTTP, one connection a request (`policy.http_exchange`).

Consumes path and body; produces the decoded answer, or `RequestError` with a sentence that says
what happened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx2

from ragen_apo.files import parse_json
from ragen_apo.policy.api_keys import without_key
from ragen_apo.policy.http_exchange import BrokenOffError, Exchange, TooLargeError

MAX_ANSWER_BYTES = 1 << 28
"""No answer that is of use is larger."""
_PASSING = (404, 408, 409, 429)
"""Refusals that may pass: an adapter that a restarted server lacks, a timeout, too much at once."""

_UNKNOWN_ROUTE = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1 and, for policy.lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING="
    "True and --enable-lora; docs/server.md has the whole command and the version of vLLM"
)


class RequestError(Exception):
    """One attempt at a request failed; the message says what happened."""

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        status: int | None = None,
        is_late: bool = False,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.advice = advice or (
            "Look at the server's log; docs/server.md has the version and the options that it needs"
        )
        """What the user can do about it, if it happens again and again."""
        self.status = status
        """What the server answered, if it did."""
        self.is_late = is_late
        """Whether the server hangs: another attempt would take as long."""
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
        return self.status == httpx2.codes.NOT_FOUND


class Request:
    """A request that another thread may break off."""

    def __init__(
        self,
        client: httpx2.Client,
        path: str,
        *,
        timeout_seconds: float,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        """GET without a body, POST with one; `path` is what follows the client's `base_url`.

        No error and no answer holds the key.
        """
        self._path, self._timeout_seconds, self._key = path, timeout_seconds, key
        self._body = None if body is None else json.dumps(body).encode()
        self._exchange = Exchange(
            client, seconds=timeout_seconds, max_bytes=MAX_ANSWER_BYTES, key=key
        )

    def send(self) -> Any:
        """The decoded answer: a JSON value, or the text where the server sends none.

        Raises RequestError.
        """
        method = "GET" if self._body is None else "POST"
        try:
            response, content = self._exchange.send(method, self._path, self._body)
        except httpx2.HTTPError as error:
            failure = self._failure(error)
        else:
            return self._decoded(response, content)
        raise failure  # out here, without the error, which may hold what the server said

    def break_off(self) -> None:
        """Ends the request from another thread; `send` fails there, and the server stops."""
        self._exchange.break_off()

    def _failure(self, error: Exception) -> RequestError:
        if isinstance(error, BrokenOffError):
            return RequestError(f"{self._path} was broken off", is_final=True)
        if isinstance(error, TooLargeError):
            return RequestError(f"{self._path} sends more than {MAX_ANSWER_BYTES:,} bytes")
        if isinstance(error, httpx2.TimeoutException):
            return RequestError(
                f"{self._path} had no whole answer within {self._timeout_seconds:g} seconds",
                is_late=True,
                advice="See whether the server hangs, and restart it if so; where it is only "
                "slow, raise rollouts.timeout_seconds or lower training.num_rows",
            )
        reason = without_key(str(error), self._key) or type(error).__name__
        return RequestError(
            f"{self._path}: the connection failed ({reason})",
            advice="Start the server (docs/server.md), or correct rollouts.base_url",
        )

    def _decoded(self, response: httpx2.Response, content: bytes) -> Any:
        status, text = response.status_code, content.decode("utf-8", errors="replace")
        if status != httpx2.codes.OK:
            raise RequestError(
                f"{self._path} was answered with status {status}: {_reason(text)}",
                status=status,
                advice=self._advice(status),
            )
        if "json" not in response.headers.get("Content-Type", ""):
            return text
        try:
            return parse_json(content.decode())
        except ValueError as error:
            raise RequestError(f"{self._path}: the answer is not JSON ({error})") from error

    def _advice(self, status: int) -> str:
        if status == httpx2.codes.NOT_FOUND:
            return _UNKNOWN_ROUTE
        if status not in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
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


def _reason(text: str) -> str:
    """What an error answer says, in one line."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        found = value.get("error", value)
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    return " ".join(text.split())[:500] or "no reason given"
