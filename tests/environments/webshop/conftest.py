"""Catalogues for the tests: generated, of one product, and the real data where it lies beside."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment

REAL_DATA = Path(__file__).resolve().parents[4] / "shared" / "webshop-small"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("webshop-store")


@pytest.fixture(scope="session")
def make(store: Path) -> Callable[..., WebShopEnvironment]:
    """Environments on 200 generated products without a turn limit, unless told otherwise."""

    def build(**options: Any) -> WebShopEnvironment:
        usual = {"data": "generated:200", "store": store, "max_turns": None}
        return WebShopEnvironment(**{**usual, **options})

    return build


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not (REAL_DATA / "items_shuffle_1000.json").exists():
        pytest.skip(f"the recorded WebShop data is not at {REAL_DATA}")
    return REAL_DATA


@pytest.fixture(scope="session")
def make_real(store: Path, real_data: Path) -> Callable[..., WebShopEnvironment]:
    """Environments on the real small data with the recordings' prices and rules."""

    def build(**options: Any) -> WebShopEnvironment:
        recorded = {"price_seed": 7, "reward": "upstream", "nouns": "words", "max_turns": None}
        return WebShopEnvironment(**{"data": str(real_data), "store": store, **recorded, **options})

    return build


@pytest.fixture
def shop_of(tmp_path: Path) -> Callable[..., WebShopEnvironment]:
    """Shops with the given records of products; the goal is about the first."""

    def build(products: Sequence[Mapping[str, Any]], **options: Any) -> WebShopEnvironment:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        fields = {
            "full_description": "", "pricing": "$5.0", "small_description": [], "images": [],
            "category": "fashion", "query": "shirts", "product_category": "A › B",
            "customization_options": {},
        }  # fmt: skip
        records = [fields | dict(product) for product in products]
        labels = {"attributes": ["odd"], "instruction": "Find me odd shirts"}
        (data / "items_shuffle_1.json").write_text(json.dumps(records))
        (data / "items_ins_v2_1.json").write_text(
            json.dumps({records[0]["asin"]: {**labels, "instruction_attributes": ["odd"]}})
        )
        return WebShopEnvironment(data=data, store=tmp_path / "store", nouns="words", **options)

    return build


@pytest.fixture
def one_product(shop_of: Callable[..., WebShopEnvironment]) -> Callable[..., WebShopEnvironment]:
    """Shops with a single shirt, B000000001, that has the given groups of options."""

    def build(groups: Mapping[str, Sequence[str]], **options: Any) -> WebShopEnvironment:
        choices = {name: [{"value": value} for value in values] for name, values in groups.items()}
        shirt = {"asin": "B000000001", "name": "Odd shirt", "customization_options": choices}
        return shop_of([shirt], **options)

    return build
