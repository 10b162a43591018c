"""The addresses of the shop. Every change is a form of the page that is open, sent by POST.

GET  /            the door             POST /visit        comes in
GET  /shop        the open page        POST /shop/act     a search, a button, a typed action
POST /shop/goal   another goal         POST /shop/keep    as a demonstration; /shop/discard
POST /shop/leave  goes
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ragen_apo.errors import ConfigError
from ragen_apo.web.forms import Form
from ragen_apo.web.pages import page_of
from ragen_apo.web.shop.visits import Visit, Visits

MAX_ACTION_CHARACTERS = 10_000


def shop_routes(visits: Visits) -> Sequence[BaseRoute]:
    """The routes of a shop with these visits."""
    pages = _Pages(visits)
    changes: Mapping[str, Callable[[Visit, Form], None]] = {
        "act": _act,
        "goal": pages.go_to_goal,
        "keep": lambda visit, _: visit.keep(),
        "discard": lambda visit, _: visit.discard(),
    }
    return [
        Route("/", pages.welcome),
        Route("/visit", pages.come_in, methods=["POST"]),
        Route("/shop", visits.showing(pages.shop)),
        Route("/shop/leave", visits.leave, methods=["POST"]),
        *(
            Route(f"/shop/{name}", visits.changing(change, to="/shop"), methods=["POST"])
            for name, change in changes.items()
        ),
    ]


class _Pages:
    def __init__(self, visits: Visits) -> None:
        self._visits = visits

    def welcome(self, request: Request) -> Response:
        shop = self._visits.shop
        properties, door = shop.environment.properties, self._visits.at_the_door(request)
        return page_of("shop/welcome.html", shop=shop, properties=properties, **door)

    def come_in(self, request: Request) -> Response:
        return self._visits.come_in(request, self._visits.open, to="/shop")

    def go_to_goal(self, visit: Visit, form: Form) -> None:
        """The goal of the number in the form, counted from 1; without one, the next."""
        wanted, num_goals = form.get("goal"), len(self._visits.shop.goals)
        if wanted is None:
            visit.go_to(self._visits.next_goal())
        elif re.fullmatch("[0-9]{1,10}", wanted) and 1 <= int(wanted) <= num_goals:
            visit.go_to(int(wanted) - 1)
        else:
            raise ConfigError(f"Goals have numbers from 1 to {num_goals:,}.")

    def shop(self, _: Request, visit: Visit) -> Response:
        shop, episode = self._visits.shop, visit.episode
        return page_of(
            "shop/shop.html",
            shop=shop,
            properties=shop.environment.properties,
            visit=visit,
            page_number=visit.page_number,
            episode=episode,
            page=episode.page(),
            bill=episode.bill() if episode.is_over else None,
            why_not_kept=visit.why_not_kept(),
            agent_episodes=shop.agent.of(episode.task),
            notice=visit.take_notice(),
        )


def _act(visit: Visit, form: Form) -> None:
    text = form.get("words", form.get("action", ""))
    if len(text) > MAX_ACTION_CHARACTERS:
        raise ConfigError(
            f"That has {len(text):,} characters, and an action at most "
            f"{MAX_ACTION_CHARACTERS:,}; nothing was done."
        )
    if "words" in form:
        visit.episode.search(text)
    else:
        visit.episode.act(text)
