"""One request to a server, as the engine sends it."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ragen_apo.policy.inference_server.wire import Request

ANSWER = b'{"rows": [1, 2]}'


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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_answer_is_whole_when_its_connection_ends_with_the_last_byte(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is since Python 3.11.8 and 3.12.2 (gh-113199), with whatever Python runs this test."""
    read1 = http.client.HTTPResponse.read1

    def closing(self: http.client.HTTPResponse, n: int = -1) -> bytes:
        content = read1(self, n)
        if self.length == 0:
            self.close()
        return content

    monkeypatch.setattr(http.client.HTTPResponse, "read1", closing)
    assert Request(address, "/x", timeout_seconds=5).send() == {"rows": [1, 2]}
