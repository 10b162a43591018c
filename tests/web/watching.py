"""Visitors of a policy at work, for its tests: what a browser without scripts would send."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.api import open_run
from ragen_apo.environments.base import TextEnvironment
from ragen_apo.session import Session
from ragen_apo.web.at_work.policies import policies_of
from ragen_apo.web.at_work.routes import at_work_routes, token_texts
from ragen_apo.web.at_work.worker import Visit, Workplace, open_workplace
from ragen_apo.web.serving import make_app
from tests.factories import threads_restored
from tests.web.servers import served_routes

LOCAL = "http://127.0.0.1:8000"


@contextmanager
def workplace_of(run: Path) -> Iterator[Workplace]:
    """The policies of a run, until the end of the block."""
    with threads_restored():
        opened = open_run(run, trust_remote_code=True)
        workplace = open_workplace(opened.config, opened.files)
        try:
            yield workplace
        finally:
            workplace.close()


@contextmanager
def workplace_with(
    make_environment: Callable[[], TextEnvironment], session: Session, **options: Any
) -> Iterator[Workplace]:
    """The policies of a session's run in another environment that has the same tasks."""
    environments = EnvironmentManager(
        make_environment, format_penalty=0.0, invalid_action_penalty=0.0
    )
    changed = replace(session, environments=environments)
    workplace = Workplace(changed, policies_of(session.run), **options)
    try:
        yield workplace
    finally:
        workplace.close()


class Watcher:
    """A browser with cookies of its own, which sends the forms of the page that is open."""

    def __init__(self, workplace: Workplace, *, token: str | None = None) -> None:
        self.workplace = workplace
        app = make_app(at_work_routes(workplace, decode=token_texts(workplace)), token=token)
        self.client = TestClient(app, base_url=LOCAL, headers={"Origin": LOCAL})
        self.page = self.client.get("/").text

    def send(self, address: str, **fields: object) -> str:
        """Sends a form of the open page and reads the next one."""
        sent = {"page": self.page_number, **{name: str(value) for name, value in fields.items()}}
        answer = self.client.post(address, data=sent)
        assert answer.status_code == 200, answer.text
        self.page = answer.text
        return self.page

    def begin(self, *, policy: str = "trained", split: str = "test", **fields: object) -> str:
        """Begins an episode, greedy on the first task if nothing else is said."""
        defaults = {"task": 0, "temperature": 0.0, "draw": 0}
        return self.send("/begin", **{"policy": policy, "split": split, **defaults, **fields})

    def look(self) -> str:
        """Loads the page again."""
        self.page = self.client.get("/work").text
        return self.page

    @property
    def visit(self) -> Visit:
        """What the server keeps of this visitor."""
        found = self.workplace.visits.find(self.client.cookies["ragen_apo_work_8000"])
        assert found is not None
        return found

    @property
    def page_number(self) -> str:
        """What the forms of the open page say of it."""
        found = re.search(r'name="page" value="([^"]*)"', self.page)
        return found[1] if found else ""

    @property
    def text(self) -> str:
        """What can be read, without markup."""
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.page)).split())


def served(workplace: Workplace) -> AbstractContextManager[str]:
    """A real server on a free port of this machine, and its address."""
    return served_routes(at_work_routes(workplace, decode=token_texts(workplace)))
