"""A real Chromium on the pages: by keyboard alone, on every width, in light and dark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from ragen_apo.files import append_json_line
from tests.web.view_runs import HOSTILE, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: chromium)"),
]

SCREENS: Mapping[str, tuple[int, Literal["light", "dark"]]] = {
    "desktop": (1200, "light"),
    "phone": (390, "dark"),
}


@pytest.fixture(scope="module")
def folder(trained_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained runs, and one that goes on training as long as somebody writes its rows."""
    folder = tmp_path_factory.mktemp("browsed") / "runs"
    shutil.copytree(trained_runs, folder)
    write_run(folder / "live", metrics=[{"step": 1, "success_rate": 0.25, "loss": 1.0}])
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of `ragen-apo view`, as its user starts it."""
    command = [sys.executable, "-m", "ragen_apo.cli", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None
        yield found[0]
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """Somebody at a page, and what the browser complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def follow(self, pattern: str) -> None:
        """Tab to the first link or button whose text fits, and Enter; waits for the next page."""
        self.tab_to(pattern)
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    def tab_to(self, pattern: str) -> None:
        """Tab to the first link or control whose text fits."""
        for _ in range(80):
            self.page.keyboard.press("Tab")
            if re.search(pattern, self._focused()):
                return
        raise AssertionError(f"{pattern} was not reached by Tab on {self.page.url}")

    def check(self) -> None:
        """No serious finding of axe, no complaint, nothing wider than the screen."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page, options={"runOnly": ["wcag2a", "wcag2aa", "best-practice"]})
        grave = [
            (each["id"], each["nodes"][0]["html"])
            for each in found.response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert grave == [], self.page.url
        assert self.complaints == [], self.page.url
        widths = "[document.documentElement.scrollWidth, window.innerWidth]"
        page_width, screen_width = self.page.evaluate(widths)
        assert page_width <= screen_width, self.page.url

    def _focused(self) -> str:
        return self.page.evaluate(
            "(e => e && e !== document.body ? (e.innerText || e.getAttribute('aria-label') || "
            "e.id || '') : '')(document.activeElement)"
        )


@pytest.fixture(params=SCREENS)
def visitor(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Visitor]:
    width, scheme = SCREENS[request.param]
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    visitor = Visitor(context.new_page())
    visitor.page.on("console", lambda message: visitor.complaints.append(message.text))
    visitor.page.on("pageerror", lambda error: visitor.complaints.append(str(error)))
    yield visitor
    context.close()


def test_from_the_list_to_an_episode_and_a_comparison_by_keyboard_alone(
    visitor: Visitor, address: str
) -> None:
    page = visitor.page
    page.goto(address)
    visitor.check()
    visitor.follow("^first$")
    assert page.locator("h1").inner_text().startswith("first")
    visitor.check()
    visitor.follow("^Training episodes$")
    visitor.check()
    visitor.follow("buy|order|need|looking")
    assert page.locator(".tok").count() > 3
    visitor.check()
    visitor.tab_to("tokens as a table")
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
    visitor.follow("^change against the reference$")
    assert "shade=change" in page.url
    visitor.check()
    visitor.follow("^first$")
    visitor.follow("^Failures$")
    visitor.check()
    page.go_back()
    visitor.follow("^Value store$")
    visitor.check()
    page.goto(f"{address}/compare")
    visitor.check()
    page.locator("#a").focus()
    page.keyboard.type("first")
    page.keyboard.press("Tab")
    page.keyboard.type("group")
    visitor.follow("^Compare$")
    assert "a=first" in page.url
    assert "b=group" in page.url
    visitor.check()
    visitor.follow("buy|order|need|looking")
    assert page.locator(".sides > section").count() == 2
    visitor.check()


def test_the_skip_link_comes_first_and_leads_to_the_content(visitor: Visitor, address: str) -> None:
    visitor.page.goto(address)
    visitor.page.keyboard.press("Tab")
    visitor.page.keyboard.press("Enter")
    assert visitor.page.evaluate("document.activeElement.id") == "content"


@pytest.mark.parametrize("visitor", ["desktop"], indirect=True)
def test_the_values_of_a_curve_are_read_by_arrow_keys(visitor: Visitor, address: str) -> None:
    visitor.page.goto(f"{address}/run?run=first")
    curve = visitor.page.locator(".curve").first
    curve.locator("svg").focus()
    visitor.page.keyboard.press("ArrowRight")
    visitor.page.keyboard.press("ArrowRight")
    assert curve.locator("output").inner_text().startswith("step 2: training ")
    curve.locator("svg").hover(position={"x": 5, "y": 50})
    assert curve.locator("output").inner_text().startswith("step 1: ")
    assert visitor.complaints == []


@pytest.mark.parametrize("visitor", ["phone"], indirect=True)
def test_a_live_run_is_followed_without_loading_the_page_again(
    visitor: Visitor, address: str, folder: Path
) -> None:
    page = visitor.page
    os.utime(folder / "live" / "metrics.jsonl")  # as if it had just been written
    page.goto(f"{address}/run?run=live")
    page.evaluate("window.mark = 'the same page'")
    page.get_by_text("1 of 6", exact=True).wait_for()
    append_json_line(folder / "live" / "metrics.jsonl", {"step": 2, "success_rate": 0.5})
    page.get_by_text("2 of 6", exact=True).wait_for(timeout=20_000)
    assert page.evaluate("window.mark") == "the same page"
    visitor.check()


@pytest.mark.parametrize("visitor", ["desktop"], indirect=True)
def test_hostile_text_runs_nothing(visitor: Visitor, address: str, folder: Path) -> None:
    from tests.factories import episode, task, turn

    text = HOSTILE + "<style>body{display:none}</style><svg onload=alert(1)>"
    write_run(
        folder / "hostile",
        [episode(turn(observation=text, thought=text, action=text), task=task(text))],
        metrics=[{"step": 1, "loss": 1.0}],
    )
    alerts: list[str] = []
    visitor.page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    for path in ("/run?run=hostile", "/episodes?run=hostile", "/episode?run=hostile"):
        visitor.page.goto(address + path)
        assert visitor.page.locator("main").is_visible()
    assert "<script>alert(1)</script>" in visitor.page.locator("main").inner_text()
    assert alerts == []
    visitor.check()
