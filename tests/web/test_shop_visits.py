"""Visits: everybody alone, no more than there is room for, and none for ever."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragen_apo.environments.frozen_lake import make_frozen_lake
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.errors import ConfigError
from ragen_apo.web.sessions import FullError
from ragen_apo.web.shop.visits import Shop, Visits
from tests.web.shopping import Visitor, shop_of


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return shop_of(ShopEnvironment(max_turns=6), tmp_path / "kept")


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.slow
def test_many_people_at_once_do_not_see_each_others_visits(shop: Shop) -> None:
    visits, num_people = Visits(shop), 8
    together = threading.Barrier(num_people)

    def shop_alone(person: int) -> None:
        visitor = Visitor(visits)
        visitor.come_in()
        goal = re.search(r"Goal (\d+) of", visitor.text)
        assert goal
        together.wait()
        for turn in range(4):
            visitor.search(f"person{person} turn{turn}")
            assert visitor.actions == [f"search person{person} turn{n}" for n in range(turn + 1)]
            others = set(re.findall(r"person\d+", visitor.page)) - {f"person{person}"}
            assert not others
        wanted = shop.goals[int(goal[1]) - 1].payload["product_id"]
        visitor.send("/shop/act", action=f"buy {wanted}")
        assert "Exactly what was asked for" in visitor.text

    with ThreadPoolExecutor(num_people) as people:
        for _ in people.map(shop_alone, range(num_people)):
            pass
    assert len(visits) == num_people


@pytest.mark.slow
def test_people_in_one_webshop_do_not_share_a_page(tmp_path: Path) -> None:
    environment = WebShopEnvironment(
        data="generated:1000", store=tmp_path / "store", split_scheme="product"
    )
    visits = Visits(shop_of(environment, tmp_path / "kept"))
    together = threading.Barrier(12)

    def shop_alone(person: int) -> None:
        visitor = Visitor(visits)
        visitor.come_in()
        together.wait()
        visitor.search(f"shirt person{person}")
        visitor.press(visitor.buttons[person % 10 + 2])
        opened = re.findall(r"<dt>Product id</dt><dd>(\w+)</dd>", visitor.page)
        visitor.press("click buy now")
        assert re.findall(r"<dt>Product id</dt><dd>(\w+)</dd>", visitor.page) == opened
        assert visitor.actions[0] == f"search shirt person{person}"
        assert len(visitor.actions) == 3

    with ThreadPoolExecutor(12) as people:
        list(people.map(shop_alone, range(12)))


def test_two_threads_in_one_visit_take_turns(shop: Shop) -> None:
    visits = Visits(shop)
    visitor = Visitor(visits)
    visitor.come_in()
    page, cookies = visitor.page_number, dict(visitor.client.cookies)

    def press(_: int) -> None:
        twin = Visitor(visits)
        twin.client.cookies.update(cookies)
        twin.send("/shop/act", action="search mug", page=page)

    with ThreadPoolExecutor(8) as hands:
        list(hands.map(press, range(8)))
    visitor.page = visitor.client.get("/shop").text
    assert visitor.actions == ["search mug"]


def test_everybody_begins_with_another_goal(shop: Shop) -> None:
    visits = Visits(shop)
    assert [visits.open().number for _ in range(3)] == [0, 1, 2]


def test_after_the_last_goal_comes_the_first(tmp_path: Path) -> None:
    shop = shop_of(ShopEnvironment(num_products=2), tmp_path, split="all")
    visits = Visits(shop)
    assert [visits.open().number for _ in range(4)] == [0, 1, 0, 1]


def test_a_full_shop_lets_nobody_in_until_somebody_leaves(shop: Shop) -> None:
    visits = Visits(shop, max_visits=2)
    first, _ = visits.open(), visits.open()
    with pytest.raises(FullError, match="2 people are here"):
        visits.open()
    late = Visitor(visits)
    answer = late.client.post("/visit")
    assert answer.status_code == 503
    assert "2 people are here" in answer.text
    visits.close(first.id)
    late.come_in()
    assert "The customer asks" in late.text


def test_an_idle_visit_ends_and_a_used_one_goes_on(shop: Shop) -> None:
    clock = Clock()
    visits = Visits(shop, max_idle_seconds=60, clock=clock)
    idle, used = visits.open(), visits.open()
    clock.now = 50
    assert visits.find(used.id) is used
    clock.now = 100
    assert visits.find(idle.id) is None
    assert visits.find(used.id) is used
    assert len(visits) == 1


def test_who_comes_back_too_late_is_told(shop: Shop) -> None:
    clock = Clock()
    visits = Visits(shop, max_idle_seconds=60, clock=clock)
    visitor = Visitor(visits)
    visitor.come_in()
    clock.now = 61
    assert "Your visit has ended" in visitor.client.get("/shop").text


@pytest.mark.parametrize("visit_id", ["", "guessed", "0", "\u20ac", "../.."])
def test_a_guessed_id_opens_no_visit(visit_id: str, shop: Shop) -> None:
    visits = Visits(shop)
    visits.open()
    assert visits.find(visit_id) is None


def test_ids_are_long_and_never_the_same(shop: Shop) -> None:
    visits = Visits(shop)
    ids = {visits.open().id for _ in range(100)}
    assert len(ids) == 100
    assert min(map(len, ids)) >= 32  # 24 random bytes in base64


def test_coming_in_again_ends_the_visit_before(shop: Shop) -> None:
    visits = Visits(shop)
    visitor = Visitor(visits)
    visitor.come_in()
    visitor.come_in()
    assert len(visits) == 1


def test_an_environment_that_is_no_shop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frozen_lake is no shop; expected shop or webshop"):
        shop_of(make_frozen_lake(), tmp_path)


def test_a_split_without_goals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the split 'nowhere' has no tasks"):
        shop_of(ShopEnvironment(), tmp_path, split="nowhere")
