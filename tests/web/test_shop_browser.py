"""Shopping in a real Chromium: by mouse and by keyboard, wide and narrow, light and dark."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ragen_apo.environments.human.recordings import read_recordings
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.web.shop.goals import agent_episodes
from ragen_apo.web.shop.visits import Visits
from tests.web.browsing import (
    BROWSER_MARKS,
    DESKTOP,
    PHONE,
    assert_good,
    assert_good_in_both,
    follow,
    launched,
    window,
)
from tests.web.shopping import served, shop_of

MAX_TABS = 60
FOCUSED_NAME = """(() => {
  const element = document.activeElement
  return element.getAttribute("aria-label") || element.textContent.trim()
})()"""

pytestmark = BROWSER_MARKS


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def visits(finished_run: Path, tmp_path: Path) -> Visits:
    """The shop of the finished run, with goals for training."""
    environment = ShopEnvironment(num_products=24, max_turns=3)
    agent = agent_episodes(finished_run)
    return Visits(shop_of(environment, tmp_path / "kept", agent=agent))


def title_of_the_goal(visits: Visits) -> str:
    environment = visits.shop.environment
    assert isinstance(environment, ShopEnvironment)
    return environment.catalogue.by_id[visits.shop.goals[0].payload["product_id"]].title


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_shopping_to_a_purchase_by_mouse(
    size: tuple[int, int], visits: Visits, browser: Browser, tmp_path: Path
) -> None:
    title = title_of_the_goal(visits)
    with served(visits) as address, window(browser, address, size) as page:
        assert_good_in_both(page)
        follow(page.get_by_role("button", name="Come in"))
        assert_good_in_both(page)
        page.get_by_role("searchbox", name="Search the shop").fill(title)
        follow(page.get_by_role("button", name="Search"))
        assert_good_in_both(page)
        follow(page.get_by_role("button", name=f"Look at it: {title}", exact=True))
        assert_good_in_both(page)
        follow(page.get_by_role("button", name=f"Buy: {title}", exact=True).first)
        expect(page.get_by_role("heading", name="Exactly what was asked for")).to_be_visible()
        assert_good_in_both(page)
        follow(page.get_by_role("button", name="Keep as a demonstration"))
        expect(page.get_by_text("kept in")).to_be_visible()
        assert_good_in_both(page)
        follow(page.get_by_role("button", name="Next goal"))
        expect(page.get_by_text("Goal 2 of")).to_be_visible()
    recordings, _ = read_recordings(tmp_path / "kept")
    assert [recording.episode.success for recording in recordings] == [True]


def test_shopping_to_a_purchase_by_keyboard_alone(
    visits: Visits, browser: Browser, tmp_path: Path
) -> None:
    title = title_of_the_goal(visits)
    with served(visits) as address, window(browser, address) as page:
        press(page, "Come in")
        page.keyboard.type(title)  # the search field of a new goal has the focus
        with page.expect_navigation():
            page.keyboard.press("Enter")
        press(page, f"Look at it: {title}")
        press(page, f"Buy: {title}")
        expect(page.get_by_role("heading", name="Exactly what was asked for")).to_be_visible()
        press(page, "Keep as a demonstration")
        expect(page.get_by_text("kept in")).to_be_visible()
    recordings, _ = read_recordings(tmp_path / "kept")
    assert len(recordings) == 1


def press(page: Page, name: str) -> None:
    """Goes to the button of this name with the tab key, sees the focus, and presses Enter."""
    page.wait_for_load_state()
    for _ in range(MAX_TABS):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED_NAME) == name:
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none"
            with page.expect_navigation():
                page.keyboard.press("Enter")
            return
    raise AssertionError(f"the tab key does not come to {name!r}")


def test_webshop_is_shopped_with_options_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    environment = WebShopEnvironment(
        data="generated:1000", store=tmp_path / "store", split_scheme="product"
    )
    visits = Visits(shop_of(environment, tmp_path / "kept"))
    goal = visits.shop.goals[0]
    with served(visits) as address, window(browser, address, PHONE, "dark") as page:
        follow(page.get_by_role("button", name="Come in"))
        page.get_by_role("searchbox").fill(goal.instruction.split(",")[0])
        follow(page.get_by_role("button", name="Search"))
        assert_good(page)
        follow(page.get_by_role("button", name=re.compile("^Look at it")).first)
        options = page.locator("fieldset")
        for number in range(options.count()):
            follow(options.nth(number).get_by_role("button").first)
        assert page.locator("[aria-pressed=true]").count() == options.count()
        assert_good(page)
        follow(page.get_by_role("button", name="Features"))
        assert_good(page)
        follow(page.get_by_role("button", name="Back", exact=True))
        follow(page.get_by_role("button", name=re.compile("^Buy now")))
        expect(page.get_by_role("row", name="Kind of product")).to_be_visible()
        assert_good(page)


def test_hostile_words_run_nothing(visits: Visits, browser: Browser) -> None:
    hostile = '"><script>document.title = "taken"</script><img src=x onerror="document.title = 1">'
    with served(visits) as address, window(browser, address) as page:
        follow(page.get_by_role("button", name="Come in"))
        page.get_by_role("searchbox").fill(hostile)
        follow(page.get_by_role("button", name="Search"))
        expect(page.get_by_text(f"search {hostile}")).to_be_visible()
        assert "taken" not in page.title()
        assert page.get_by_role("searchbox").input_value() == hostile
