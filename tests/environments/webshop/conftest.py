"""Catalogues for the tests: a generated one, and the real data where it lies beside the repo."""

from collections.abc import Callable
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
    """Environments on 200 generated products, unless told otherwise."""

    def build(**options: Any) -> WebShopEnvironment:
        return WebShopEnvironment(**{"data": "generated:200", "store": store, **options})

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
        recorded = {"price_seed": 7, "reward": "upstream", "nouns": "words"}
        return WebShopEnvironment(**{"data": str(real_data), "store": store, **recorded, **options})

    return build
