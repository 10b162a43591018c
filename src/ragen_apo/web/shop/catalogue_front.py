"""The front of the catalogue shop, the environment `shop`.

What was found stays below an open product: every product can be opened and bought from everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragen_apo.environments.human.play import PlayedTurn
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.shop.catalogue import Product as CatalogueProduct
from ragen_apo.plural import counted
from ragen_apo.web.shop import display
from ragen_apo.web.shop.display import Button, Card, Results, RewardPart, ShopPage


class CatalogueFront:
    """The pages of one episode in the catalogue shop."""

    def __init__(self, environment: ShopEnvironment) -> None:
        self.environment = environment

    def page(self, *, is_over: bool) -> ShopPage:
        screen, catalogue = self.environment.screen, self.environment.catalogue
        if is_over:
            bought = screen.product and _product(screen.product, can_buy=False)
            return ShopPage(screen.query, product=bought)
        if not screen.query and screen.product is None:
            products = counted(len(catalogue.products), "product")
            categories = counted(len(catalogue.categories), "category", "categories")
            welcome = f"{products} in {categories}. What you search for is found by its title."
            return ShopPage(welcome=welcome)
        return ShopPage(
            screen.query,
            results=self._results() if screen.query else None,
            product=screen.product and _product(screen.product, can_buy=True),
        )

    def search(self, words: str) -> str:
        return f"search {words}"

    def bill(self, turns: Sequence[PlayedTurn], info: Mapping[str, Any]) -> tuple[RewardPart, ...]:
        """A line for each turn that earned or cost something of its own, and one for all turns."""
        each = self.environment.options.reward.turn
        lines = [
            RewardPart(f"Turn {number}", f"{turn.reward - each:+.2f}", _reason(turn, info))
            for number, turn in enumerate(turns, 1)
            if abs(turn.reward - each) > 1e-9
        ]
        count = counted(len(turns), "turn")
        return (*lines, RewardPart(count, f"{each * len(turns):+.2f}", f"{each:+.2f} each"))

    def _results(self) -> Results:
        screen, limit = self.environment.screen, self.environment.options.max_results
        found = [self.environment.catalogue.by_id[number] for number in screen.found]
        shown = found[:limit]
        cut = f", the best {len(shown)} of them" if len(found) > limit else ""
        return Results(
            f"{counted(len(found), 'result')} for “{screen.query}”{cut}", tuple(map(_card, shown))
        )


def _reason(turn: PlayedTurn, last_info: Mapping[str, Any]) -> str:
    """Why a turn earned or cost something besides what every turn costs."""
    if turn.invalid:
        return "that was not possible"
    verb = turn.action.split(maxsplit=1)[0].lower()
    if verb == "search":
        return "the goal is among the results"
    if verb == "click":
        return "another product was opened"
    return "the goal was bought" if last_info.get("success") else "another product was bought"


def _card(product: CatalogueProduct) -> Card:
    number = product.product_id
    return Card(
        product.title,
        f"No. {number}",
        look=Button("Look at it", f"click {number}"),
        buy=Button("Buy", f"buy {number}"),
    )


def _product(product: CatalogueProduct, *, can_buy: bool) -> display.Product:
    number = product.product_id
    facts = (("Category", product.category), *product.attributes, ("No.", str(number)))
    return display.Product(
        title=product.title,
        price=f"${product.price:.2f}".removesuffix(".00"),
        facts=facts,
        buy=Button("Buy", f"buy {number}") if can_buy else None,
    )
