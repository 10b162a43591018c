"""Shopping by forms, without a browser: what is shown, what is done, what it earns."""

import re
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import TextEnvironment
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.types import Task
from ragen_apo.web.shop.visits import Visits
from tests.sweeps import quick_first
from tests.web.shopping import LOCAL, Visitor, shop_of


@pytest.fixture
def shop() -> ShopEnvironment:
    return ShopEnvironment(num_products=24, max_turns=4)


@pytest.fixture
def visitor(shop: ShopEnvironment, tmp_path: Path) -> Visitor:
    visitor = Visitor(Visits(shop_of(shop, tmp_path / "kept")))
    visitor.come_in()
    return visitor


def goal_of(shop: ShopEnvironment, number: int = 0) -> int:
    return shop.tasks("train")[number].payload["product_id"]


def directly(environment: TextEnvironment, task: Task, actions: list[str]) -> float:
    """The return of these actions in the environment itself."""
    environment.reset(task, seed=0)
    return sum(environment.step(action)[1] for action in actions)


def reward_shown(visitor: Visitor) -> float:
    (shown,) = re.findall(r'class="reward"><b>([^<]*)</b>', visitor.page)
    return float(shown)


def test_a_visitor_sees_the_goal_as_the_agent_does_and_the_turns_left(
    shop: ShopEnvironment, visitor: Visitor
) -> None:
    task = shop.tasks("train")[0]
    assert task.instruction in visitor.text
    assert re.search(r"4\s+of 4 turns left", visitor.text)
    visitor.search("shoe")
    assert re.search(r"3\s+of 4 turns left", visitor.text)
    assert visitor.actions == ["search shoe"]


def test_shopping_to_a_purchase_earns_what_the_same_actions_earn_in_the_environment(
    shop: ShopEnvironment, visitor: Visitor
) -> None:
    task, goal = shop.tasks("train")[0], goal_of(shop)
    title = shop.catalogue.by_id[goal].title
    visitor.search(title)
    visitor.press(f"click {goal}")
    assert title in visitor.text
    visitor.press(f"buy {goal}")
    assert "Exactly what was asked for" in visitor.text
    expected = directly(shop, task, [f"search {title}", f"click {goal}", f"buy {goal}"])
    assert reward_shown(visitor) == float(f"{expected:.2f}")


def test_the_parts_of_the_reward_add_up_to_it(shop: ShopEnvironment, visitor: Visitor) -> None:
    goal = goal_of(shop)
    visitor.search(shop.catalogue.by_id[goal].title)
    visitor.press(f"buy {goal}")
    parts = [float(each) for each in re.findall(r'<td class="n">([^<]*)</td>', visitor.page)]
    # 0.1 for the search that showed the goal, 1 for the purchase, 2 turns of -0.01
    assert parts == [0.1, 1.0, -0.02]
    assert sum(parts) == pytest.approx(reward_shown(visitor))


def test_another_product_is_not_what_was_asked_for(shop: ShopEnvironment, visitor: Visitor) -> None:
    other = next(number for number in shop.catalogue.by_id if number != goal_of(shop))
    visitor.send("/shop/act", action=f"buy {other}")
    assert "Not what was asked for" in visitor.text
    assert reward_shown(visitor) == pytest.approx(-0.11)


def test_an_action_that_the_environment_refuses_says_so_and_costs_a_turn(visitor: Visitor) -> None:
    visitor.send("/shop/act", action="dance")
    assert "The shop could not do" in visitor.text
    assert "Use: search <keywords>, click <id> or buy <id>" in visitor.text
    assert visitor.actions == ["dance"]
    assert re.search(r"3\s+of 4 turns left", visitor.text)


def test_results_stay_after_an_action_that_was_refused(visitor: Visitor) -> None:
    visitor.search("shoe")
    before = visitor.buttons
    visitor.send("/shop/act", action="click 0")
    assert visitor.buttons == before


def test_without_turns_left_the_episode_is_over(visitor: Visitor) -> None:
    for _ in range(4):
        visitor.search("shoe")
    assert "No turns left, and nothing was bought" in visitor.text
    assert not visitor.buttons


def test_a_form_that_is_sent_twice_buys_once(shop: ShopEnvironment, visitor: Visitor) -> None:
    visitor.search("shoe")
    old = visitor.page_number
    visitor.send("/shop/act", action="search mug", page=old)
    visitor.send("/shop/act", action="search mug", page=old)
    assert visitor.actions == ["search shoe", "search mug"]
    assert "not the newest one of your visit" in visitor.text


def test_a_form_of_an_earlier_goal_changes_nothing(visitor: Visitor) -> None:
    old = visitor.page_number
    visitor.send("/shop/goal")
    visitor.send("/shop/act", action="search mug", page=old)
    assert visitor.actions == []


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;",
    "zzzz\x00\x1b[2J\u202e",
    "%3Cscript%3E",
]


def elements(page: str) -> list[tuple[str, list[str]]]:
    """The elements of a page in order, each with the names of its attributes."""
    found: list[tuple[str, list[str]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, [name for name, _ in attrs]))

    Reader().feed(page)
    return found


@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_text_in_the_search_box_stays_text(words: str, visitor: Visitor) -> None:
    harmless = elements(visitor.search("zzzz"))
    visitor.send("/shop/goal", goal="1")
    assert elements(visitor.search(words)) == harmless
    visible = words.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert visitor.actions == [f"search {visible}"]


def test_line_breaks_in_a_search_make_no_second_action(visitor: Visitor) -> None:
    visitor.search("shoe\r\nbuy 1\nclick 2")
    assert visitor.actions == ["search shoe buy 1 click 2"]


@pytest.mark.parametrize(
    "number", ["0", "9999999", "-1", "x", "", "1.5", "٣", "00000000011", "0" * 9 + "1" * 5000]
)
def test_a_goal_that_is_not_there_is_refused(number: str, visitor: Visitor) -> None:
    before = visitor.page_number
    visitor.send("/shop/goal", goal=number)
    assert "Goals have numbers from 1 to" in visitor.text
    assert visitor.page_number == before


def test_a_goal_is_chosen_by_its_number(shop: ShopEnvironment, visitor: Visitor) -> None:
    visitor.send("/shop/goal", goal="3")
    assert shop.tasks("train")[2].instruction in visitor.text


def test_a_long_action_and_a_long_form_do_nothing(visitor: Visitor) -> None:
    visitor.send("/shop/act", action="search " + "x" * 10_000)
    assert "nothing was done" in visitor.text
    assert visitor.actions == []
    answer = visitor.client.post("/shop/act", data={"action": "x" * 100_000})
    assert answer.status_code == 413


@pytest.mark.parametrize("address", ["visit", "shop/act", "shop/goal", "shop/keep", "shop/leave"])
def test_a_form_of_another_site_is_refused(address: str, visitor: Visitor) -> None:
    before = visitor.page_number
    fields = {"page": before, "action": "search mug"}
    headers = {"Origin": "http://evil.example"}
    answer = visitor.client.post(f"/{address}", data=fields, headers=headers)
    assert answer.status_code == 403
    visitor.page = visitor.client.get("/shop").text
    assert visitor.page_number == before


def test_nothing_changes_by_a_link(visitor: Visitor) -> None:
    for address in ("/visit", "/shop/act", "/shop/goal", "/shop/keep", "/shop/leave"):
        assert visitor.client.get(address).status_code == 405


def test_who_has_not_come_in_sees_the_door(shop: ShopEnvironment, tmp_path: Path) -> None:
    visitor = Visitor(Visits(shop_of(shop, tmp_path)))
    assert "Come in" in visitor.client.get("/shop").text
    assert "Come in" in visitor.client.post("/shop/act", data={"action": "search mug"}).text


def test_who_leaves_is_gone(visitor: Visitor) -> None:
    visitor.send("/shop/leave")
    assert "Come in" in visitor.client.get("/shop").text


def test_the_cookie_is_for_the_server_alone(shop: ShopEnvironment, tmp_path: Path) -> None:
    visitor = Visitor(Visits(shop_of(shop, tmp_path)))
    answer = visitor.client.post("/visit", follow_redirects=False)
    said = answer.headers["Set-Cookie"].lower()
    assert "httponly" in said
    assert "samesite=lax" in said
    assert visitor.client.base_url == LOCAL


# WebShop


REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "webshop-small"


@pytest.fixture(
    scope="module",
    params=quick_first(["generated:1000", str(REAL_DATA)]),
    ids=["generated", "real"],
)
def data(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    """Options for the data of a WebShop."""
    if request.param == str(REAL_DATA) and not REAL_DATA.exists():
        pytest.skip(f"the recorded WebShop data is not at {REAL_DATA}")
    store = tmp_path_factory.mktemp("store")
    return {"data": request.param, "store": store, "split_scheme": "product"}


@pytest.mark.parametrize("observation", quick_first(["compact", "text", "text_rich"]))
def test_webshop_is_shopped_with_its_options_and_every_page(
    observation: str, data: Mapping[str, Any], tmp_path: Path
) -> None:
    environment = WebShopEnvironment(observation=observation, **data)
    task = environment.tasks("train")[0]
    visitor = Visitor(Visits(shop_of(environment, tmp_path)))
    visitor.come_in()

    def press(words: str) -> None:
        visitor.press(next(each for each in visitor.buttons if words in each))

    visitor.search(f"[{task.instruction.split(',')[0]}]")
    press("next")
    press("prev")
    visitor.press(visitor.buttons[2])  # after those for a new search and the next page
    for sub_page in ("description", "features", "reviews"):
        press(sub_page)
        press("prev")
    num_groups = visitor.page.count("<fieldset>")
    for number in range(num_groups):
        group = re.findall(r"<fieldset>(.*?)</fieldset>", visitor.page, re.DOTALL)[number]
        action = re.search(r'name="action"[^>]* value="([^"]*)"', group)
        assert action
        visitor.press(unescape(action[1]))
    assert visitor.page.count('aria-pressed="true"') == num_groups
    press("buy now")
    assert "not possible" not in visitor.text
    expected = directly(environment, task, visitor.actions)
    assert reward_shown(visitor) == float(f"{expected:.2f}")


def test_the_parts_of_webshops_score_make_it(data: Mapping[str, Any], tmp_path: Path) -> None:
    visitor = Visitor(Visits(shop_of(WebShopEnvironment(**data), tmp_path)))
    visitor.come_in()
    visitor.search("blanket machine washable")
    visitor.press(visitor.buttons[2])
    visitor.press("click buy now")
    *weighted, kind = re.findall(r'<td class="n">([^<]*)</td>', visitor.page)
    products = [[float(each) for each in part.split(" × ")] for part in weighted]
    total = sum(share * weight for share, weight in products) * float(kind.removeprefix("× "))
    assert reward_shown(visitor) == pytest.approx(total, abs=0.02)  # each is shown with two digits
