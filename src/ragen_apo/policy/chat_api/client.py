"""One question to a server with an OpenAI-compatible API, asked until it is answered.

    messages -> POST BASE/chat/completions -> [failed: wait, again] -> Answer

Temporary failures (429, 5xx, a cut connection, no answer in time) are tried again. The pauses grow
exponentially, with jitter so that many clients do not return at once, and are at least as long as
the server's `Retry-After`. Permanent failures (a wrong key, an unknown model) end in one ApiError.
No error contains the exception of the HTTP library, because its request has the key.
"""

from __future__ import annotations

import email.utils
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import httpx2
import numpy as np

from ragen_apo.errors import ApiError, ConfigError
from ragen_apo.policy.api_keys import without_key
from ragen_apo.policy.chat_api.address import Address
from ragen_apo.policy.chat_api.answer import Answer, Complaint, read_answer, read_complaint
from ragen_apo.policy.http_exchange import Exchange, http_client
from ragen_apo.printable import printable, shortened

Message = Mapping[str, Any]
"""`role` (system, user, assistant, tool) and `content`; an assistant's may have `tool_calls`, and a
tool's the `tool_call_id` that it answers."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as `Tool.schema` writes them."""

MAX_CONNECT_SECONDS = 20.0
MAX_ANSWER_BYTES = 1 << 25
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, *range(520, 530)})
"""Statuses after which the same request may succeed."""
_TOO_MUCH_AT_ONCE = frozenset({429, 503, 529})
"""Some say "too many tokens" there, and mean a minute's and not a context's."""
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
"""The limit of an answer's tokens: as most servers call it, and as newer models of OpenAI want."""


class ContextFullError(ApiError):
    """The conversation, with the longest answer, does not fit into the model's context."""


@dataclass(frozen=True)
class Retries:
    """How long a question is asked again."""

    max_attempts: int = 8
    """With their pauses, enough to outlast a server's limit of requests a minute."""
    first_seconds: float = 1.0
    """The longest pause after the first failure; it doubles with each one."""
    longest_seconds: float = 60.0
    max_retry_after_seconds: float = 300.0
    """A server that asks for a longer pause ends the evaluation, which can go on later."""

    def pause(self, attempt: int, *, retry_after: float, draws: np.random.Generator) -> float:
        """Seconds before the next attempt; `attempt` counts the failed ones from 0."""
        longest = min(self.longest_seconds, self.first_seconds * 2**attempt)
        return retry_after + longest * (0.5 + 0.5 * draws.random())


@dataclass(frozen=True)
class Sampling:
    """What every question asks of the model."""

    model: str
    temperature: float
    max_tokens: int
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the request; none of those that are set here."""


@dataclass(frozen=True)
class _Failure:
    """An attempt without an answer."""

    sentence: str
    passes: bool = False
    retry_after: float = 0.0
    context_full: bool = False
    wants_other_limit: bool = False


class ChatClient:
    """Asks one server for answers of one model; threads may share it. A context manager."""

    def __init__(
        self,
        address: Address,
        sampling: Sampling,
        *,
        key: str | None = None,
        timeout_seconds: float = 300.0,
        retries: Retries | None = None,
    ) -> None:
        self._address, self._sampling, self._key = address, sampling, key
        self._timeout_seconds, self._retries = timeout_seconds, retries or Retries()
        self._limit_name, self._has_answered = _LIMIT_NAMES[0], False
        self._stopped = threading.Event()
        try:
            self._http = http_client(
                seconds=timeout_seconds,
                connect_seconds=MAX_CONNECT_SECONDS,
                key=key,
                trust_env=not address.is_local,  # a proxy does not reach this machine
            )
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
            raise _unusable_variables(error) from None  # it may quote a password

    def answer(
        self, messages: Sequence[Message], *, draws: np.random.Generator, tools: Tools = ()
    ) -> Answer:
        """The model's answer, which may call the functions whose schemas are in `tools`.

        `draws` spread the pauses of clients that fail together. Raises ContextFullError, or
        ApiError for what no other attempt mends.
        """
        num_failures = 0
        while True:
            limit_name = self._limit_name
            found = self._attempt(messages, limit_name, tools)
            if isinstance(found, Answer):
                self._has_answered = True
                return found
            if found.wants_other_limit and limit_name == _LIMIT_NAMES[0]:
                self._limit_name = _LIMIT_NAMES[1]
                continue
            num_failures += 1
            if found.context_full:
                raise ContextFullError(found.sentence)
            if not found.passes:
                raise ApiError(found.sentence)
            if num_failures == self._retries.max_attempts:
                raise ApiError(
                    f"{found.sentence} Attempts made: {num_failures}. Give the same command again "
                    "when the server is well; what was answered is kept"
                )
            self._pause(found, num_failures - 1, draws)

    def stop(self) -> None:
        """Ends pauses and further attempts; answers under way still come."""
        self._stopped.set()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._http.close()

    def _pause(self, failure: _Failure, attempt: int, draws: np.random.Generator) -> None:
        if failure.retry_after > self._retries.max_retry_after_seconds:
            raise ApiError(
                f"{failure.sentence} It asks to wait {failure.retry_after:.0f} s. Give the same "
                "command again then; what was answered is kept"
            )
        seconds = self._retries.pause(attempt, retry_after=failure.retry_after, draws=draws)
        if self._stopped.wait(seconds):
            raise ApiError(f"{failure.sentence} No other attempt was made: the evaluation ended.")

    def _attempt(
        self, messages: Sequence[Message], limit_name: str, tools: Tools
    ) -> Answer | _Failure:
        body = {
            **self._sampling.extra_body,
            "model": self._sampling.model,
            "messages": [dict(message) for message in messages],
            "temperature": self._sampling.temperature,
            limit_name: self._sampling.max_tokens,
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        server = self._address.server
        exchange = Exchange(
            self._http, seconds=self._timeout_seconds, max_bytes=MAX_ANSWER_BYTES, key=self._key
        )
        try:
            url, content = self._address.chat_url, json.dumps(body).encode()
            response, received = exchange.send("POST", url, content)
        except httpx2.ConnectTimeout:
            limit = min(self._timeout_seconds, MAX_CONNECT_SECONDS)
            sentence = f"{server} cannot be reached (no connection within {limit:g} s)."
            return _Failure(sentence, passes=self._has_answered)
        except httpx2.TimeoutException:
            limit = self._timeout_seconds
            sentence = f"{server} gave no whole answer within {limit:g} s (--timeout)."
            return _Failure(sentence, passes=True)
        except (httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol) as error:
            sentence = f"{server} cannot be reached ({self._told(error)}). Is the server running?"
            return _Failure(sentence, passes=self._has_answered)
        except httpx2.HTTPError as error:
            sentence = f"{server} broke the connection off ({self._told(error)})."
            return _Failure(sentence, passes=True)
        status, headers = response.status_code, response.headers
        text = received.decode(errors="replace")
        if status != httpx2.codes.OK:
            return self._failure(status, headers, read_complaint(text))
        try:
            answer = read_answer(text)
        except ValueError as error:
            is_page = text.lstrip().startswith("<") or "text/html" in headers.get(
                "content-type", ""
            )
            reason = "it is a page for browsers" if is_page else self._without_key(str(error))
            return _Failure(
                f"{server} sent what is no chat completion: {reason}. Is --base-url that of an "
                "OpenAI-compatible API?",
                passes=self._has_answered or not is_page,
            )
        if isinstance(answer, Complaint):
            status = int(answer.code) if answer.code.isdecimal() else answer.status
            return self._failure(status, headers, answer)
        return answer

    def _failure(self, status: int, headers: Mapping[str, str], complaint: Complaint) -> _Failure:
        server, model = self._address.server, self._sampling.model
        message = self._without_key(complaint.message)
        said = f"{status}: {message}" if message else str(status)
        if status in (401, 403):
            or_else = ", or refuses what it was asked" if status == 403 else ""
            return _Failure(
                f"{server} does not accept the key{or_else} ({said}). The key is that in the "
                "environment variable OPENAI_API_KEY, or in the one that --api-key-env names."
                if self._key is not None
                else f"{server} wants a key{or_else} ({said}), and none was sent. Export "
                "OPENAI_API_KEY, or name another variable with --api-key-env (over plain http to "
                "another machine, always name it)."
            )
        if complaint.context_full and status not in _TOO_MUCH_AT_ONCE:
            return _Failure(f"{server}: {model} has no room ({said}).", context_full=True)
        if complaint.code == "insufficient_quota" or status == 402:
            return _Failure(
                f"the account at {server} has no money or quota left ({said}). Give the same "
                "command again when it has; what was answered is kept."
            )
        if status == 404:
            return _Failure(
                f"{server} knows no model {model!r}, or has no chat completions at this address "
                f"({said}). Check --api-model, and --base-url, which mostly ends in /v1."
            )
        if 300 <= status < 400:
            return _Failure(
                f"{server} redirects to another address ({status}), where no key is sent unasked; "
                "give that address as --base-url."
            )
        passes = status in PASSING
        verdict = "has no answer now" if passes else "refuses the request"
        return _Failure(
            f"{server} {verdict} ({said}).",
            passes=passes,
            retry_after=_retry_after(headers) if status in _TOO_MUCH_AT_ONCE else 0.0,
            wants_other_limit=_LIMIT_NAMES[1] in complaint.message,
        )

    def _told(self, error: Exception) -> str:
        text = self._without_key(" ".join(str(error).split())) or type(error).__name__
        return shortened(printable(text), 200)

    def _without_key(self, text: str) -> str:
        return without_key(text, self._key)


def _unusable_variables(error: Exception) -> ConfigError:
    """What to correct where the HTTP library cannot use what the environment tells it."""
    names = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY")
    why = "expected a proxy such as http://host:3128; NO_PROXY names hosts that need none"
    if isinstance(error, ImportError):
        why = "SOCKS proxies need `pip install socksio`; NO_PROXY names hosts that need none"
    elif isinstance(error, OSError):
        names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
        why = "it has to name certificates that are there"
    there = [name for name in (*names, *map(str.lower, names)) if name in os.environ]
    return ConfigError(
        f"the environment variable {' or '.join(there or names)} cannot be used: {why}. Correct or "
        "unset it"
    )


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds in `Retry-After`, given as such or as a date; 0 if it is absent or unreadable."""
    value: Any = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value)
    return seconds if 0 <= seconds < float("inf") else 0.0


def _seconds_until(date: str) -> float:
    try:
        moment = email.utils.parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - datetime.now(timezone.utc)).total_seconds()
