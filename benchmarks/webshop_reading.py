"""How far a rule gets in WebShop on new products by reading: what bounds a teacher for an agent.

    python -m benchmarks.webshop_reading --data FOLDER [--split test] [--per-product 4]

Each rule sends the first query of `careful` and buys one of the first results, with the options
that the request names. It prefers, one after the other: a result that has these options, one
within the price limit, one whose text lacks the fewest words of the request, the first. The rules
differ in how many results they compare, in whether they look at the price, and in the text that
they read. They read as if that took no turns, so they say what the pages tell and not what an
agent can do within its turns.

At most so many goals of every product of the split, under `corrected`. Prints a line a rule: the
success of a product, averaged over products, with its standard error, and the share of the goals.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.webshop_baselines import by_product
from benchmarks.webshop_rewards import replay

from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.catalog import Product
from ragen_apo.environments.webshop.goals import goal_book
from ragen_apo.environments.webshop.scripted import (
    asked_options,
    instruction_queries,
    searchable,
)
from ragen_apo.environments.webshop.visit import PAGE_SIZE
from ragen_apo.types import Task

TEXTS: dict[str, Callable[[Product], str]] = {
    "nothing": lambda _: "",
    "title": lambda product: product.title,
    "title, features": lambda product: " ".join([product.title, *product.bullet_points]),
}
_WORD = re.compile(r"[a-z0-9']+")
_LIMIT = re.compile(r"price lower than ([\d.]+) dollars")
_COMMON = re.compile("an?|and|as|at|by|find|for|from|i[ns]?|it|me|my|o[nr]|of|that|the|to|with")


def words(text: str) -> list[str]:
    """The words that say something, without a plural's s."""
    found = (word for word in _WORD.findall(text.lower()) if not _COMMON.fullmatch(word))
    return [word[:-1] if word.endswith("s") and len(word) > 3 else word for word in found]


def purchase(
    shop: WebShopEnvironment, task: Task, *, num_results: int, price: bool, text: str
) -> list[str]:
    """The actions of a rule."""
    asked = asked_options(task.instruction)
    bare, query = instruction_queries(task.instruction, asked)[:2]
    limit = (
        float(found[1]) if price and (found := _LIMIT.search(task.instruction)) else float("inf")
    )
    wanted = set(words(bare))

    def badness(product: Product) -> tuple[bool, bool, int]:
        lacks_option = any(value not in product.options.get(name, ()) for name, value in asked)
        lacking = len(wanted - set(words(TEXTS[text](product)))) if text != "nothing" else 0
        return lacks_option, product.prices[0] > limit, lacking

    search = f"search {searchable(query)}"
    shop.reset(task, seed=0)
    shop.step(search)
    shown = shop.visit.shown[:num_results]
    if not shown:
        return [search]
    best = min(shown, key=lambda each: badness(shop.catalog.product(each)))
    opened = f"click {shop.visit.shown.index(best) + 1}"
    shop.step(opened)
    offered = shop.option_targets()
    selected = [f"click {offered[option]}" for option in asked if option in offered]
    return [search, opened, *selected, "click buy now"]


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="generated", help="folder with upstream's files")
    parser.add_argument("--split", choices=["train", "validation", "test"], default="test")
    parser.add_argument("--per-product", type=int, default=4, help="goals of each product, at most")
    given = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as store:
        shop = WebShopEnvironment(data=given.data, store=Path(store), split_scheme="product")
        book = goal_book(shop.catalog, price_seed=shop.options.price_seed, kind=shop.options.goals)
        tasks = book.tasks(given.split, shop.options.split_scheme, per_product=given.per_product)
        print(f"{len(tasks)} goals of the split {given.split}")
        for num_results, price, text in itertools.product((4, PAGE_SIZE), (False, True), TEXTS):
            values = [
                replay(
                    shop,
                    task,
                    purchase(shop, task, num_results=num_results, price=price, text=text),
                )["corrected"]
                for task in tasks
            ]
            products = by_product(tasks, values)
            goals = 100 * sum(value >= 1 for value in values) / len(values)
            print(
                f"first {num_results:2}  {'price' if price else '     '}  reads {text:15}  "
                f"{products['by_product']} ± {products['standard_error']}%  "
                f"({goals:.1f}% of the goals)",
                flush=True,
            )


if __name__ == "__main__":
    main()
