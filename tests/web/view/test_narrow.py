"""Pages of the viewer with long words, in a real Chromium, on a phone and on a desktop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import episode, task, turn
from tests.web.browsing import BROWSER_MARKS, DESKTOP, PHONE, launched, window
from tests.web.view_runs import client, get, some_episodes, write_run

pytestmark = BROWSER_MARKS

BROKEN_WORDS = """() => {
  const found = [], texts = document.createTreeWalker(document.querySelector("table"), 4);
  while (texts.nextNode()) {
    for (const word of texts.currentNode.data.matchAll(/[^\\s\\-\\/]+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((each) => each.top));
      if (lines.size > 1) found.push(word[0]);
    }
  }
  const canvas = document.createElement("canvas").getContext("2d");
  for (const cell of document.querySelectorAll("td[data-label]")) {
    const label = getComputedStyle(cell, "::before");
    canvas.font = label.font;
    const width = canvas.measureText(cell.dataset.label).width;
    const isShown = label.content !== "none";
    if (isShown && parseFloat(label.width) < width - 1) found.push(cell.dataset.label);
  }
  return found;
}"""
"""Words of the table, and labels before its cells, that are on more than one line."""


def saved(folder: Path, path: str, **parameters: object) -> str:
    """The address of a page as one file."""
    pages = client(folder)
    style = f"<style>{get(pages, '/static/site.css')}</style>"
    html = get(pages, path, **parameters)
    file = folder.parent / "page.html"
    for link in ('<link rel="stylesheet" href="/static/site.css">',):
        assert link in html
        html = html.replace(link, style)
    html = html.replace('<link rel="icon" href="/static/icon.svg" type="image/svg+xml">', "")
    file.write_text(html, encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_list_of_runs_breaks_no_word(size: tuple[int, int], tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    config = f"algorithm: apo\nenvironment: {{name: '/srv/{12 * 'long/'}shop.py:make_shop'}}\n"
    row = {"step": 123, "success_rate": 0.5, "eval_success_rate": 0.5}
    write_run(folder / "quickstart", some_episodes(9), metrics=[row], config=config)
    begun = write_run(folder / "a-comparison/apo-seed-1")
    (begun / "warm_start.jsonl").write_text('{"step": 123, "phase": "demonstrations"}\n')
    with launched() as browser, window(browser, saved(folder, "/"), size) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate(BROKEN_WORDS) in ([], ["long…"]), "the end of a path"


def test_a_long_category_does_not_widen_the_page_of_an_episode(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    write_run(folder / "one", [episode(turn(), task=task(category=120 * "c"))])
    address = saved(folder, "/episode", run="one")
    with launched() as browser, window(browser, address, PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
