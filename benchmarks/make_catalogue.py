"""Writes the shop's catalogue: 497 generated products in 8 categories, the same on every machine.

A title is a style, a material or both before a noun. Choices are ordered by `derive_seed` of their
text, so no generator's stream is involved. A fifth of the products of each category is
held out (split "test") such that every word of a held-out title also stands in training titles: a
held-out product is a new combination, not a new word.

Run `python -m benchmarks.make_catalogue [path]` to write the file again.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_apo.environments.shop import catalogue
from ragen_apo.environments.shop.search import normalise
from ragen_apo.files import write_text_atomically
from ragen_apo.seeding import derive_seed

NUM_PRODUCTS = 497
NUM_TEST_PRODUCTS = 100
DEFAULT_PATH = Path(catalogue.__file__).with_name("catalogue.json")

_SHARE_OF_LONG_TITLES = 0.4
_MIN_TRAINING_TITLES_PER_WORD = 2
_COLOURS = ("black", "white", "blue", "green", "red", "grey", "brown", "silver")
_PLAIN_MATERIALS = {"books": "paper", "electronics": "plastic"}
_TOPICS = {"Travel", "Garden", "History", "Science", "Crime", "Family"}


@dataclass(frozen=True)
class _Category:
    name: str
    prices: tuple[int, int]
    styles: tuple[str, ...]
    nouns: dict[str, tuple[str, ...]]
    """Each noun with the materials, colours or topics that make sense for it."""


_LEATHER = ("Leather", "Suede", "Canvas")
_GADGET = ("Black", "Silver", "White")
_CLOTH = ("Cotton", "Wool", "Linen")
_FABRIC = ("Cotton", "Linen", "Denim")
_GYM = ("Rubber", "Steel", "Black")
_HARD = ("Wooden", "Glass", "Brass")
_TABLEWARE = ("Ceramic", "Glass", "Steel")

CATEGORIES = (
    _Category(
        "shoes",
        (25, 140),
        ("Classic", "Vintage", "Casual", "Premium", "Light", "Modern"),
        {
            "Sneaker": ("Leather", "Canvas", "White"),
            "Running Shoe": ("Rubber", "Black", "White"),
            "Boot": ("Leather", "Suede", "Rubber"),
            "Hiking Boot": ("Leather", "Brown", "Black"),
            "Sandal": ("Leather", "Rubber", "Brown"),
            "Loafer": _LEATHER,
            "Slipper": ("Wool", "Cotton", "Suede"),
            "Dress Shoe": ("Leather", "Black", "Brown"),
            "Clog": ("Wooden", "Rubber", "Leather"),
            "Moccasin": _LEATHER,
        },
    ),
    _Category(
        "electronics",
        (20, 450),
        ("Wireless", "Portable", "Compact", "Smart", "Premium", "Modern"),
        {
            "Headphone": _GADGET,
            "Speaker": _GADGET,
            "Keyboard": _GADGET,
            "Charger": _GADGET,
            "Camera": _GADGET,
            "Monitor": _GADGET,
            "Tablet": _GADGET,
            "Phone": _GADGET,
            "Mouse": _GADGET,
            "Microphone": _GADGET,
        },
    ),
    _Category(
        "apparel",
        (12, 120),
        ("Classic", "Casual", "Soft", "Light", "Vintage", "Modern"),
        {
            "Shirt": _FABRIC,
            "Jacket": ("Leather", "Denim", "Wool"),
            "Rain Jacket": ("Blue", "Green", "Black"),
            "Sweater": _CLOTH,
            "Hoodie": ("Cotton", "Black", "Blue"),
            "Dress": _FABRIC,
            "Skirt": _FABRIC,
            "Pants": _FABRIC,
            "Vest": ("Denim", "Wool", "Leather"),
            "Sock": _CLOTH,
        },
    ),
    _Category(
        "fitness",
        (8, 260),
        ("Portable", "Compact", "Premium", "Light", "Classic", "Smart"),
        {
            "Dumbbell": _GYM,
            "Kettlebell": _GYM,
            "Yoga Mat": ("Rubber", "Cotton", "Blue"),
            "Jump Rope": ("Leather", "Steel", "Black"),
            "Weight Bench": ("Steel", "Leather", "Black"),
            "Resistance Band": ("Rubber", "Blue", "Black"),
            "Exercise Ball": ("Rubber", "Blue", "Green"),
            "Gym Bag": ("Canvas", "Leather", "Black"),
            "Water Bottle": ("Steel", "Glass", "Blue"),
            "Treadmill": ("Black", "Silver", "Steel"),
        },
    ),
    _Category(
        "home",
        (10, 600),
        ("Classic", "Modern", "Vintage", "Soft", "Premium", "Compact"),
        {
            "Blanket": _CLOTH,
            "Pillow": _CLOTH,
            "Curtain": ("Cotton", "Linen", "White"),
            "Rug": ("Wool", "Cotton", "Blue"),
            "Lamp": _HARD,
            "Desk Lamp": ("Brass", "Black", "White"),
            "Mirror": _HARD,
            "Vase": ("Ceramic", "Glass", "Brass"),
            "Clock": _HARD,
            "Sofa": ("Leather", "Linen", "Grey"),
        },
    ),
    _Category(
        "accessories",
        (9, 210),
        ("Classic", "Casual", "Vintage", "Premium", "Travel", "Compact"),
        {
            "Watch": ("Leather", "Silver", "Steel"),
            "Belt": _LEATHER,
            "Wallet": _LEATHER,
            "Backpack": ("Canvas", "Leather", "Black"),
            "Travel Bag": ("Canvas", "Leather", "Black"),
            "Hat": ("Wool", "Cotton", "Linen"),
            "Scarf": ("Wool", "Cotton", "Red"),
            "Sunglasses": ("Black", "Brown", "Silver"),
            "Umbrella": ("Black", "Red", "Blue"),
            "Bracelet": ("Leather", "Silver", "Brass"),
        },
    ),
    _Category(
        "kitchen",
        (6, 180),
        ("Classic", "Modern", "Compact", "Premium", "Deluxe", "Portable"),
        {
            "Pan": ("Steel", "Copper", "Ceramic"),
            "Knife": ("Steel", "Ceramic", "Black"),
            "Kettle": ("Steel", "Copper", "Glass"),
            "Mug": _TABLEWARE,
            "Bowl": ("Ceramic", "Glass", "Wooden"),
            "Plate": _TABLEWARE,
            "Toaster": ("Steel", "Black", "White"),
            "Blender": ("Glass", "Black", "White"),
            "Teapot": ("Ceramic", "Glass", "Copper"),
            "Cutting Board": ("Wooden", "Glass", "White"),
        },
    ),
    _Category(
        "books",
        (5, 60),
        ("Classic", "Modern", "Vintage", "Deluxe", "Illustrated", "Pocket"),
        {
            "Cookbook": ("Travel", "Garden", "Family"),
            "Novel": ("Crime", "History", "Family"),
            "Story": ("Crime", "Travel", "Family"),
            "Atlas": ("Travel", "History", "Science"),
            "Guide": ("Travel", "Garden", "Science"),
            "Journal": ("Travel", "Garden", "Science"),
            "Dictionary": ("Science", "History", "Garden"),
            "Biography": ("Family", "Science", "Crime"),
            "Comic": ("Crime", "Science", "History"),
            "Planner": ("Garden", "Travel", "Family"),
        },
    ),
)


def _shuffled(items: Iterable[Any], *purpose: str) -> list[Any]:
    """The items in an order that depends on nothing but themselves and the purpose."""
    return sorted(items, key=lambda item: derive_seed("catalogue", *purpose, str(item)))


def _titles_of_noun(category: _Category, noun: str) -> Iterator[str]:
    """All titles of a noun, short and long ones mixed at a fixed share."""
    materials = category.nouns[noun]
    short = [f"{word} {noun}" for word in (*category.styles, *materials) if word not in noun]
    long = [f"{style} {material} {noun}" for style in category.styles for material in materials]
    if " " in noun:
        long = []
    short, long = _shuffled(short, "short"), _shuffled(long, "long")
    num_long = 0
    for count, title in enumerate(short, 1):
        yield title
        if long and num_long < count * _SHARE_OF_LONG_TITLES / (1 - _SHARE_OF_LONG_TITLES):
            num_long += 1
            yield long.pop()
    yield from long


def _titles_of_category(
    category: _Category, num_titles: int, taken: set[frozenset[str]]
) -> list[str]:
    """Takes titles from the nouns in turn and leaves out those that search could not tell apart."""
    sources = [_titles_of_noun(category, noun) for noun in category.nouns]
    titles: list[str] = []
    while len(titles) < num_titles:
        for source in sources:
            title = next(title for title in source if normalise(title) not in taken)
            taken.add(normalise(title))
            titles.append(title)
    return titles[:num_titles]


def _shares(total: int, sizes: Sequence[int]) -> list[int]:
    """Divides `total` in proportion to `sizes` by largest remainders, earlier entries first."""
    exact = [total * size / sum(sizes) for size in sizes]
    shares = [int(share) for share in exact]
    by_remainder = sorted(
        range(len(sizes)), key=lambda index: (shares[index] - exact[index], index)
    )
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _held_out(titles_by_category: Sequence[Sequence[str]]) -> set[str]:
    """Titles of the test split; every word keeps at least two training titles."""
    num_training_titles = Counter(
        word for titles in titles_by_category for title in titles for word in title.split()
    )
    held_out: set[str] = set()
    shares = _shares(NUM_TEST_PRODUCTS, [len(titles) for titles in titles_by_category])
    for titles, share in zip(titles_by_category, shares, strict=True):
        chosen: list[str] = []
        for title in _shuffled(titles, "split"):
            words = title.split()
            spare = min(num_training_titles[word] for word in words)
            if len(chosen) < share and spare > _MIN_TRAINING_TITLES_PER_WORD:
                chosen.append(title)
                num_training_titles.subtract(words)
        held_out |= set(chosen)
    return held_out


def _attributes(category: _Category, title: str) -> dict[str, str]:
    """Colour and material, in agreement with the title."""
    words = title.lower().split()
    noun = next(noun for noun in category.nouns if title.endswith(f" {noun}"))
    named = [word.lower() for word in category.nouns[noun] if word not in _TOPICS]
    materials = [word for word in named if word not in _COLOURS]
    materials = materials or [_PLAIN_MATERIALS.get(category.name, "nylon")]
    said_colours = [word for word in words if word in _COLOURS]
    said_materials = [word for word in words if word in materials]
    return {
        "colour": (said_colours or _shuffled(_COLOURS, "colour", title))[0],
        "material": (said_materials or _shuffled(materials, "material", title))[0],
    }


def make_catalogue() -> dict[str, Any]:
    """The catalogue as a JSON value; ids are a fixed shuffle of 1 to 497."""
    taken: set[frozenset[str]] = set()
    sizes = _shares(NUM_PRODUCTS, [1] * len(CATEGORIES))
    titles_by_category = [
        _titles_of_category(category, size, taken)
        for category, size in zip(CATEGORIES, sizes, strict=True)
    ]
    held_out = _held_out(titles_by_category)
    category_of = {
        title: category
        for category, titles in zip(CATEGORIES, titles_by_category, strict=True)
        for title in titles
    }
    products: list[dict[str, Any]] = []
    for product_id, title in enumerate(_shuffled(category_of, "ids"), 1):
        category = category_of[title]
        low, high = category.prices
        products.append(
            {
                "id": product_id,
                "title": title,
                "category": category.name,
                "price": low + derive_seed("catalogue", "price", title) % (high - low + 1),
                "attributes": _attributes(category, title),
                "split": "test" if title in held_out else "train",
            }
        )
    return {"name": "catalogue-497", "products": products}


def catalogue_text(content: dict[str, Any]) -> str:
    """The file: JSON with one product a line, so that a change reads well as a difference."""
    lines = ",\n".join(f"    {json.dumps(product)}" for product in content["products"])
    return f'{{\n  "name": {json.dumps(content["name"])},\n  "products": [\n{lines}\n  ]\n}}\n'


def main(arguments: Sequence[str]) -> None:
    """Writes the catalogue to the path given, or to the package's own file."""
    write_text_atomically(
        Path(arguments[0]) if arguments else DEFAULT_PATH, catalogue_text(make_catalogue())
    )


if __name__ == "__main__":
    main(sys.argv[1:])
