"""One shopper's visit: which page is open, what was searched, opened and selected.

A `Visit` consumes parsed actions and changes page; it renders nothing and pays nothing. It is a
plain object without global state: it is freed with its owner, and two visits never share anything.

    start --search--> results --id--> item --Description...--> sub-page
    Back to Search leads to start from everywhere, `< Prev` one step back, Buy Now ends the visit.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ragen_apo.environments.webshop.catalog import Catalog
from ragen_apo.environments.webshop.views import Views

PAGE_SIZE = 10
SEARCH: Final = "search"
BACK_TO_SEARCH: Final = "back to search"
NEXT_PAGE: Final = "next >"
PREVIOUS: Final = "< prev"
BUY_NOW: Final = "buy now"
_RESULTS_BUTTONS = (BACK_TO_SEARCH, NEXT_PAGE, PREVIOUS)
SUB_PAGES: Final = {"description": "Description", "features": "Features", "reviews": "Reviews"}


class Page(str, Enum):
    """The kinds of pages."""

    START = "start"
    RESULTS = "results"
    ITEM = "item"
    SUB_PAGE = "sub-page"
    DONE = "done"


def parse_action(action: str) -> tuple[str, str] | None:
    r"""Name and lower-cased argument of `name[argument]`; None for other text.

    As upstream's pattern `(.+)\[(.+)\]` reads it: on the first line, up to its last `]`, from the
    last `[` that leaves an argument; in linear time, whatever the text.
    """
    line = action.split("\n", 1)[0]
    close = line.rfind("]")
    opening = line.rfind("[", 1, close - 1) if close > 2 else -1
    if opening < 0:
        return None
    return line[:opening], line[opening + 1 : close].lower()


_RANK = re.compile(r"[1-9][0-9]{0,3}")
_OPTION_NUMBER = re.compile(r"#([1-9][0-9]{0,3})")
_PLAIN_ACTION = re.compile(r"\s*(search|click)\s+(\S[^\n]*)", re.IGNORECASE)


def parse_plain_action(action: str) -> tuple[str, str] | None:
    """`name argument` without brackets, how `compact` is written, or with them.

    Other than upstream it takes the name in any case, and blanks around name and argument.
    """
    found = _PLAIN_ACTION.match(action)
    if found is not None and not found[2].startswith("["):
        return found[1].lower(), found[2].strip().lower()
    parsed = parse_action(action)
    if parsed is None or not parsed[1].strip():
        return None
    return parsed[0].strip().lower(), parsed[1].strip()


@dataclass
class Visit:
    """The state of one visit."""

    page: Page = Page.START
    query: str = ""
    results: tuple[int, ...] = ()
    """Numbers of the products found, best first."""
    page_number: int = 1
    product: int | None = None
    """The number of the product whose item page is or was last open."""
    sub_page: str = ""
    selected: dict[str, str] = field(default_factory=dict)
    """Option name to the value selected on the open product."""
    opened: set[int] = field(default_factory=set)
    """Products opened since the start page was last left."""

    @property
    def shown(self) -> tuple[int, ...]:
        """The products of the open results page."""
        return self.results[(self.page_number - 1) * PAGE_SIZE : self.page_number * PAGE_SIZE]

    @property
    def first_rank(self) -> int:
        """The rank of the page's first product among all results, counted from 1."""
        return (self.page_number - 1) * PAGE_SIZE + 1

    def shown_at(self, rank: str) -> int | None:
        """The product of the open results page with this rank among all results, counted from 1."""
        if self.page is not Page.RESULTS or not _RANK.fullmatch(rank):
            return None
        index = int(rank) - self.first_rank
        return self.shown[index] if 0 <= index < len(self.shown) else None

    def shown_as(self, start: str, views: Views) -> int | None:
        """The product of the open results page whose title, and no other, starts with the words."""
        words = tuple(start.split())
        if self.page is not Page.RESULTS or not words:
            return None
        matching = [n for n in self.shown if views(n).title_words[: len(words)] == words]
        return matching[0] if len(matching) == 1 else None

    def result_named(self, target: str, views: Views) -> int | None:
        """The product that `target` names on the open results page in `compact`: by its rank, its
        id or the start of its title. None for what is a button there.
        """
        if self.page is not Page.RESULTS or target in _RESULTS_BUTTONS:
            return None
        ranked = self.shown_at(target)
        if ranked is not None:
            return ranked
        linked = self._linked(target, views)
        return self.shown_as(target, views) if linked is None else linked

    def select_numbered(self, number: str, views: Views) -> bool:
        """Selects the option of the open item page with this number, `#1` the first of all groups.

        Exactly the value with that number, in its own group, whatever it is called; also where its
        group has a selection already. False, and nothing changes, where there is no such number.
        """
        found = _OPTION_NUMBER.fullmatch(number)
        if self.page is not Page.ITEM or found is None:
            return False
        assert self.product is not None
        options = views(self.product).options
        index = int(found[1]) - 1
        if index >= len(options):
            return False
        name, value = options[index]
        self.selected[name] = value
        return True

    def search(self, query: str, catalog: Catalog) -> None:
        """Opens the first results page of a query; works on every page."""
        self.query = query
        self.results = catalog.search(query)
        self._open_results(1)

    def open_result(self, product: int) -> None:
        """Opens the item page of a product of the open results page."""
        self.page, self.product = Page.ITEM, product
        self.opened.add(product)

    def click(self, target: str, views: Views) -> bool:
        """Follows a click; False, and nothing changes, where the page does not offer it."""
        if self.page is Page.START or self.page is Page.DONE:
            return False
        if target == BACK_TO_SEARCH:
            self._open_start()
            return True
        if self.page is Page.RESULTS:
            return self._click_on_results(target, views)
        if self.page is Page.ITEM:
            return self._click_on_item(target, views)
        if target == PREVIOUS:
            self.page = Page.ITEM
            return True
        return False

    def _open_start(self) -> None:
        self.page = Page.START
        self.query, self.results, self.page_number = "", (), 1
        self.product = None
        self.selected.clear()
        self.opened.clear()

    def _open_results(self, page_number: int) -> None:
        self.page = Page.RESULTS
        self.page_number = page_number
        self.product = None
        self.selected.clear()

    def _click_on_results(self, target: str, views: Views) -> bool:
        if target == NEXT_PAGE:
            self._open_results(self.page_number + 1)
            return True
        if target == PREVIOUS and self.page_number > 1:
            self._open_results(self.page_number - 1)
            return True
        linked = self._linked(target, views)
        if linked is None:
            return False
        self.open_result(linked)
        return True

    def _linked(self, target: str, views: Views) -> int | None:
        """The first product of the open results page with this id."""
        return next((number for number in self.shown if views(number).link == target), None)

    def _click_on_item(self, target: str, views: Views) -> bool:
        assert self.product is not None
        if target == BUY_NOW:
            self.page = Page.DONE
        elif target == PREVIOUS:
            self._open_results(self.page_number)
        elif target in SUB_PAGES:
            self.page, self.sub_page = Page.SUB_PAGE, SUB_PAGES[target]
        else:
            name = views(self.product).option_names.get(target)
            if name is None or target == SEARCH:
                return False
            self.selected[name] = target
        return True
