"""The front of WebShop.

Titles, descriptions and features are shown whole; an agent in the mode `compact` reads the first
characters of long ones. Prices are the tags that the agent reads, not those that are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragen_apo.environments.human.play import PlayedTurn
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.visit import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PREVIOUS,
    SUB_PAGES,
    Page,
)
from ragen_apo.plural import counted
from ragen_apo.web.shop import display
from ragen_apo.web.shop.display import (
    Button,
    Card,
    Choice,
    OptionGroup,
    Results,
    RewardPart,
    ShopPage,
    Text,
)


class WebShopFront:
    """The pages of one episode in WebShop."""

    def __init__(self, environment: WebShopEnvironment) -> None:
        self.environment = environment

    def page(self, *, is_over: bool) -> ShopPage:
        visit = self.environment.visit
        if is_over:
            bought = self._product(is_open=False) if visit.page is Page.DONE else None
            return ShopPage(visit.query, product=bought)
        if visit.page is Page.START:
            number = self.environment.catalog.num_products
            return ShopPage(welcome=f"{counted(number, 'product')}, found by words.")
        if visit.page is Page.RESULTS:
            return ShopPage(visit.query, results=self._results(), buttons=self._ways_on())
        back = (self._button("Back", PREVIOUS), self._button("Back to the start", BACK_TO_SEARCH))
        if visit.page is Page.ITEM:
            product = self._product(is_open=True)
            return ShopPage(visit.query, product=product, buttons=back)
        return ShopPage(visit.query, text=self._text(), buttons=back)

    def search(self, words: str) -> str:
        """Without square brackets, which end an action; the search reads words only."""
        plain = " ".join(words.replace("[", " ").replace("]", " ").split())
        return f"search {plain}" if self.environment.is_compact else f"search[{plain}]"

    def bill(self, turns: Sequence[PlayedTurn], info: Mapping[str, Any]) -> tuple[RewardPart, ...]:
        """The factor and the weighted parts of the score; empty where nothing was bought."""
        parts = info.get("reward_parts")
        if not parts:
            return ()
        lines = [
            RewardPart("Attributes", _weighted(parts, "att"), "share of those asked for"),
            RewardPart("Price", _weighted(parts, "price"), "within the limit or not"),
        ]
        if "r_option" in parts:
            options = RewardPart("Options", _weighted(parts, "option"), "share of those asked for")
            lines.insert(1, options)
        kind = RewardPart(
            "Kind of product", f"× {parts['r_type']:g}", "the sum of the others is multiplied by it"
        )
        if self.environment.options.payoff == "binary":
            rule = RewardPart("Payoff", f"{turns[-1].reward:g}", "1 for a score of 1, otherwise 0")
            return (*lines, kind, rule)
        return (*lines, kind)

    def _button(self, label: str, target: str) -> Button:
        return Button(label, self._click(target))

    def _click(self, target: str) -> str:
        return f"click {target}" if self.environment.is_compact else f"click[{target}]"

    def _results(self) -> Results:
        visit = self.environment.visit
        total, shown = len(visit.results), visit.shown
        if not shown:
            where = f" on page {visit.page_number}" if total else ""
            return Results(f"No results{where} for “{visit.query}”", ())
        first = visit.first_rank
        heading = (
            f"{first}–{first + len(shown) - 1} of {counted(total, 'result')} for “{visit.query}”"
        )
        return Results(heading, tuple(map(self._card, shown)))

    def _card(self, number: int) -> Card:
        product = self.environment.catalog.product(number)
        look = self._button("Look at it", self.environment.product_name(number))
        return Card(product.title, product.asin, look=look, price=product.price_tag)

    def _ways_on(self) -> tuple[Button, ...]:
        visit = self.environment.visit
        buttons = [self._button("Back to the start", BACK_TO_SEARCH)]
        if visit.page_number > 1:
            buttons.append(self._button("Previous page", PREVIOUS))
        if visit.first_rank + len(visit.shown) <= len(visit.results):
            buttons.append(self._button("Next page", NEXT_PAGE))
        return tuple(buttons)

    def _product(self, *, is_open: bool) -> display.Product:
        """The product of the item page, or the one that was bought."""
        visit = self.environment.visit
        assert visit.product is not None
        product = self.environment.catalog.product(visit.product)
        if not is_open:
            selected = tuple(visit.selected.items())
            facts = (*selected, ("Product id", product.asin))
            return display.Product(product.title, product.price_tag, facts)
        return display.Product(
            title=product.title,
            price=product.price_tag,
            facts=(("Product id", product.asin),),
            options=self._options(),
            buttons=tuple(self._button(label, target) for target, label in SUB_PAGES.items()),
            buy=self._button("Buy now", BUY_NOW),
        )

    def _options(self) -> tuple[OptionGroup, ...]:
        visit, targets = self.environment.visit, self.environment.option_targets()
        assert visit.product is not None

        def choice(name: str, value: str) -> Choice:
            target = targets.get((name, value))
            action = None if target is None else self._click(target)
            return Choice(value, action, visit.selected.get(name) == value)

        offered = self.environment.catalog.product(visit.product).options
        return tuple(
            OptionGroup(name, tuple(choice(name, value) for value in dict.fromkeys(values)))
            for name, values in offered.items()
        )

    def _text(self) -> Text:
        visit = self.environment.visit
        assert visit.product is not None
        texts = self.environment.views(visit.product).sub_page(visit.sub_page)
        return Text(visit.sub_page, tuple(text.strip() for text in texts if text.strip()))


def _weighted(parts: Mapping[str, float | bool], name: str) -> str:
    share, weight = float(parts[f"r_{name}"]), float(parts[f"w_{name}"])
    return f"{share:.2f} × {weight:.2f}"
