"""What the shopper reads and may click: a `Visit` rendered in one of three modes.

`text` and `text_rich` are upstream's two observation modes byte for byte; `compact` is our own, for
language models that read the whole episode: what is read once is not repeated (docs/webshop.md).
"""

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypedDict

from ragen_apo.environments.tools import Tool
from ragen_apo.environments.webshop.views import (
    MAX_COMPACT_TEXT,
    SEPARATOR,
    ProductView,
    Views,
    button,
    lines,
    nodes,
    plain,
    shortened,
)
from ragen_apo.environments.webshop.visit import Page, Visit


class AvailableActions(TypedDict):
    """What a page offers, as upstream says it."""

    has_search_bar: bool
    """Only the start page shows one; `search[words]` works everywhere."""
    clickables: tuple[str, ...]


class ObservationMode(str, Enum):
    """How pages are written."""

    COMPACT = "compact"
    TEXT = "text"
    TEXT_RICH = "text_rich"


MIN_TITLE_WORDS, MAX_TITLE_WORDS = 5, 8
"""How many words of a title name a product."""
_BRACKETS = frozenset("[]")
INVALID_ACTION_LINE = "That is not possible here."

_START_ACTIONS = "Actions: search <words>"
_RESULTS_ACTIONS = "Actions: click <number>, click next >, click back to search, search <words>"
_LATER_RESULTS_ACTIONS = _RESULTS_ACTIONS.replace("next >", "next >, click < prev")
_ITEM_ACTIONS = (
    "Actions: click buy now, click < prev, click description, click features, click reviews, "
    "click back to search, search <words>"
)
_OPTIONS_ACTIONS = _ITEM_ACTIONS.replace("Actions: ", "Actions: click #<option>, ")
_SELECTED_ACTIONS = "Actions: click buy now, click #<option>, click < prev, search <words>"
_SUB_PAGE_ACTIONS = "Actions: click < prev, click back to search, search <words>"

_BACK_RICH = lines([button("Back to Search")])
_BACK_AND_PREVIOUS_RICH = _BACK_RICH + lines([button("< Prev")])


def product_name(visit: Visit, product: int, views: Views, mode: ObservationMode) -> str:
    """How a product of the results is best clicked: by its id, or in `compact` by its title.

    The name is as many words of the title as distinguish it from the others of its page, and at
    least a few. If the shown part of the title does not distinguish it, or has brackets, the name
    is its rank in the results, from 1.
    """
    view = views(product)
    if mode is not ObservationMode.COMPACT:
        return view.link
    for num_words in range(MIN_TITLE_WORDS, MAX_TITLE_WORDS + 1):
        name = " ".join(view.title_words[:num_words])
        is_shown = view.in_results_compact.startswith(name) and not set(name) & _BRACKETS
        if is_shown and visit.result_named(name, views) == product:
            return name
    return str(visit.results.index(product) + 1)


def option_targets(
    visit: Visit, views: Views, mode: ObservationMode
) -> Mapping[tuple[str, str], str]:
    """How the options (name and value) of the open product are clicked; none that cannot be.

    By the value; in `compact` by the number where the value would select something else.
    """
    assert visit.product is not None
    view = views(visit.product)
    by_value = {(name, value): value for value, name in view.selectable.items()}
    if mode is not ObservationMode.COMPACT:
        return by_value
    clear = {option: value for option, value in by_value.items() if value[:1] not in ("#", "[")}
    return {**view.option_numbers, **clear}


def clickables(visit: Visit, views: Views, mode: ObservationMode) -> tuple[str, ...]:
    """What can be clicked, in upstream's order; nothing after the end."""
    if visit.page is Page.START:
        return ("search",)
    if visit.page is Page.RESULTS:
        back = () if visit.page_number == 1 else ("< prev",)
        buttons = ("back to search", *back, "next >")
        if mode is ObservationMode.COMPACT:
            first = visit.first_rank
            return buttons + tuple(map(str, range(first, first + len(visit.shown))))
        return buttons + tuple(views(number).link for number in visit.shown)
    if visit.page is Page.ITEM:
        assert visit.product is not None
        view = views(visit.product)
        return view.clickables_compact if mode is ObservationMode.COMPACT else view.clickables
    return ("back to search", "< prev") if visit.page is Page.SUB_PAGE else ()


def _results_heading(visit: Visit) -> tuple[str, list[str]]:
    """Where one is in the results, and the buttons that lead on."""
    buttons = ["Next >"] if visit.page_number == 1 else ["< Prev", "Next >"]
    return f"Page {visit.page_number} (Total results: {len(visit.results)})", buttons


def render_text(visit: Visit, instruction: str, views: Views) -> str:
    """The page as upstream's mode `text`."""
    if visit.page is Page.START:
        return plain(["WebShop", "Instruction:", *nodes(instruction), "Search"])
    pieces = ["Instruction:", *nodes(instruction), "Back to Search"]
    if visit.page is Page.RESULTS:
        heading, buttons = _results_heading(visit)
        products = (views(number).in_results_text for number in visit.shown)
        return SEPARATOR.join([plain([*pieces, heading, *buttons]), *products])
    assert visit.product is not None
    view = views(visit.product)
    pieces.append("< Prev")
    if visit.page is Page.ITEM:
        return f"{plain(pieces)}{SEPARATOR}{view.item_text}"
    return plain(pieces + view.sub_page(visit.sub_page))


def render_rich(visit: Visit, instruction: str, views: Views) -> str:
    """The page as upstream's mode `text_rich`."""
    if visit.page is Page.START:
        return lines(["WebShop", "Instruction: ", *nodes(instruction), button("Search")])
    head = lines(["Instruction:", *nodes(instruction)])
    if visit.page is Page.RESULTS:
        heading, buttons = _results_heading(visit)
        products = (
            views(number).in_results_rich(clicked=number in visit.opened) for number in visit.shown
        )
        top = lines([heading, *(button(label) for label in buttons)])
        return f"{head}{_BACK_RICH}{top}{''.join(products)}"
    assert visit.product is not None
    view = views(visit.product)
    head += _BACK_AND_PREVIOUS_RICH
    if visit.page is Page.SUB_PAGE:
        return head + lines(view.sub_page(visit.sub_page))
    before, rest = view.item_rich(visit.query, visit.selected)
    return f"{before}{head}{rest}"


def render_compact(visit: Visit, instruction: str, views: Views) -> str:
    """The page as our mode `compact`."""
    shown: list[str]
    if visit.page is Page.START:
        shown = [f"Task: {instruction}"]
    elif visit.page is Page.RESULTS:
        shown = _compact_results(visit, views)
    elif visit.page is Page.SUB_PAGE:
        assert visit.product is not None
        texts = views(visit.product).sub_page(visit.sub_page)
        shown = [f"{visit.sub_page}: {shortened(' '.join(texts), MAX_COMPACT_TEXT) or 'none'}"]
    else:
        shown = _compact_item(visit, views)
    return "\n".join([*shown, compact_actions(visit, views)])


def _compact_results(visit: Visit, views: Views) -> list[str]:
    shown = visit.shown
    if not shown:
        return [f"No results on page {visit.page_number} of {len(visit.results)} results"]
    first = visit.first_rank
    heading = f"Results {first}-{first + len(shown) - 1} of {len(visit.results)}"
    ranks = dict(enumerate(shown, start=first))
    rows = [f"{rank} | {views(number).in_results_compact}" for rank, number in ranks.items()]
    opened = [str(rank) for rank, number in ranks.items() if number in visit.opened]
    return [heading, *rows, *([f"Opened: {', '.join(opened)}"] if opened else [])]


def _compact_item(visit: Visit, views: Views) -> list[str]:
    assert visit.product is not None
    view = views(visit.product)
    if not visit.selected:
        return [view.item_compact, *(["Selected: nothing"] if view.option_names else [])]
    still_open = [line for name, line in view.option_lines_compact if name not in visit.selected]
    return [f"Selected: {_selection(visit, view)}", *still_open]


def _selection(visit: Visit, view: ProductView) -> str:
    """The selected options in the product's order: in whatever order they were selected, the same
    selections are the same state.
    """
    names = [name for name in view.product.options if name in visit.selected]
    return ", ".join(f"{name} = {visit.selected[name]}" for name in names)


def compact_actions(visit: Visit, views: Views) -> str:
    """The last line of a page in the mode `compact`: what can be done there."""
    if visit.page is Page.START:
        return _START_ACTIONS
    if visit.page is Page.RESULTS:
        return _RESULTS_ACTIONS if visit.page_number == 1 else _LATER_RESULTS_ACTIONS
    if visit.page is Page.SUB_PAGE:
        return _SUB_PAGE_ACTIONS
    assert visit.product is not None
    if visit.selected:
        return _SELECTED_ACTIONS
    return _OPTIONS_ACTIONS if views(visit.product).option_names else _ITEM_ACTIONS


RENDERERS: dict[ObservationMode, Callable[[Visit, str, Views], str]] = {
    ObservationMode.COMPACT: render_compact,
    ObservationMode.TEXT: render_text,
    ObservationMode.TEXT_RICH: render_rich,
}


def _done_nodes(asin: str, selected: dict[str, str], reward: float) -> list[str]:
    """The nodes of upstream's last page, which shows the purchase and little of the goal."""
    options = json.dumps(selected, sort_keys=True)
    for character in "<>&'":
        options = options.replace(character, f"\\u{ord(character):04x}")
    return [
        *("Thank you for shopping with us!", "Your code: ", "None"),
        *(" (Paste it in your MTurk interface.)", "Purchased", "asin", asin, "options", options),
        *("attrs", "None", "category", "None", "query", "None", "product category", "None"),
        *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category"),
        *("product category", "query", "Goal ", "None", "Reward"),
        *("Your score (min 0.0, max 1.0)", str(reward), "Reward Details ", "None"),
    ]


def render_done(visit: Visit, mode: ObservationMode, views: Views, reward: float) -> str:
    """The page after a purchase."""
    assert visit.product is not None
    view = views(visit.product)
    asin = view.product.asin
    if mode is ObservationMode.COMPACT:
        with_options = f" with {_selection(visit, view)}" if visit.selected else ""
        return f"Bought {asin}{with_options}. Score: {reward:.3g} of 1."
    texts = _done_nodes(asin, visit.selected, reward)
    return plain(texts) if mode is ObservationMode.TEXT else lines(texts)


def shopping_tools(observation: ObservationMode) -> tuple[Tool, ...]:
    """The actions as functions; their texts are those of the mode."""
    is_compact = observation is ObservationMode.COMPACT
    product = "a result's number" if is_compact else "a product id"
    words = {"words": {"type": "string", "description": "What to search for."}}
    target = {"target": {"type": "string", "description": f"A link or button, such as {product}."}}
    search, click = "search[{words}]", "click[{target}]"
    if is_compact:
        search, click = "search {words}", "click {target}"
    return (
        Tool("search", "Search the shop.", search, words),
        Tool("click", "Click what the page offers.", click, target),
    )
