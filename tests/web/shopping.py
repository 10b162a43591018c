"""Visitors of a shop for its tests: what a browser without scripts would send."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from html import unescape
from pathlib import Path

from starlette.testclient import TestClient

from ragen_apo.environments.base import TextEnvironment
from ragen_apo.web.serving import make_app
from ragen_apo.web.shop.goals import AgentEpisodes
from ragen_apo.web.shop.routes import shop_routes
from ragen_apo.web.shop.visits import Shop, Visits, open_shop
from tests.web.servers import served_routes

LOCAL = "http://127.0.0.1:8000"


def shop_of(
    environment: TextEnvironment,
    folder: Path,
    *,
    split: str = "train",
    agent: AgentEpisodes | None = None,
) -> Shop:
    """The shop of an environment; demonstrations go to `folder`."""
    agent = agent or AgentEpisodes()
    return open_shop(environment, split=split, agent=agent, demonstrations=folder)


class Visitor:
    """A browser with cookies of its own, which sends the forms of the page that is open."""

    def __init__(self, visits: Visits) -> None:
        self.client = TestClient(
            make_app(shop_routes(visits)), base_url=LOCAL, headers={"Origin": LOCAL}
        )
        self.page = self.client.get("/").text

    def send(self, address: str, **fields: str) -> str:
        """Sends a form of the open page and reads the next one."""
        sent = {"page": self.page_number, **fields}
        answer = self.client.post(address, data=sent)
        assert answer.status_code == 200, answer.text
        self.page = answer.text
        return self.page

    def come_in(self) -> str:
        """Begins a visit."""
        return self.send("/visit")

    def search(self, words: str) -> str:
        """Types words into the search field."""
        return self.send("/shop/act", words=words)

    def press(self, action: str) -> str:
        """Presses the button of this action, which has to be there."""
        assert action in self.buttons, (action, self.buttons)
        return self.send("/shop/act", action=action)

    @property
    def page_number(self) -> str:
        """What the forms of the open page say of it."""
        found = re.search(r'name="page" value="([^"]*)"', self.page)
        return unescape(found[1]) if found else ""

    @property
    def buttons(self) -> list[str]:
        """The actions of the page's buttons."""
        found = re.findall(r'name="action"[^>]* value="([^"]*)"', self.page)
        return [unescape(each) for each in found]

    @property
    def text(self) -> str:
        """What can be read, without markup."""
        return unescape(re.sub(r"<[^>]*>", " ", self.page))

    @property
    def actions(self) -> list[str]:
        """The actions so far, as the page tells them."""
        (section,) = re.findall(r'aria-labelledby="turns">(.*?)</section>', self.page, re.DOTALL)
        return [unescape(each) for each in re.findall(r"<li><code>(.*?)</code>", section)]


def served(visits: Visits) -> AbstractContextManager[str]:
    """A real server on a free port of this machine, and its address."""
    return served_routes(shop_routes(visits))
