"""What every request has to pass, and what every answer says to the browser.

Consumes ASGI requests; produces those that may go on, or a refusal in plain text.

    Host      one of this server's names: a page of another site whose name was made to point here
              (DNS rebinding) sends its own
    token     where others than this machine can connect: in the address the first time, in a
              cookie from then on
    Origin    this server's, for all that is not reading: no other site can send a form here

The answers forbid scripts and styles that are not files of ours, frames, caches and guessed types.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragen_apo.listening import is_own_origin, is_secret, names_instead_of

READING = ("GET", "HEAD")
TOKEN_PARAMETER = "token"

ANSWER_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: with it a browser hides the origin of our own forms too.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def cookie_name(request: Request, purpose: str) -> str:
    """One for each port: a browser sends the cookies of a machine to all its ports."""
    server = request.scope.get("server") or ("", 0)
    return f"ragen_apo_{purpose}_{server[1]}"


class Guard:
    """The middleware."""

    def __init__(self, app: ASGIApp, *, host: str, token: str | None) -> None:
        self._app, self._host, self._token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(ANSWER_HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer where the request may not go on."""
        if scope["type"] != "http":
            return _refused("only HTTP is served here")
        request = Request(scope)
        called = request.headers.get("host", "")
        if names := names_instead_of(called, host=self._host, token=self._token):
            return _refused(f"this server is not called that; open it as one of {names}")
        if request.method not in READING and not _is_of_this_page(request.headers):
            return _refused("only pages of this server may change anything (Origin)")
        return None if self._token is None else self._without_token(request, self._token)

    def _without_token(self, request: Request, token: str) -> Response | None:
        cookie = cookie_name(request, TOKEN_PARAMETER)
        if is_secret(request.query_params.get(TOKEN_PARAMETER, ""), token):
            # The token leaves the address bar, so that no copied link carries it.
            others = [
                pair for pair in request.query_params.multi_items() if pair[0] != TOKEN_PARAMETER
            ]
            answer = RedirectResponse(_local(request.url.path, others), 303)
            answer.set_cookie(cookie, token, httponly=True, samesite="lax")
            return answer
        if is_secret(request.cookies.get(cookie, ""), token):
            return None
        return _refused("open the address with its token, as the terminal shows it")


def _local(path: str, query: list[tuple[str, str]]) -> str:
    """An address on this server: `//name` at its beginning would be another one."""
    return "/" + path.lstrip("/\\") + (f"?{urlencode(query)}" if query else "")


def _refused(reason: str) -> Response:
    return PlainTextResponse(f"refused: {reason}\n", 403)


def _is_of_this_page(headers: Headers) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site") == "same-origin"
    return is_own_origin(origin, headers.get("host"))
