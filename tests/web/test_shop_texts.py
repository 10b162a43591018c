"""Texts of an environment in the pages of a shop: whole, never markup, and sent back unchanged."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.web.shop.visits import Visits
from tests.web.shopping import Visitor, shop_of

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)> \"'{{ 7 }} &lt;"
ODD_VALUES = [
    MARKUP,
    "two  blanks",
    "a\u00adb",  # a soft hyphen, which no page shows
    "\u202eright to left",
    "caf\u00e9 \U0001f600",
    "buy now",
    "search",
    "[in brackets]",
    "#2",
    "x" * 3_000,
]


def assert_no_markup(page: str) -> None:
    assert "<script" not in page
    assert "<img" not in page


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    """A catalogue of two products with markup wherever text may stand."""
    products = [
        {
            "id": number,
            "title": f"{MARKUP} {word}",
            "category": MARKUP,
            "price": 5.0,
            "attributes": {MARKUP: MARKUP},
            "split": split,
        }
        for number, word, split in ((1, "mug", "train"), (2, "lamp", "test"))
    ]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"name": "odd", "products": products}).replace("&lt;", "&lt"))
    return path


def test_markup_in_a_catalogue_stays_text_on_every_page(catalogue: Path, tmp_path: Path) -> None:
    environment = ShopEnvironment(catalogue=str(catalogue))
    visitor = Visitor(Visits(shop_of(environment, tmp_path)))
    for show in (
        visitor.come_in,
        lambda: visitor.search("mug lamp"),
        lambda: visitor.press("click 2"),
        lambda: visitor.press("buy 1"),
    ):
        assert_no_markup(show())
    assert "Exactly what was asked for" in visitor.text


@pytest.fixture
def odd_webshop(tmp_path: Path) -> WebShopEnvironment:
    """A WebShop with one product, which has odd texts everywhere."""
    data = tmp_path / "data"
    data.mkdir()
    record: dict[str, Any] = {
        "asin": "B000000001",
        "name": f"Odd shirt {MARKUP}",
        "full_description": f"described as {MARKUP}",
        "pricing": "$5.0",
        "small_description": [f"a feature {MARKUP}"],
        "images": [],
        "category": "fashion",
        "query": "shirts",
        "product_category": "A › B",
        "customization_options": {f"kind {MARKUP}": [{"value": value} for value in ODD_VALUES]},
    }
    labels = {"instruction": f"Find me {MARKUP}", "instruction_attributes": ["odd"]}
    (data / "items_shuffle_1.json").write_text(json.dumps([record]))
    (data / "items_ins_v2_1.json").write_text(
        json.dumps({"B000000001": {"attributes": ["odd"], **labels}})
    )
    return WebShopEnvironment(
        data=data, store=tmp_path / "store", nouns="words", max_turns=None, payoff="binary"
    )


@pytest.mark.slow
def test_odd_options_of_webshop_stay_text_and_are_selected_exactly(
    odd_webshop: WebShopEnvironment, tmp_path: Path
) -> None:
    visitor = Visitor(Visits(shop_of(odd_webshop, tmp_path / "kept", split="test")))
    assert_no_markup(visitor.come_in())
    assert_no_markup(visitor.search("odd shirt"))
    assert_no_markup(visitor.press(visitor.buttons[-1]))
    for target in ("description", "features"):
        assert_no_markup(visitor.press(f"click {target}"))
        assert MARKUP in visitor.text
        visitor.press("click < prev")
    for number, _ in enumerate(ODD_VALUES):
        (group,) = re.findall(r"<fieldset>(.*?)</fieldset>", visitor.page, re.DOTALL)
        actions = re.findall(r'name="action"[^>]* value="([^"]*)"', group)
        assert len(actions) == len(ODD_VALUES)
        assert_no_markup(visitor.press(unescape(actions[number])))
        pressed = re.findall(r'aria-pressed="(\w+)"', visitor.page)
        assert [index for index, each in enumerate(pressed) if each == "true"] == [number]
    visitor.press("click buy now")
    assert_no_markup(visitor.page)
    assert "1 for a score of 1, otherwise 0" in visitor.text
