"""A real server of some routes, for browsers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.routing import BaseRoute

from ragen_apo.web.serving import make_app


@contextmanager
def served_routes(routes: Sequence[BaseRoute]) -> Iterator[str]:
    """A server on a free port of this machine, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(routes), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
