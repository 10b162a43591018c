"""The server of all pages: who is answered, what the browser is told, and errors."""

import importlib.util
import socket

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ragen_apo.addresses import is_loopback
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.web.extra import require_web
from ragen_apo.web.pages import page_of
from ragen_apo.web.serving import make_app, serve

LOCAL = "http://127.0.0.1:8000"


def _hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


def _missing(_: Request) -> PlainTextResponse:
    raise RunDirectoryError("no run <b>here</b>")


def _gone(_: Request) -> PlainTextResponse:
    raise HTTPException(404, "not there")


def _broken(_: Request) -> PlainTextResponse:
    raise RuntimeError("a secret of the program")


ROUTES = [
    Route("/", _hello, methods=["GET", "POST"]),
    Route("/missing", _missing),
    Route("/gone", _gone),
    Route("/broken", _broken),
]


def _client(*, host: str = "127.0.0.1", token: str | None = None) -> TestClient:
    app = make_app(ROUTES, host=host, token=token)
    return TestClient(app, base_url=LOCAL, raise_server_exceptions=False)


@pytest.mark.parametrize("name", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000"])
def test_a_request_to_a_name_of_this_machine_is_answered(name: str) -> None:
    assert _client().get("/", headers={"Host": name}).text == "hello"


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example:8000", "", "[::1"])
def test_a_request_to_another_name_is_refused(name: str) -> None:
    """DNS rebinding: a page of another site whose name was made to point here."""
    answer = _client().get("/", headers={"Host": name})
    assert answer.status_code == 403
    assert "hello" not in answer.text


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://["]
)
def test_a_form_of_another_site_is_refused(origin: str) -> None:
    assert _client().post("/", headers={"Origin": origin}).status_code == 403


def test_a_form_without_an_origin_is_refused() -> None:
    assert _client().post("/").status_code == 403


def test_a_form_of_this_server_is_taken() -> None:
    assert _client().post("/", headers={"Origin": LOCAL}).text == "hello"
    assert _client().post("/", headers={"Sec-Fetch-Site": "same-origin"}).text == "hello"


@pytest.mark.parametrize("path", ["/", "/missing", "/gone", "/broken", "/static/site.css"])
def test_every_answer_forbids_foreign_scripts_frames_and_caches(path: str) -> None:
    headers = _client().get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_refusal_has_the_headers_too() -> None:
    answer = _client().get("/", headers={"Host": "evil.example"})
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_without_its_token_nothing_is_answered() -> None:
    client = _client(host="0.0.0.0", token="right")
    for path in ("/", "/?token=wrong", "/?token=", "/static/site.css"):
        answer = client.get(path)
        assert answer.status_code == 403
        assert "hello" not in answer.text


def test_the_token_moves_from_the_address_into_a_cookie() -> None:
    client = _client(host="0.0.0.0", token="right")
    first = client.get("/?token=right&page=2", follow_redirects=False)
    assert (first.status_code, first.headers["Location"]) == (303, "/?page=2")
    assert "httponly" in first.headers["Set-Cookie"].lower()
    assert client.get("/").text == "hello"


def test_the_token_never_leads_to_another_server() -> None:
    client = _client(host="0.0.0.0", token="right")
    first = client.get("//evil.example/?token=right", follow_redirects=False)
    assert not first.headers.get("Location", "/").startswith("//")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_only_loopback_goes_without_a_token(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("path", ["/static/../serving.py", "/static/%2e%2e/serving.py"])
def test_no_file_beside_the_static_ones_is_served(path: str) -> None:
    assert _client().get(path).status_code == 404


def test_an_error_of_this_package_is_shown_as_text() -> None:
    answer = _client().get("/missing")
    assert answer.status_code == 404
    assert "no run &lt;b&gt;here&lt;/b&gt;" in answer.text


def test_an_unknown_address_has_a_page() -> None:
    answer = _client().get("/nowhere")
    assert answer.status_code == 404
    assert "Back to the beginning" in answer.text


def test_a_fault_of_the_program_tells_nothing_about_it() -> None:
    answer = _client().get("/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_characters_that_hide_or_steer_are_visible_in_a_page() -> None:
    answer = page_of("error.html", status=404, message="a\x1b[2Jb\u202ec\ud800")
    assert "a\\x1b[2Jb\\u202ec\\ud800" in bytes(answer.body).decode()


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        "ragen_apo.web.extra.find_spec", lambda name: None if name == "uvicorn" else known(name)
    )
    with pytest.raises(ConfigError, match=r"need uvicorn, .*pip install 'ragen-apo\[web\]'"):
        require_web()


def test_an_address_that_cannot_be_had_is_an_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address.*another --port"):
            serve(ROUTES, host="127.0.0.1", port=port, announce=print)
    with pytest.raises(ConfigError, match="cannot listen on no-such-host.invalid:0"):
        serve(ROUTES, host="no-such-host.invalid", port=0, announce=print)
