"""One question to a real server on this machine: what is sent, tried again, and final."""

from __future__ import annotations

import contextlib
import email.utils
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from ragen_apo.errors import ApiError, ConfigError
from ragen_apo.policy.chat_api.address import Address
from ragen_apo.policy.chat_api.answer import Answer
from ragen_apo.policy.chat_api.client import ChatClient, ContextFullError, Retries, Sampling
from tests.chat_server import (
    ChatServer,
    Fault,
    completion,
    cuts,
    refuses,
    says,
    sends,
    serving,
    stalls,
    trickles,
)

MESSAGES = ({"role": "user", "content": "TASK: find a café"},)
QUICK = Retries(max_attempts=4, first_seconds=0.01, longest_seconds=0.05)
KEY = "sk-very-secret-0123456789"
EMPTY_GZIP = b"\x1f\x8b\x08\0\0\0\0\0\0\x03"
"""Its header."""


def ask(server: ChatServer, *, timeout_seconds: float = 20.0, retries: Retries = QUICK) -> Answer:
    sampling = Sampling("tiny", 0.0, 64)
    address = Address(server.url)
    with ChatClient(
        address, sampling, key=KEY, timeout_seconds=timeout_seconds, retries=retries
    ) as client:
        return client.answer(MESSAGES, draws=np.random.default_rng(0))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and all that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def refused(*faults: Fault, num_requests: int, **options: Any) -> str:
    """The message of the error that these faults end in; nothing of it holds the key."""
    with serving(says("calm"), *faults) as server, pytest.raises(ApiError) as caught:
        ask(server, **options)
    assert len(server.requests) == num_requests
    for error in chain(caught.value):
        assert isinstance(error, ApiError)
        assert KEY not in f"{error!r} {vars(error)!r}"
    return str(caught.value)


def test_a_question_has_model_messages_temperature_and_limit() -> None:
    with serving(says("calm")) as server:
        ask(server)
    assert server.requests == [
        {"model": "tiny", "messages": list(MESSAGES), "temperature": 0.0, "max_tokens": 64}
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ALL_PROXY", "socks5://me:hidden@127.0.0.1:1080", "pip install socksio"),
        ("https_proxy", "ftp://me:hidden@host", "expected a proxy such as http://host:3128"),
        ("HTTPS_PROXY", "http://me:hid/den@host", "expected a proxy such as http://host:3128"),
        ("SSL_CERT_FILE", "/not/there.pem", "name certificates that are there"),
    ],
)
def test_what_the_environment_says_wrongly_of_the_network_is_named(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words) as caught:
        ChatClient(Address("https://api.example/v1"), Sampling("tiny", 0.0, 64))
    assert variable in str(caught.value)
    assert "hid" not in str(caught.value)
    ChatClient(Address("http://127.0.0.1:9/v1"), Sampling("tiny", 0.0, 64))  # asks no proxy


def test_an_answer_has_its_text_and_what_it_cost() -> None:
    with serving(says("calm")) as server:
        answer = ask(server)
    assert (answer.content, answer.finish_reason) == ("calm", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)


@pytest.mark.parametrize(
    "fault",
    [
        refuses(429, "slow down"),
        refuses(500, "oops"),
        refuses(503, "loading"),
        sends("<html>bad gateway</html>", status=502),
        *(sends("", status=status) for status in (521, 523, 525)),
        sends('{"choices": [{"mess'),
        sends({"error": {"message": "upstream is busy", "code": 429}}),
        sends({"error": {"message": "upstream is busy", "type": "overloaded"}, "choices": []}),
        refuses(429, "Too many tokens, please wait before trying again."),
        sends({"choices": [{"finish_reason": "error", "message": {"content": ""}}]}),
        sends({"choices": [{"error": {"message": "provider", "code": 502}, "message": {}}]}),
        cuts,
    ],
    ids=[
        *("429", "500", "503", "502 html", "521", "523", "525", "half JSON"),
        *("429 inside a 200", "an error without a code inside a 200"),
        *("429 of tokens a minute", "a failure inside a choice", "its error", "cut connection"),
    ],
)
def test_what_passes_is_asked_again(fault: Fault) -> None:
    with serving(says("calm"), fault, fault) as server:
        assert ask(server).content == "calm"
    assert len(server.requests) == 3


def test_an_answer_that_does_not_come_in_time_is_asked_for_again() -> None:
    with serving(says("calm"), stalls(1.0)) as server:
        assert ask(server, timeout_seconds=0.2).content == "calm"
    assert len(server.requests) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-Patience: please\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
        # An empty piece of gzip: the HTTP library has nothing to hand over.
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + EMPTY_GZIP, b"\0\0\0\xff\xff"),
        # No length is announced: the end of the connection would pass for that of the answer.
        (b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(completion("half")).encode(), b" "),
    ],
    ids=["headers", "announcements", "body", "nothing, compressed", "body without a length"],
)
def test_the_time_limit_is_for_all_of_an_answer_that_comes_piece_by_piece(
    start: bytes, piece: bytes
) -> None:
    """A limit of 0.5 s, and 40 pieces with 0.2 s between two of them."""
    sent: list[bytes] = []
    slow = trickles(start, *[piece] * 40, seconds=0.2, sent=sent)
    message = refused(slow, num_requests=1, timeout_seconds=0.5, retries=Retries(max_attempts=1))
    assert "gave no whole answer within 0.5 s (--timeout)" in message
    assert len(sent) < 40, "it hangs up on a server that has not come to its end"


def test_a_server_that_never_recovers_ends_in_one_error() -> None:
    message = refused(*[refuses(500, "oops")] * 4, num_requests=4)
    assert "has no answer now (500: oops)" in message
    assert "Attempts made: 4. Give the same command again" in message


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_waited_for(status: int) -> None:
    with serving(says("calm"), refuses(status, Retry_After="0.4")) as server:
        ask(server)
    assert server.times[1] - server.times[0] >= 0.4


@pytest.mark.slow
def test_retry_after_as_a_date_is_waited_for() -> None:
    # Whole seconds: two at least, of which the server may take a part to start.
    date = email.utils.formatdate(time.time() + 3, usegmt=True)
    with serving(says("calm"), refuses(429, Retry_After=date)) as server:
        ask(server)
    assert server.times[1] - server.times[0] >= 0.9


@pytest.mark.parametrize(
    "value", ["soon", "-5", "nan", "inf", "Mon, 01 Jan 99999999999999 00:00:00 GMT"]
)
def test_an_unreadable_retry_after_is_left_to_the_backoff(value: str) -> None:
    with serving(says("calm"), refuses(429, Retry_After=value)) as server:
        assert ask(server).content == "calm"


def test_a_server_that_asks_to_wait_for_an_hour_ends_the_evaluation() -> None:
    message = refused(refuses(429, "daily limit", Retry_After="3600"), num_requests=1)
    assert "asks to wait 3600 s" in message
    assert "what was answered is kept" in message


def test_pauses_double_up_to_the_longest_and_are_spread_over_their_upper_half() -> None:
    """1, 2, 4, 8, then 10 s at most; none less than half of it."""
    retries, draws = Retries(first_seconds=1.0, longest_seconds=10.0), np.random.default_rng(0)
    for attempt, longest in enumerate([1.0, 2.0, 4.0, 8.0, 10.0, 10.0]):
        pauses = [retries.pause(attempt, retry_after=0.0, draws=draws) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    assert retries.pause(0, retry_after=30.0, draws=draws) >= 30.5


def test_the_pauses_outlast_a_limit_of_requests_a_minute() -> None:
    """Of all attempts, also where each pause is the shortest that may be drawn."""
    retries, draws = Retries(), MagicMock(random=lambda: 0.0)
    pauses = [
        retries.pause(attempt, retry_after=0.0, draws=draws)
        for attempt in range(retries.max_attempts - 1)
    ]
    assert sum(pauses) > 60.0  # 0.5 + 1 + 2 + 4 + 8 + 16 + 30 = 61.5


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (refuses(401, f"Incorrect API key provided: {KEY}"), "does not accept the key"),
        (refuses(403, "no access"), "the key, or refuses what it was asked (403: no access)"),
        (refuses(404, "no such model"), "knows no model 'tiny'"),
        (refuses(400, "temperature must be 1"), "(400: temperature must be 1)"),
        (refuses(400, "unknown field context_window"), "refuses the request (400: unknown field"),
        (refuses(429, "pay first", code="insufficient_quota"), "has no money or quota left"),
        (sends("", status=307, Location="http://127.0.0.1:1/"), "redirects to another address"),
    ],
    ids=["401", "403", "404", "400", "a field of that name", "no quota", "redirect"],
)
def test_what_stays_ends_in_an_error_after_one_request(fault: Fault, part: str) -> None:
    assert part in refused(fault, num_requests=1)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("hello", "no chat completion: Expecting value"),
        ({"choices": []}, "it has no choices"),
        ({"choices": [{"text": "a"}]}, "its first choice has no message"),
        ({"choices": [{"message": {"content": 5}}]}, "its message is int, expected text"),
        ([1], "a JSON object was expected, got list"),
    ],
)
def test_what_is_no_chat_completion_ends_in_an_error_that_says_why(body: object, part: str) -> None:
    message = refused(*[sends(body)] * 4, num_requests=4)
    assert part in message
    assert "OpenAI-compatible" in message


@pytest.mark.parametrize(
    "fault",
    [sends("\n<!doctype html><p>hello"), sends("hello", Content_Type="text/html; charset=utf-8")],
)
def test_a_page_for_browsers_is_final_unless_the_server_has_answered_before(fault: Fault) -> None:
    message = refused(fault, num_requests=1)
    assert "it is a page for browsers" in message
    assert "OpenAI-compatible" in message
    with serving(says("yes"), None, fault) as server:
        settings = Sampling("tiny", temperature=0.0, max_tokens=9)
        with ChatClient(Address(server.url), settings, retries=QUICK) as client:
            for _ in range(2):
                assert client.answer(MESSAGES, draws=np.random.default_rng(0)).content == "yes"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "fault",
    [
        refuses(400, "This model's maximum context length is 2048 tokens. However, ..."),
        refuses(400, "too much", code="context_length_exceeded"),
        refuses(413, "prompt is too long: 9000 tokens > 8192 maximum"),
        refuses(400, "request (9000 tokens) exceeds the available context size (4096 tokens)"),
        refuses(400, "The input (9000 tokens) is longer than the model's context length (4096)."),
        refuses(400, "the prompt is longer than the limit; see `max_model_len`"),
    ],
)
def test_a_full_context_is_an_error_of_its_own(fault: Fault) -> None:
    with serving(says("calm"), fault) as server, pytest.raises(ContextFullError):
        ask(server)
    assert len(server.requests) == 1


def test_a_model_that_wants_its_limit_under_another_name_gets_it() -> None:
    fault = refuses(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead")
    with serving(says("calm"), fault) as server:
        assert ask(server).content == "calm"
    first, second = server.requests
    assert first["max_tokens"] == second["max_completion_tokens"] == 64
    assert "max_tokens" not in second


def test_a_server_that_is_not_there_is_named_at_once() -> None:
    with serving(says("calm")) as server:
        pass
    with pytest.raises(ApiError, match=r"127\.0\.0\.1:\d+ cannot be reached .*Is the server"):
        ask(server, retries=Retries(first_seconds=60.0))


def test_a_server_that_takes_no_connection_is_named_with_the_limit_that_held() -> None:
    """Its queue is full: nobody accepts, and one connection waits already."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as busy, contextlib.ExitStack() as held:
        port = busy.getsockname()[1]
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        server = MagicMock(url=f"http://127.0.0.1:{port}/v1")
        with pytest.raises(ApiError, match=r"cannot be reached \(no connection within 0\.3 s\)"):
            ask(server, timeout_seconds=0.3)


def test_a_key_that_a_server_repeats_is_taken_out_also_where_the_message_is_cut() -> None:
    long = "x" * 290 + KEY
    message = refused(refuses(401, long), num_requests=1)
    assert "sk-very" not in message


def test_a_key_that_a_server_repeats_does_not_reach_an_answer() -> None:
    with serving(says(f"my key is {KEY}")) as server:
        assert ask(server).content == "my key is [the key]"


@pytest.mark.parametrize("written", ["\\/", "\\\\/", "\\u002f", "\\u002F"])
def test_a_key_that_a_server_writes_with_escapes_does_not_reach_an_answer(written: str) -> None:
    key = "sk-proj/very-secret"
    body = json.dumps(completion(f"my key is {key}")).replace("/", written)
    sampling = Sampling("tiny", 0.0, 64)
    with (
        serving(says("calm"), sends(body)) as server,
        ChatClient(Address(server.url), sampling, key=key, retries=QUICK) as client,
    ):
        answer = client.answer(MESSAGES, draws=np.random.default_rng(0))
    assert answer.content == "my key is [the key]"


def test_a_client_that_is_stopped_makes_no_other_attempt() -> None:
    sampling, slow = Sampling("tiny", 0.0, 64), Retries(first_seconds=60.0)
    with (
        serving(says("calm"), refuses(500, "oops")) as server,
        ChatClient(Address(server.url), sampling, retries=slow) as client,
    ):
        client.stop()
        with pytest.raises(ApiError, match="No other attempt was made"):
            client.answer(MESSAGES, draws=np.random.default_rng(0))
    assert len(server.requests) == 1
