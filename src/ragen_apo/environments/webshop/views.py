"""The texts of one product, made once and kept: what pages are put together from.

`product_views` consumes a `Catalog` and gives a `ProductView` per product number, with the pieces
of each observation mode. A piece of upstream's text is a node of its HTML: an empty node and a
blank one with a line break vanish, another blank one is a single space (BeautifulSoup's rule).
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping

from ragen_apo.environments.webshop.catalog import Catalog, Product

SEPARATOR = " [SEP] "
RATING = "Rating: N.A."
VIEW_CACHE_SIZE = 2048
MAX_COMPACT_TITLE = 64
MAX_COMPACT_TEXT = 1000
_ASCII_BLANKS = " \n\t\f\r"
_ITEM_BUTTONS = ("Description", "Features", "Reviews", "Buy Now")
_ITEM_CLICKABLES = ("back to search", "< prev", "description", "features", "reviews", "buy now")
_UNREACHABLE = frozenset((*_ITEM_CLICKABLES, "search"))
"""Option values of these names are taken for the button; `click[search]` does nothing. Only their
numbers select them."""


def nodes(*texts: str) -> list[str]:
    """The texts that a page shows as nodes of their own."""
    kept: list[str] = []
    for text in texts:
        if text.strip(_ASCII_BLANKS):
            kept.append(text)
        elif text and "\n" not in text:
            kept.append(" ")
    return kept


def plain(texts: list[str]) -> str:
    """Nodes in the mode `text`."""
    return SEPARATOR.join(text.strip() for text in texts)


def lines(texts: list[str]) -> str:
    """Nodes in the mode `text_rich`."""
    return "".join(f"{text}\n" for text in texts)


def button(label: str, *, clicked: bool = False) -> str:
    """A button in the mode `text_rich`."""
    kind = "clicked button" if clicked else "button"
    return f"[{kind}] {label} [{kind}_]"


def shortened(text: str, limit: int) -> str:
    """The text on one line, cut at the limit."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3].rstrip()}..."


class ProductView:
    """The pieces of one product; each is made when it is first asked for."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.link = product.asin.lower()

    @functools.cached_property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Name and value of each option in page order; its number is its position here, from 1."""
        groups = self.product.options.items()
        return tuple((name, value) for name, values in groups for value in values)

    @functools.cached_property
    def option_numbers(self) -> Mapping[tuple[str, str], str]:
        """How the mode `compact` writes the number of an option; of equal ones, the first's."""
        numbers: dict[tuple[str, str], str] = {}
        for number, option in enumerate(self.options, 1):
            numbers.setdefault(option, f"#{number}")
        return numbers

    @functools.cached_property
    def option_names(self) -> Mapping[str, str]:
        """Which option a value belongs to; of options that share a value, the last one."""
        return {value: name for name, values in self.product.options.items() for value in values}

    @functools.cached_property
    def selectable(self) -> Mapping[str, str]:
        """`option_names` without the values that a click cannot reach."""
        return {
            value: name
            for value, name in self.option_names.items()
            if value and value not in _UNREACHABLE and not set(value) & {"[", "\n"}
        }

    @functools.cached_property
    def clickables(self) -> tuple[str, ...]:
        """What the item page offers in upstream's modes."""
        return tuple(dict.fromkeys([*_ITEM_CLICKABLES, *self.option_names]))

    @functools.cached_property
    def clickables_compact(self) -> tuple[str, ...]:
        """What the item page offers in the mode `compact`."""
        return (*_ITEM_CLICKABLES, *(f"#{n}" for n in range(1, len(self.options) + 1)))

    @functools.cached_property
    def in_results_text(self) -> str:
        """The product among results, mode `text`."""
        return plain(nodes(self.product.asin, self.product.title, self.product.price_tag))

    def in_results_rich(self, *, clicked: bool) -> str:
        """The product among results, mode `text_rich`."""
        details = lines(nodes(self.product.title, self.product.price_tag))
        return f"\n{button(self.product.asin, clicked=clicked)}\n{details}"

    @functools.cached_property
    def title_words(self) -> tuple[str, ...]:
        """The whole title as the mode `compact` writes its words."""
        return tuple(self.product.title.lower().split())

    @functools.cached_property
    def in_results_compact(self) -> str:
        """The product among results after its number, mode `compact`."""
        title = shortened(self.product.title, MAX_COMPACT_TITLE).lower()
        return f"{title} | {self.product.price_tag}"

    @functools.cached_property
    def item_text(self) -> str:
        """The item page after its buttons to go back, mode `text`."""
        product = self.product
        texts: list[str] = []
        for name, values in product.options.items():
            texts += nodes(name, *values)
        texts += nodes(product.title, f"Price: {product.price_tag}", RATING)
        return plain([*texts, *_ITEM_BUTTONS])

    def item_rich(self, query: str, selected: Mapping[str, str]) -> tuple[str, str]:
        """What goes before the page and the page's rest, mode `text_rich`.

        Upstream marks a value as clicked if it stands in quotes in the page's address, which has
        the query and the selected options as JSON; so a value that JSON writes differently is never
        marked.
        """
        address = f"{query.replace(' ', '+')}/{json.dumps(dict(selected))}"
        before = ""
        rest: list[str] = []
        for name, values in self.product.options.items():
            rest += nodes(name)
            for value in nodes(*values):
                clicked = f'"{value}"' in address
                rest.append(f"  {button(value, clicked=clicked)}")
                if clicked:
                    before = f"You have clicked {value}.\n{before}"
        rest += nodes(self.product.title, f"Price: {self.product.price_tag}", RATING)
        return before, lines([*rest, *(button(label) for label in _ITEM_BUTTONS)])

    @functools.cached_property
    def item_compact(self) -> str:
        """Title, price and options, mode `compact`."""
        options = (line for _, line in self.option_lines_compact)
        return "\n".join([self.in_results_compact, *options])

    @functools.cached_property
    def option_lines_compact(self) -> list[tuple[str, str]]:
        """Name and line of each group of options with their numbers, mode `compact`."""
        numbers = itertools.count(1)
        return [
            (name, f"{name}: {' | '.join(f'{value} #{next(numbers)}' for value in values)}")
            for name, values in self.product.options.items()
        ]

    def sub_page(self, name: str) -> list[str]:
        """The nodes of a sub-page after its buttons to go back."""
        if name == "Description":
            return nodes(self.product.description)
        if name == "Features":
            return nodes(*(f" {bullet}" for bullet in self.product.bullet_points))
        return []


Views = Callable[[int], ProductView]
"""The view of a product by its number."""


def product_views(catalog: Catalog) -> Views:
    """The views of a catalogue, a bounded number of them kept; one object for all in a process."""
    if "views" not in catalog.shared:
        cached = functools.lru_cache(VIEW_CACHE_SIZE)
        catalog.shared["views"] = cached(lambda number: ProductView(catalog.product(number)))
    return catalog.shared["views"]
