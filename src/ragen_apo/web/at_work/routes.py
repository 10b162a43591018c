"""The addresses of a policy at work. Every change is a form of the page that is open, by POST.

    GET  /            what to watch          POST /begin          an episode
    GET  /work        the episode            POST /work/act       the policy's turn; /work/run: all
    GET  /work/now    what is being written  POST /work/take      the visitor's turn
    GET  /text        a long text            POST /work/back      to an earlier turn
                                             POST /work/compare   with another policy; /work/stop
                                             POST /work/leave     goes

Forms of a page with JavaScript say `live`: they are answered at once, and the page follows what is
written. Others wait for the end of the turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ragen_apo.errors import ConfigError, RagenApoError
from ragen_apo.web.at_work.episode import Choice
from ragen_apo.web.at_work.policies import REFERENCE
from ragen_apo.web.at_work.shown import episode_shown, stored, written_so_far
from ragen_apo.web.at_work.worker import Visit, Workplace
from ragen_apo.web.forms import Form, read_form
from ragen_apo.web.pages import page_of, render
from ragen_apo.web.sessions import told
from ragen_apo.web.view import query
from ragen_apo.web.view.episode_pages import long_text
from ragen_apo.web.view.episodes import Decode
from ragen_apo.web.view.query import EpisodeKey
from ragen_apo.web.view.token_texts import FILE, decoder, numbers

MAX_WAIT_SECONDS = 20.0
"""Of a form without JavaScript; then the page says that the turn is being written."""
WAIT_STEP_SECONDS = 0.02
MAX_RESPONSE_CHARACTERS = 10_000
MAX_TURNS_SHOWN = 25
TO_WORK = "/work#now"


def at_work_routes(workplace: Workplace, *, decode: Decode) -> Sequence[BaseRoute]:
    """The routes of a run's policies; `decode` tells the texts of tokens."""
    pages, visits = _Pages(workplace, decode), workplace.visits
    changes: Mapping[str, Callable[[Visit, Form], None]] = {
        "act": lambda visit, _: pages.act(visit, until_end=False),
        "run": lambda visit, _: pages.act(visit, until_end=True),
        "take": pages.take,
        "back": pages.back,
        "compare": pages.compare,
    }
    return [
        Route("/", pages.choose),
        Route("/begin", pages.begin, methods=["POST"]),
        Route("/work", visits.showing(pages.work)),
        Route("/work/now", pages.now),
        Route("/text", visits.showing(pages.text)),
        Route("/work/stop", pages.stop, methods=["POST"]),
        Route("/work/leave", visits.leave, methods=["POST"]),
        *(
            Route(
                f"/work/{name}", visits.changing(change, to=TO_WORK, then=_wait), methods=["POST"]
            )
            for name, change in changes.items()
        ),
    ]


def token_texts(workplace: Workplace) -> Decode:
    """What tells the texts of a run's tokens: all its models share a tokenizer."""
    path = next(iter(workplace.policies.values())).folder / FILE
    return decoder(path) if path.is_file() else numbers


class _Pages:
    def __init__(self, workplace: Workplace, decode: Decode) -> None:
        self._workplace, self._decode = workplace, decode
        self._temperatures = sorted(
            {0.0, workplace.config.evaluation.temperature, workplace.config.sampling.temperature}
        )

    async def begin(self, request: Request) -> Response:
        form = await read_form(request)
        return await run_in_threadpool(self._begin, request, form)

    def now(self, request: Request) -> Response:
        """What is being written, and the number of the page that it is for."""
        visit = self._workplace.visits.visit_of(request)
        if visit is None:
            raise HTTPException(404, "the visit has ended")
        with visit.lock:
            written = self._written(visit)
            html = render("at_work/written.html", writing=visit.writing, written=written)
            return JSONResponse({"page": visit.page_number, "html": html})

    def text(self, request: Request, visit: Visit) -> Response:
        """A long text of the episode, a part at a time."""
        shown = long_text(request, stored(visit.played))
        return page_of("at_work/text.html", name=self._workplace.name, **shown)

    async def stop(self, request: Request) -> Response:
        """Breaks off what is being written; the turn is as if it had not begun."""
        form = await read_form(request)
        visit = self._workplace.visits.visit_of(request)
        if visit is not None and (writing := visit.writing) is not None:
            writing.stop.set()
            await _wait(visit, form)
        return RedirectResponse(TO_WORK, 303)

    def act(self, visit: Visit, *, until_end: bool) -> None:
        """The policy's turn, or all of them up to the end."""
        _require_going_on(visit)
        self._workplace.act(visit, until_end=until_end)

    def take(self, visit: Visit, form: Form) -> None:
        """The visitor's turn: a thought and an action, or a whole response."""
        world, response = self._workplace.world, form.get("response", "")
        thought, action = form.get("thought", ""), form.get("action", "")
        length = len(response or thought + action)
        _require_going_on(visit)
        if length > MAX_RESPONSE_CHARACTERS:
            raise ConfigError(
                f"That has {length:,} characters, and a response at most "
                f"{MAX_RESPONSE_CHARACTERS:,}; nothing was done."
            )
        text = response or world.context.write_response(
            thought=thought.strip(), action=action.strip()
        )
        visit.played = world.play_by_hand(visit.played, text)
        visit.num_changes += 1

    def back(self, visit: Visit, form: Form) -> None:
        """To before a turn that was played."""
        number = self._turn(visit, form)
        visit.played = self._workplace.world.back_to(visit.played, number)
        visit.num_changes += 1

    def compare(self, visit: Visit, form: Form) -> None:
        """What another policy says to a turn."""
        self._workplace.compare(visit, self._turn(visit, form), self._policy(form))

    def _begin(self, request: Request, form: Form) -> Response:
        workplace = self._workplace
        try:
            played = workplace.world.begin(self._choice(form))
        except RagenApoError as error:
            return self.choose(request, told(error))
        return workplace.visits.come_in(request, lambda: workplace.open(played), to="/work")

    def _choice(self, form: Form) -> Choice:
        """What a form chooses; raises HTTPException for what no form of ours says."""
        temperature = form.get("temperature", "0")
        if temperature not in map(str, self._temperatures):
            raise HTTPException(400, f"temperature: got {temperature[:40]!r}, which is not offered")
        return Choice(
            policy=self._policy(form),
            split=form.get("split", ""),
            task=_number(form, "task"),
            temperature=float(temperature),
            draw=_number(form, "draw"),
        )

    def _policy(self, form: Form) -> str:
        policy = form.get("policy", "")
        if policy not in self._workplace.policies:
            raise HTTPException(400, f"policy: got {policy[:80]!r}, which the run does not have")
        return policy

    def _turn(self, visit: Visit, form: Form) -> int:
        number, num_turns = _number(form, "turn"), len(visit.played.turns)
        if not 1 <= number <= num_turns:
            raise HTTPException(400, f"turn: got {number}, expected one from 1 to {num_turns}")
        return number

    def choose(self, request: Request, notice: str = "") -> Response:
        """What there is to watch."""
        workplace = self._workplace
        evaluated = workplace.config.evaluation.split
        return page_of(
            "at_work/choose.html",
            name=workplace.name,
            properties=workplace.world.properties,
            policies=workplace.policies,
            num_tasks=workplace.world.num_tasks,
            temperatures=self._temperatures,
            chosen={
                "policy": query.text(request, "policy"),
                "split": query.text(request, "split") or evaluated,
                "task": query.number(request, "task"),
                "temperature": query.text(request, "temperature"),
                "draw": query.number(request, "draw"),
            },
            notice=notice,
            **workplace.visits.at_the_door(request),
        )

    def work(self, request: Request, visit: Visit) -> Response:
        """The episode."""
        played = visit.played
        episode, items = episode_shown(played, self._decode)
        is_all = query.text(request, "turns") == "all"
        others = [name for name in self._workplace.policies if name != played.choice.policy]
        return page_of(
            "at_work/work.html",
            name=self._workplace.name,
            choice=played.choice,
            num_tasks=self._workplace.world.num_tasks[played.choice.split],
            played=played,
            episode=episode,
            items=items if is_all else items[-MAX_TURNS_SHOWN:],
            num_left_out=0 if is_all else max(0, len(items) - MAX_TURNS_SHOWN),
            key=EpisodeKey(),
            properties=self._workplace.world.properties,
            policies=self._workplace.policies,
            other=REFERENCE if REFERENCE in others else next(iter(others), played.choice.policy),
            page_number=visit.page_number,
            writing=visit.writing,
            written=self._written(visit),
            notice=visit.take_notice(),
        )

    def _written(self, visit: Visit) -> Sequence[Any]:
        return () if visit.writing is None else written_so_far(visit.writing, self._decode)


def _require_going_on(visit: Visit) -> None:
    if visit.played.is_over:
        raise ConfigError("The episode is over; go back to a turn, or begin another one.")


async def _wait(visit: Visit, form: Form) -> None:
    """Until nothing is written for the visit any more; not for a page that follows by itself."""
    patience = 0.0 if "live" in form else MAX_WAIT_SECONDS
    end = time.monotonic() + patience
    while visit.writing is not None and time.monotonic() < end:
        await asyncio.sleep(WAIT_STEP_SECONDS)


def _number(form: Form, name: str) -> int:
    """A whole number from 0, as which an empty field counts too."""
    return query.whole_number(name, form.get(name, "").strip() or "0")
