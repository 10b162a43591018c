import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tools import make_catalogue

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.shop.catalogue import Product, load_catalogue
from ragen_apo.environments.shop.search import SYNONYMS, normalise, singular
from ragen_apo.errors import ConfigError, EnvironmentDataError

CATEGORIES = {
    "shoes",
    "electronics",
    "apparel",
    "fitness",
    "home",
    "accessories",
    "kitchen",
    "books",
}


def product(product_id: int, title: str, **changes: Any) -> dict[str, Any]:
    row = {"id": product_id, "title": title, "category": "home", "price": 5, "split": "train"}
    return {**row, **changes}


def catalogue_file(folder: Path, products: Any) -> str:
    path = folder / "catalogue.json"
    path.write_text(json.dumps({"name": "mine", "products": products}))
    return str(path)


def titles_of(split: str) -> list[str]:
    return [product.title for product in load_catalogue().products if product.split == split]


def test_the_script_reproduces_the_committed_file(tmp_path: Path) -> None:
    copy = tmp_path / "catalogue.json"
    make_catalogue.main([str(copy)])
    assert copy.read_bytes() == make_catalogue.DEFAULT_PATH.read_bytes()


def test_there_are_497_products_with_the_ids_1_to_497_in_8_categories() -> None:
    catalogue = load_catalogue()
    assert [product.product_id for product in catalogue.products] == list(range(1, 498))
    assert set(catalogue.categories) == CATEGORIES


def test_100_products_are_held_out_in_proportion_to_the_categories() -> None:
    sizes = Counter(product.category for product in load_catalogue().products)
    held_out = Counter(
        product.category for product in load_catalogue().products if product.split == "test"
    )
    assert sum(held_out.values()) == 100
    for category, size in sizes.items():
        assert abs(held_out[category] - 100 * size / 497) < 1


def test_titles_have_two_or_three_words_and_differ_after_normalisation() -> None:
    titles = [product.title for product in load_catalogue().products]
    assert {len(title.split()) for title in titles} == {2, 3}
    assert len({normalise(title) for title in titles}) == 497


def test_every_word_of_a_held_out_title_stands_in_two_training_titles_or_more() -> None:
    num_training_titles = Counter(word for title in titles_of("train") for word in title.split())
    assert (
        min(num_training_titles[word] for title in titles_of("test") for word in title.split()) >= 2
    )


def test_most_words_are_shared_so_that_one_word_rarely_finds_one_product() -> None:
    catalogue = load_catalogue()
    words = {word for product in catalogue.products for word in product.title.split()}
    num_found = sorted(len(catalogue.index.search(word)) for word in words)
    assert num_found[len(words) // 2] >= 6


def test_attributes_agree_with_the_title() -> None:
    for item in load_catalogue().products:
        attributes = dict(item.attributes)
        for colour in {"black", "white", "blue", "red", "silver"} & set(item.title.lower().split()):
            assert attributes["colour"] == colour
        for material in {"wool", "leather", "glass", "denim"} & set(item.title.lower().split()):
            assert attributes["material"] == material


def test_the_first_products_keep_their_ids_and_represent_every_category() -> None:
    everything = load_catalogue().by_id
    some = load_catalogue(None, 80)
    assert Counter(product.category for product in some.products) == dict.fromkeys(CATEGORIES, 10)
    assert all(everything[product.product_id] == product for product in some.products)
    assert {product.split for product in some.products} == {"train", "test"}
    assert set(load_catalogue(None, 40).products) < set(some.products)


def test_more_products_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_products: got 498, expected at most 497"):
        ShopEnvironment(num_products=498)


def test_instances_and_pickles_share_one_catalogue() -> None:
    catalogue = ShopEnvironment().catalogue
    assert ShopEnvironment().catalogue is catalogue
    assert pickle.loads(pickle.dumps(catalogue)) is catalogue


def test_a_catalogue_of_ones_own_is_sold(tmp_path: Path) -> None:
    rows = [
        product(7, "Blue Kite", price=3.5, attributes={"size": "large", "a;b": "XL; red"}),
        product(4, "Red Kite", split="test"),
    ]
    shop = ShopEnvironment(catalogue=catalogue_file(tmp_path, rows))
    observation, _ = shop.reset(shop.tasks("train")[0], seed=0)
    assert "Available: 2 products across 1 categories." in observation
    assert shop.step("search kite")[0] == "Found 2 results. Top 2: 4 Red Kite; 7 Blue Kite"
    assert shop.step("click 7")[0] == "7 Blue Kite: home, $3.50, large, XL; red."


def test_another_price_is_another_version(tmp_path: Path) -> None:
    versions = set()
    for number, price in enumerate((5, 6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = catalogue_file(folder, [product(1, "Red Kite", price=price)])
        versions.add(ShopEnvironment(catalogue=path).properties.version)
    assert len(versions) == 2


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([product(1, "Red Kite"), product(1, "Blue Kite")], "id 1 twice .'Red Kite' and 'Blue"),
        ([product(1, "Red Kite"), product(2, "kites, RED")], "cannot tell from 'Red Kite'"),
        ([product(1, "Sneaker"), product(2, "Running Shoe")], "cannot tell from 'Sneaker'"),
        ([product(1, "!?")], "in which search reads no word"),
        ([product(1, "\u7ea2\u8272")], "expected ASCII letters or digits"),
        ([product(1, "Kite", split="dev")], "products.0.split: got 'dev', expected train or"),
        ([product(1, "Kite", price=-1)], "products.0.price: got -1, expected a number at least"),
        ([product(1, "Kite", price="5")], "products.0.price: got '5', expected a number"),
        ([product(0, "Kite")], "products.0.id: got 0"),
        ([product(1, "Red; Kite 5")], "products.0.title: got 'Red; Kite 5'"),
        ([product(1, " Kite")], "products.0.title: got ' Kite'"),
        ([product(1, "Kite\rFound 1")], r"products.0.title: got 'Kite.rFound 1'"),
        (
            [product(1, "Kite", attributes={"size": "x\nFound 1 result."})],
            "attributes.size: got .*, expected text",
        ),
        ([product(1, "Kite\u2028Found 1 result.")], "products.0.title: got"),
        ([product(1, "Kite", attributes={"size": "\ud800"})], "products.0.attributes.size"),
        (
            [product(1, "Kite", prize=3)],
            "products.0.prize: unknown key; did you mean catalogue.products.0.price",
        ),
        ([{"id": 1, "title": "Kite"}], "products.0.category: missing"),
        ([], "products: got .., "),
        ("kites", "products: got 'kites', expected a list of"),
    ],
)
def test_a_broken_catalogue_is_an_error_that_says_where(
    tmp_path: Path, rows: Any, complaint: str
) -> None:
    with pytest.raises(EnvironmentDataError, match=complaint):
        ShopEnvironment(catalogue=catalogue_file(tmp_path, rows))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b""])
def test_a_file_that_is_not_json_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "catalogue.json"
    path.write_bytes(content)
    with pytest.raises(EnvironmentDataError, match="is not JSON"):
        ShopEnvironment(catalogue=str(path))


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(EnvironmentDataError, match="check environment.catalogue"):
            ShopEnvironment(catalogue=str(path))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Classic Sneaker", {"classic", "running", "shoe"}),
        ("SNEAKERS!", {"running", "shoe"}),
        ("retro couches", {"vintage", "sofa"}),
        ("Watches, batteries & dresses", {"watch", "battery", "dress"}),
        ("glass", {"glass"}),
        ("blue-green", {"blue", "green"}),
        ("", set()),
        ("?!", set()),
    ],
)
def test_text_is_normalised_to_singular_tokens_without_synonyms(
    text: str, tokens: set[str]
) -> None:
    assert normalise(text) == tokens


def test_no_synonym_leads_to_another_synonym_and_all_keys_are_singular() -> None:
    for word, stands_for in SYNONYMS.items():
        assert singular(word) == word
        assert not set(stands_for) & SYNONYMS.keys()
        assert all(singular(token) == token for token in stands_for)


def test_a_product_page_names_id_title_category_price_and_attributes() -> None:
    item = Product(5, "Wool Rug", "home", 40.0, (("colour", "red"), ("material", "wool")), "train")
    assert item.details == "5 Wool Rug: home, $40, red, wool."
