"""Visits to a server: each is found by its id alone, 192 random bits in a cookie of one browser.

Idle visits end, and there are never more than a given number. For any number of threads.

Every change is a form of the page that is open, which it names: one of an older page, or one that
is sent twice, changes nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ragen_apo.errors import EnvironmentFaultError, RagenApoError
from ragen_apo.web.forms import Form, read_form
from ragen_apo.web.security import cookie_name

NUM_ID_BYTES = 24
MAX_IDLE_SECONDS = 2 * 60 * 60.0
OLD_PAGE = (
    "That page was not the newest one of your visit, so nothing was done. Here is the newest."
)
FAULT = "This could not be done; the terminal of the server shows why."


class FullError(RagenApoError):
    """There are as many visits as the server takes."""


def told(error: RagenApoError) -> str:
    """What a visitor reads of an error. Of what foreign code raised, the terminal alone has it."""
    if isinstance(error, EnvironmentFaultError) and error.__cause__ is not None:
        traceback.print_exception(error)
        return FAULT
    return str(error)


class Visit:
    """What a server keeps of one visitor. Hold `lock` while reading or changing it."""

    def __init__(self, visit_id: str) -> None:
        self.id = visit_id
        self.lock = threading.Lock()
        self.last_seen = 0.0
        """In seconds of the clock of `Sessions`, whose lock guards it."""
        self.notice = ""
        """Said once, on the next page."""

    @property
    def page_number(self) -> str:
        """Names the page that is open: another one after every change."""
        raise NotImplementedError

    @property
    def busy(self) -> str:
        """Why nothing can be changed now; empty if it can."""
        return ""

    def take_notice(self) -> str:
        """What there is to say, once."""
        notice, self.notice = self.notice, ""
        return notice


VisitT = TypeVar("VisitT", bound=Visit)


class Sessions(Generic[VisitT]):
    """All visits of a server; `cookie` is the purpose in the name of their cookies."""

    def __init__(
        self,
        *,
        cookie: str,
        max_visits: int,
        max_idle_seconds: float = MAX_IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cookie, self._clock = cookie, clock
        self._max_visits, self._max_idle_seconds = max_visits, max_idle_seconds
        self._lock = threading.Lock()
        self._by_id: dict[str, VisitT] = {}

    def __len__(self) -> int:
        with self._lock:
            self._end_idle_ones()
            return len(self._by_id)

    def add(self, make: Callable[[str], VisitT]) -> VisitT:
        """A new visit, made of its id; raises FullError where there are too many."""
        with self._lock:
            self._end_idle_ones()
            if len(self._by_id) >= self._max_visits:
                raise FullError(
                    f"{self._max_visits} people are here, as many as this server takes; come back "
                    "when somebody has left"
                )
            visit_id = secrets.token_urlsafe(NUM_ID_BYTES)
            visit = make(visit_id)
            visit.last_seen = self._clock()
            self._by_id[visit_id] = visit
            return visit

    def find(self, visit_id: str) -> VisitT | None:
        """The visit of an id, if it has not ended; it is not idle now."""
        with self._lock:
            self._end_idle_ones()
            visit = self._by_id.get(visit_id)
            if visit is not None:
                visit.last_seen = self._clock()
            return visit

    def close(self, visit_id: str) -> VisitT | None:
        """Ends a visit, if there is one, and returns it."""
        with self._lock:
            return self._by_id.pop(visit_id, None)

    def idle_seconds(self, visit: VisitT) -> float:
        """Since the last request of its visitor."""
        with self._lock:
            return self._clock() - visit.last_seen

    def visit_of(self, request: Request) -> VisitT | None:
        """The visit of the browser that asks, if it has not ended; it is not idle now."""
        return self.find(self._id_in(request))

    def at_the_door(self, request: Request) -> dict[str, bool]:
        """Whether the browser has a visit to go on with, or had one that has ended."""
        is_open = self.visit_of(request) is not None
        return {"is_open": is_open, "has_ended": bool(self._id_in(request)) and not is_open}

    def come_in(self, request: Request, begin: Callable[[], VisitT], *, to: str) -> Response:
        """Begins a visit in place of the browser's last one, and goes to its page."""
        self.close(self._id_in(request))
        try:
            visit = begin()
        except FullError as error:
            raise HTTPException(503, str(error)) from error
        answer = RedirectResponse(to, 303)
        name = cookie_name(request, self._cookie)
        answer.set_cookie(name, visit.id, httponly=True, samesite="lax")
        return answer

    def showing(self, show: Callable[[Request, VisitT], Response]) -> Callable[[Request], Response]:
        """The endpoint of a page of a visit; without one it goes to the door."""

        def endpoint(request: Request) -> Response:
            visit = self.visit_of(request)
            if visit is None:
                return RedirectResponse("/", 303)
            with visit.lock:
                return show(request, visit)

        return endpoint

    def changing(
        self,
        change: Callable[[VisitT, Form], None],
        *,
        to: str,
        then: Callable[[VisitT, Form], Awaitable[None]] | None = None,
    ) -> Callable[[Request], Any]:
        """The endpoint of a form that changes a visit: it goes to the visit's page, after `then`.

        What `change` raises of this package the page says.
        """

        def changed(visit: VisitT, form: Form) -> None:
            with visit.lock:
                if visit.busy or form.get("page") != visit.page_number:
                    visit.notice = visit.busy or OLD_PAGE
                    return
                try:
                    change(visit, form)
                except RagenApoError as error:
                    visit.notice = told(error)

        async def endpoint(request: Request) -> Response:
            form, visit = await read_form(request), self.visit_of(request)
            if visit is None:
                return RedirectResponse("/", 303)
            await run_in_threadpool(changed, visit, form)
            if then is not None:
                await then(visit, form)
            return RedirectResponse(to, 303)

        return endpoint

    def leave(self, request: Request) -> Response:
        """Ends the browser's visit, and goes to the door."""
        self.close(self._id_in(request))
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(cookie_name(request, self._cookie))
        return answer

    def _id_in(self, request: Request) -> str:
        return request.cookies.get(cookie_name(request, self._cookie), "")

    def _end_idle_ones(self) -> None:
        oldest = self._clock() - self._max_idle_seconds
        for visit_id in [key for key, each in self._by_id.items() if each.last_seen < oldest]:
            del self._by_id[visit_id]
