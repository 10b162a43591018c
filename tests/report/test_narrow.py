"""The page of a report in a window as narrow as a phone, in a real Chromium."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ragen_apo.report.load import load_run
from ragen_apo.report.page import page
from tests.web.browsing import BROWSER_MARKS, PHONE, launched, window

pytestmark = BROWSER_MARKS


def test_long_goals_and_categories_do_not_widen_the_page(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    run = load_run(directory)
    task = {"instruction": 40 * "a women’s coat of wool, ", "category": 120 * "c", "payload": {}}
    episodes = [{**row, "task": task} for row in run.episodes]
    home = run.results["by_category"]["home"]
    results = {**run.results, "by_category": {120 * "c": home, "b": home}}
    run = dataclasses.replace(run, episodes=episodes, results=results)
    file = directory / "report.html"
    file.write_text(page(run, curves=[]), encoding="utf-8")
    with launched() as browser, window(browser, file.as_uri(), PHONE) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        name = shown.locator("#categories tbody td").first.bounding_box()
        assert name is not None
        assert name["width"] < 200
