"""Who an OpenEnv server lets in. The server itself is tested where openenv is: tests/interop."""

from __future__ import annotations

import asyncio
from importlib.metadata import distributions
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette comes with the extras web and openenv")

from ragen_apo import cli
from ragen_apo.environments.openenv.serving import MAX_MESSAGE_BYTES, Guard
from ragen_apo.errors import ConfigError

LOCAL = {"host": "127.0.0.1:8000"}


def answered(
    headers: dict[str, str], *, kind: str = "http", method: str = "GET", token: str | None = None
) -> int | None:
    """The status of the refusal; None for what goes on to the application."""
    sent: list[dict[str, Any]] = []

    async def application(*_: Any) -> None:
        pass

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "path": "/ws",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "extensions": {"websocket.http.response": {}},
    }
    guard = Guard(application, host="127.0.0.1", token=token)
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_programs_of_this_machine_come_in_and_pages_of_others_do_not(kind: str) -> None:
    assert answered(LOCAL, kind=kind) is None
    assert answered({"host": "localhost:8000"}, kind=kind) is None
    assert answered({"host": "rebound.example"}, kind=kind) == 403
    assert answered({}, kind=kind) == 403
    assert answered({**LOCAL, "origin": "https://evil.example"}, kind=kind) == 403
    assert answered({**LOCAL, "origin": "null"}, kind=kind) == 403
    assert answered({**LOCAL, "origin": "http://127.0.0.1:8000"}, kind=kind) is None


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_with_a_token_nobody_comes_in_without_it(kind: str) -> None:
    there = {"host": "machine.example"}
    assert answered(there, kind=kind, token="secret") == 401
    wrong = {**there, "authorization": "Bearer Secret"}
    assert answered(wrong, kind=kind, token="secret") == 401
    right = {**there, "authorization": "Bearer secret"}
    assert answered(right, kind=kind, token="secret") is None


@pytest.mark.parametrize("length", ["", "-1", "x", str(MAX_MESSAGE_BYTES + 1), "²"])
def test_a_body_that_does_not_say_its_length_or_is_too_long_is_refused(length: str) -> None:
    assert answered({**LOCAL, "content-length": length}, method="POST") == 413
    assert answered({**LOCAL, "content-length": "10"}, method="POST") is None


def test_without_the_package_the_command_says_how_to_get_it() -> None:
    if any(distributions(name="openenv")):
        pytest.skip("openenv is installed")
    with pytest.raises(ConfigError, match=r"pip install 'ragen-apo\[openenv\]'"):
        cli.app(["serve", "openenv", "shop"], result_action="return_value")
