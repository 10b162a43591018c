"""The shop's tasks: one product to be bought, asked for in one of several phrasings.

A product's id decides its phrasing. The last phrasing replaces words of the title by a synonym
where one is known, so that comparing spellings does not solve it.
"""

import functools
import re

from ragen_apo.environments.shop.catalogue import Catalogue, Product
from ragen_apo.environments.shop.search import SYNONYMS
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task, make_task

PHRASINGS = (
    "User wants to buy {title}.",
    "User is looking for {title}.",
    "Find {title} and buy it.",
    "User needs {title}.",
    "Please order {synonym}.",
)

PHRASING_WORDS = frozenset(
    word for phrasing in PHRASINGS for word in re.findall(r"[a-z]+(?!\w*})", phrasing.lower())
)
"""Words of an instruction that do not describe the product."""

SPLITS = ("train", "test", "all")


def with_synonyms(title: str) -> str:
    """The title in lower case with every phrase that has a synonym replaced by it.

    `Classic Running Shoe` becomes `classic sneaker`, and `Classic Sneaker` becomes
    `classic running shoe`. Words are compared as they stand; a plural has no synonym here.
    """
    text = f" {title.lower()} "
    for word, stands_for in SYNONYMS.items():
        phrase = " ".join(stands_for)
        if f" {word} " in text:
            text = text.replace(f" {word} ", f" {phrase} ")
        else:
            text = text.replace(f" {phrase} ", f" {word} ")
    return text.strip()


def instruction(product: Product, phrasing: int) -> str:
    """The user's request, in words that suffice to find the product."""
    return PHRASINGS[phrasing].format(
        title=product.title.lower(), synonym=with_synonyms(product.title)
    )


def phrasing_of(product: Product) -> int:
    """The phrasing a product's only task uses."""
    return derive_seed("shop", "phrasing", product.product_id) % len(PHRASINGS)


@functools.lru_cache(maxsize=16)
def make_tasks(catalogue: Catalogue, every_phrasing: bool) -> dict[str, tuple[Task, ...]]:
    """The tasks of each split in catalogue order; with every phrasing all products by turns, so
    that the first tasks are about as many products.
    """
    tasks = [
        make_task(
            environment="shop",
            instruction=instruction(product, phrasing),
            split=product.split,
            category=product.category,
            payload={"product_id": product.product_id, "phrasing": phrasing},
        )
        for number in range(len(PHRASINGS) if every_phrasing else 1)
        for product in catalogue.products
        for phrasing in (number if every_phrasing else phrasing_of(product),)
    ]
    return {
        split: tuple(task for task in tasks if split in ("all", task.split)) for split in SPLITS
    }
