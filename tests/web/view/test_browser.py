"""A real Chromium on the pages: by keyboard alone, on every width, in light and dark."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Dialog, Page

from ragen_apo.files import append_json_line
from tests.forks import forked_command
from tests.web.browsing import BROWSER_MARKS, DESKTOP, PHONE, assert_good, launched, window
from tests.web.view_runs import HOSTILE, write_run

pytestmark = BROWSER_MARKS

SCREENS: dict[str, tuple[tuple[int, int], Literal["light", "dark"]]] = {
    "desktop": (DESKTOP, "light"),
    "phone": (PHONE, "dark"),
}


@pytest.fixture(scope="module")
def folder(trained_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained runs, and one that goes on training as long as somebody writes its rows."""
    folder = tmp_path_factory.mktemp("browsed") / "runs"
    shutil.copytree(trained_runs, folder)
    write_run(folder / "live", metrics=[{"step": 1, "success_rate": 0.25, "loss": 1.0}])
    return folder


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `ragen-apo view`."""
    server = forked_command(tmp_path_factory.mktemp("view") / "output", "view", folder, "--port", 0)
    yield server.says(r"http://127\.0\.0\.1:\d+\b")
    server.send(signal.SIGTERM)
    server.ended()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(params=SCREENS)
def page(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Page]:
    """The list of runs; in the end nothing may stand in the browser's console."""
    size, scheme = SCREENS[request.param]
    with window(browser, address, size, scheme) as page:
        yield page


def tab_to(page: Page, pattern: str) -> None:
    """Tab to the first link or control whose text fits."""
    for _ in range(80):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "(e => e && e !== document.body ? (e.innerText || e.getAttribute('aria-label') || "
            "e.id || '') : '')(document.activeElement)"
        )
        if re.search(pattern, focused):
            return
    raise AssertionError(f"{pattern} was not reached by Tab on {page.url}")


def follow(page: Page, pattern: str) -> None:
    """Tab to the first link or button whose text fits, and Enter; waits for the next page."""
    tab_to(page, pattern)
    with page.expect_navigation():
        page.keyboard.press("Enter")


def test_from_the_list_to_an_episode_and_a_comparison_by_keyboard_alone(
    page: Page, address: str
) -> None:
    assert_good(page)
    follow(page, "^first$")
    assert page.locator("h1").inner_text().startswith("first")
    assert_good(page)
    follow(page, "^Training episodes$")
    assert_good(page)
    follow(page, "buy|(?<!file )order|need|looking")
    assert page.locator(".tok").count() > 3
    assert_good(page)
    tab_to(page, "tokens as a table")
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
    follow(page, "^change against the reference$")
    assert "shade=change" in page.url
    assert_good(page)
    follow(page, "^first$")
    follow(page, "^Failures$")
    assert_good(page)
    page.go_back()
    follow(page, "^Value store$")
    assert_good(page)
    page.goto(f"{address}/compare")
    assert_good(page)
    page.locator("#a").focus()
    page.keyboard.type("first")
    page.keyboard.press("Tab")
    page.keyboard.type("group")
    follow(page, "^Compare$")
    assert "a=first" in page.url
    assert "b=group" in page.url
    assert_good(page)
    follow(page, "buy|(?<!file )order|need|looking")
    assert page.locator(".sides > section").count() == 2
    assert_good(page)


def test_the_skip_link_comes_first_and_leads_to_the_content(page: Page, address: str) -> None:
    page.goto(address)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


@pytest.mark.parametrize("page", ["desktop"], indirect=True)
def test_the_values_of_a_curve_are_read_by_arrow_keys(page: Page, address: str) -> None:
    page.goto(f"{address}/run?run=first")
    curve = page.locator(".curve").first
    curve.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert curve.locator("output").inner_text().startswith("step 2: training ")
    curve.locator("svg").hover(position={"x": 5, "y": 50})
    assert curve.locator("output").inner_text().startswith("step 1: ")


@pytest.mark.parametrize("page", ["phone"], indirect=True)
def test_a_live_run_is_followed_without_loading_the_page_again(
    page: Page, address: str, folder: Path
) -> None:
    os.utime(folder / "live" / "metrics.jsonl")  # as if it had just been written
    page.goto(f"{address}/run?run=live")
    page.evaluate("window.mark = 'the same page'")
    page.get_by_text("1 of 6", exact=True).wait_for()
    append_json_line(folder / "live" / "metrics.jsonl", {"step": 2, "success_rate": 0.5})
    page.get_by_text("2 of 6", exact=True).wait_for(timeout=20_000)
    assert page.evaluate("window.mark") == "the same page"
    assert_good(page)


@pytest.mark.parametrize("page", ["desktop"], indirect=True)
def test_hostile_text_runs_nothing(page: Page, address: str, folder: Path) -> None:
    from tests.factories import episode, task, turn

    text = HOSTILE + "<style>body{display:none}</style><svg onload=alert(1)>"
    write_run(
        folder / "hostile",
        [episode(turn(observation=text, thought=text, action=text), task=task(text))],
        metrics=[{"step": 1, "loss": 1.0}],
    )
    alerts: list[str] = []

    def refuse(dialog: Dialog) -> None:
        alerts.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", refuse)
    for path in ("/run?run=hostile", "/episodes?run=hostile", "/episode?run=hostile"):
        page.goto(address + path)
        assert page.locator("main").is_visible()
    assert "<script>alert(1)</script>" in page.locator("main").inner_text()
    assert alerts == []
    assert_good(page)
