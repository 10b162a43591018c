"""An OpenAI-compatible server on 127.0.0.1 whose answers and faults a test writes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ragen_apo.agent.responses import render_response
from ragen_apo.environments.base import Reply as OracleReply
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.shop.environment import TOOLS
from ragen_apo.environments.tools import call_of

Fault = Callable[[BaseHTTPRequestHandler], None]
"""What happens to a request instead of an answer."""
Reply = Callable[[Mapping[str, Any]], str | Mapping[str, Any]]
"""From the body of a request to the content of the answer, or to its whole message."""


def completion(message: str | Mapping[str, Any] | None, **choice: Any) -> dict[str, Any]:
    """The body of an answer; its usage is 7 prompt tokens and 3 of the answer."""
    whole = message if isinstance(message, Mapping) else {"role": "assistant", "content": message}
    return {
        "id": "answer",
        "object": "chat.completion",
        "created": 0,
        "model": "served",
        "choices": [{"index": 0, "message": dict(whole), "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def sends(body: Any, *, status: int = 200, **headers: str) -> Fault:
    """This status with this body, JSON unless it is text."""

    def fault(handler: BaseHTTPRequestHandler) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return fault


def refuses(status: int, message: str = "", *, code: str = "", **headers: str) -> Fault:
    """An error in the form of OpenAI."""
    return sends({"error": {"message": message, "code": code}}, status=status, **headers)


def stalls(seconds: float) -> Fault:
    """Nothing for so long, then an empty line."""

    def fault(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        handler.close_connection = True

    return fault


def trickles(start: bytes, *pieces: bytes, seconds: float, sent: list[bytes]) -> Fault:
    """Raw bytes, with a pause after each piece; `sent` gets those that were taken."""

    def fault(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.wfile.write(start)
        for piece in pieces:
            handler.wfile.write(piece)
            sent.append(piece)
            time.sleep(seconds)

    return fault


def cuts(handler: BaseHTTPRequestHandler) -> None:
    """Half of what was announced, and the end of the connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


class ChatServer:
    """Answers with `reply`, after the faults, each of which one request meets (None: an answer)."""

    def __init__(self, reply: Reply, faults: Sequence[Fault | None] = ()) -> None:
        self.reply, self.faults = reply, list(faults)
        self.requests: list[dict[str, Any]] = []
        """The body of every request, in the order in which they came."""
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fault = server.take(body, dict(self.headers))
                if self.path != "/v1/chat/completions":
                    fault = refuses(404, "Not Found")
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    (fault or sends(completion(server.reply(body))))(self)

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> Fault | None:
        """Notes a request and returns its fault, if it meets one."""
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            return self.faults.pop(0) if self.faults else None

    @contextlib.contextmanager
    def running(self) -> Iterator[ChatServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()


def serving(reply: Reply, *faults: Fault | None) -> contextlib.AbstractContextManager[ChatServer]:
    """A running server."""
    return ChatServer(reply, faults).running()


SHOP = {"name": "shop", "num_products": 24, "max_turns": 3}


def perfect_shopper(body: Mapping[str, Any]) -> str:
    """The shop's oracle, from the messages alone: it finds its task by the instruction."""
    reply = _oracle(body)
    return render_response(thought=reply.thought, action=reply.action)


def calling_shopper(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same by calls of the tools in the request, as a server with a parser for them answers."""
    reply = _oracle(body)
    found = call_of(TOOLS, reply.action)
    assert found is not None
    assert body["tools"] == [tool.schema for tool in TOOLS]
    function = {"name": found[0].name, "arguments": json.dumps(found[1])}
    call = {"id": f"c{len(body['messages'])}", "type": "function", "function": function}
    return {"role": "assistant", "content": reply.thought, "tool_calls": [call]}


def _oracle(body: Mapping[str, Any]) -> OracleReply:
    shop = ShopEnvironment(num_products=24, max_turns=3)
    heard = ("user", "tool")
    asked = [message["content"] for message in body["messages"] if message["role"] in heard]
    task = next(task for task in shop.tasks("all") if task.instruction in asked[0])
    oracle = shop.scripted_policies()["oracle"]()
    oracle.begin(task, seed=0)
    return oracle.act(asked[-1])


def says(content: str | Mapping[str, Any] | None) -> Reply:
    """The same to everything."""
    return lambda _: {"role": "assistant", "content": None} if content is None else content
