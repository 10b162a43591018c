"""One request to a server, as the engine sends it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ragen_apo.policy.inference_server.vllm import VllmServer
from ragen_apo.policy.inference_server.wire import Request, RequestError

ANSWER = b'{"rows": [1, 2]}'


def request(url: str, *, seconds: float) -> Request:
    return VllmServer(url, timeout_seconds=seconds).request("/x")


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture(params=["HTTP/1.0", "HTTP/1.1"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that closes the connection after its answer, or keeps it."""
    monkeypatch.setattr(_Handler, "protocol_version", request.param)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_answer_is_whole_when_its_connection_ends_with_the_last_byte(address: str) -> None:
    assert request(address, seconds=5).send() == {"rows": [1, 2]}


@contextlib.contextmanager
def dripping(*pieces: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends its answer piece by piece, in 5 seconds; and the pieces sent so far."""
    sent: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for index, piece in enumerate(pieces):
                time.sleep(5 / len(pieces) if index else 0)
                connection.sendall(piece)
                sent.append(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
        thread.join()


STATUS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
HEADERS = [b"X-%d: 1\r\n" % number for number in range(50)]
DIGITS = [b"1"] * 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "pieces",
    [
        [STATUS, *HEADERS, b"Content-Length: 2\r\n\r\n{}"],
        [b"HTTP/1.1 200 " + b"O" * 10, *[b"K"] * 50, b"\r\nContent-Length: 0\r\n\r\n"],
        [STATUS, b"Content-Length: 50\r\n\r\n", *DIGITS],
        [STATUS, b"\r\n", *DIGITS],
        [STATUS, b"Transfer-Encoding: chunked\r\n\r\n", *[b"0"] * 50, b"\r\n\r\n"],
    ],
    ids=["headers", "status", "body", "body without length", "length of a chunk"],
)
def test_the_time_limit_is_for_all_of_an_answer_that_comes_piece_by_piece(
    pieces: list[bytes],
) -> None:
    late = r"/x had no whole answer within 0\.5 seconds"
    with dripping(*pieces) as (url, sent), pytest.raises(RequestError, match=late):
        request(url, seconds=0.5).send()
    assert len(sent) < len(pieces), "it hangs up on a server that has not come to its end"


def test_an_answer_that_is_broken_off_within_its_headers_is_no_answer() -> None:
    with dripping(STATUS, *HEADERS) as (url, _):
        slow = request(url, seconds=20)
        threading.Timer(0.3, slow.break_off).start()
        with pytest.raises(RequestError, match="/x was broken off") as caught:
            slow.send()
    assert caught.value.is_refusal, "nobody asks again"


def test_an_answer_with_less_than_was_announced_is_no_answer() -> None:
    cut = STATUS + b"Content-Length: 50\r\n\r\n{}"
    failed = pytest.raises(RequestError, match="/x: the connection failed")
    with dripping(cut) as (url, _), failed as caught:
        request(url, seconds=20).send()
    assert not caught.value.is_refusal, "the server may answer the next time"


def test_an_answer_that_is_no_utf8_is_no_json() -> None:
    wrong = STATUS + b'Content-Length: 11\r\n\r\n{"a": "\xff"} '
    with dripping(wrong) as (url, _), pytest.raises(RequestError, match="the answer is not JSON"):
        request(url, seconds=20).send()
