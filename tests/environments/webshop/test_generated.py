import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.generated import (
    generated_asin,
    product_record,
    write_generated_files,
)

FIRST_ASIN = "B0DDPM4000"
FIRST_TITLE = "Harbor Home Large Vintage Bamboo Dining Table with Non Slip for women, Kitchen Table"
Make = Callable[..., WebShopEnvironment]


def test_a_larger_catalogue_begins_with_the_smaller_one(tmp_path: Path) -> None:
    for size in (20, 50):
        (tmp_path / str(size)).mkdir()
        write_generated_files(tmp_path / str(size), size)
    small = json.loads((tmp_path / "20" / "items_shuffle.json").read_text())
    large = json.loads((tmp_path / "50" / "items_shuffle.json").read_text())
    assert large[:20] == small
    assert len(large) == 50


def test_the_first_product_is_what_it_was() -> None:
    """A change of the generator changes stored data: raise GENERATOR_VERSION."""
    record = product_record(0)
    assert record["asin"] == generated_asin(0) == FIRST_ASIN
    assert record["name"] == FIRST_TITLE


def test_ids_are_distinct_and_of_upstreams_length() -> None:
    asins = {generated_asin(number) for number in range(20_000)}
    assert len(asins) == 20_000
    assert {len(asin) for asin in asins} == {10}


def test_options_have_values_that_no_agent_can_know_by_heart() -> None:
    """In the first version 23 colors and 41 sizes were all there was."""
    offered: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in map(product_record, range(1000)):
        for name, values in (record["customization_options"] or {}).items():
            chosen = [each["value"] for each in values]
            assert len(set(chosen)) == len(chosen) >= 2
            offered[name].update(chosen)
    assert {"Size", "Color", "Scent", "Flavor Name", "Fit Type"} < set(offered)
    values = offered["Size"] + offered["Color"]
    assert not any("{" in value for value in values)
    once = sum(number == 1 for number in values.values())
    assert once > 900
    assert once > 0.6 * len(values)


@pytest.mark.slow
def test_products_share_words_and_titles_are_nearly_unique(make: Make) -> None:
    catalog = make(data="generated:1000").catalog
    words = Counter(
        w
        for p in map(catalog.product, range(catalog.num_products))
        for w in set(p.title.lower().split())
    )
    assert sum(count >= 30 for count in words.values()) > 60
    titles = Counter(product.title for product in map(catalog.product, range(catalog.num_products)))
    assert len(titles) > 950


@pytest.mark.slow
def test_search_is_not_trivial_and_not_hopeless(make: Make) -> None:
    environment = make(data="generated:1000")
    ranks = []
    for task in environment.tasks("test")[:200]:
        found = environment.catalog.search(task.instruction.lower())
        wanted = environment.catalog.number_of(task.payload["asin"])
        ranks.append(found.index(wanted) if wanted in found else 50)
    assert 0.2 < sum(rank == 0 for rank in ranks) / 200 < 0.9
    assert 0.5 < sum(rank < 10 for rank in ranks) / 200 < 1
