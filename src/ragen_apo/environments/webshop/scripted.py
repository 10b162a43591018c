"""Scripted shoppers: a random one, three rule agents, two goal-aware teachers and an oracle.

Each follows the episode on a copy of the environment that it owns, and looks there only at what a
page shows. So the same policy plays every observation mode.

- `random`, `heuristic`, `careful` and `hasty` use only the instruction.
- `teacher` and `forgetful` know the goal and write plausible demonstrations: their searches are
  made of words of the instruction. `forgetful` errs more often.
- `oracle` knows the goal and searches for the wanted product's own title.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.environments.webshop.colors import normalize_color
from ragen_apo.environments.webshop.goals import goal_of_task
from ragen_apo.environments.webshop.reward import MATCH_ABOVE
from ragen_apo.environments.webshop.text_match import token_set_ratio
from ragen_apo.environments.webshop.visit import PAGE_SIZE, Page
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task

if TYPE_CHECKING:
    from ragen_apo.environments.webshop.environment import WebShopEnvironment as Shop

_PRICE_TEXT = ", and price lower than "
_OPENING = "find me "
_ASKED_OPTION = re.compile(
    r"(?: with|, and) ((?:(?! with |[:,]).)+): (.+?)(?=, and (?:(?! with |[:,]).)+: |$)"
)
MAX_OPENED = 4
"""How many results the careful shopper opens at most."""
HASTY_RANKS = (0, 0, 1, 1, 2, 3)
"""The results, counted from 0, of which the hasty shopper opens one, all alike likely; when it
comes back, the first that it has not opened."""
HASTY_SELECTS_SHARE = 0.8
"""How often the hasty shopper cares for an option that is asked for."""
HASTY_LEAVES_SHARE = 0.5
"""How often the hasty shopper goes back where an option that it cares for is missing."""
HASTY_MAX_RETURNS = 3
"""How often the hasty shopper goes back in an episode at most."""
FOUND = "This is what is asked for."
TEACHER_MISTAKE_SHARE = 0.1
"""How often the teacher opens a wrong product where it sees the wanted one among others."""
MISNAMING_SHARE = 0.4
"""In how many of its episodes the forgetful shopper misnames the product, where it can recover."""
SEARCH_AGAIN_SHARE = 0.1
"""How often the random shopper searches where it could click."""


def searchable(text: str) -> str:
    """The text without what would end the argument of an action."""
    return " ".join(re.sub(r"[\[\]]", " ", text).split()) or "product"


class _Shopper:
    """Follows the episode on its own copy and leaves the choice of the action to `_choose`."""

    name = ""

    def __init__(self, make_shop: Callable[[], Shop]) -> None:
        self._make_shop = make_shop

    def begin(self, task: Task, *, seed: int) -> None:
        self.draws = random.Random(derive_seed("webshop-policy", self.name, task.task_id, seed))
        shop = self._make_shop()
        shop.reset(task, seed=seed)
        self.follow(shop, task)

    def follow(self, shop: Shop, task: Task) -> None:
        """Takes the task's episode over from the state that the shop is in."""
        self.shop = shop
        self.task = task
        self._prepare()

    def act(self, observation: str) -> Reply:
        reply = self._choose()
        self.shop.step(reply.action)
        return reply

    def _prepare(self) -> None:
        """What a policy works out before the first action."""

    def _choose(self) -> Reply:
        raise NotImplementedError

    def _search(self, thought: str, words: str) -> Reply:
        return self._reply(thought, "search", words)

    def _click(self, thought: str, target: str) -> Reply:
        return self._reply(thought, "click", target)

    def _result_targets(self) -> Sequence[str]:
        """How the products of the open results page are clicked by number, else by id."""
        available = self.shop.available_actions()
        assert available is not None
        return available["clickables"][-len(self.shop.visit.shown) :]

    def _click_product(self, thought: str, product: int) -> Reply:
        return self._click(thought, self.shop.product_name(product))

    def _reply(self, thought: str, verb: str, argument: str) -> Reply:
        return Reply(
            thought, f"{verb} {argument}" if self.shop.is_compact else f"{verb}[{argument}]"
        )


class RandomShopper(_Shopper):
    """Clicks what the page offers; searches one to three words of the instruction."""

    name = "random"

    def _choose(self) -> Reply:
        available = self.shop.available_actions()
        targets = available["clickables"] if available else ()
        if "search" in targets or not targets or self.draws.random() < SEARCH_AGAIN_SHARE:
            words = searchable(self.task.instruction).split()
            chosen = self.draws.sample(words, min(len(words), self.draws.randint(1, 3)))
            return self._search("I search some words.", " ".join(chosen))
        return self._click("I click something.", self.draws.choice(targets))


def mentioned_value(values: tuple[str, ...], instruction: str) -> str | None:
    """The longest of the values that the instruction names as whole words."""
    text = f" {instruction.lower()} "
    mentioned = (v for v in values if v and re.search(rf"(?<!\w){re.escape(v)}(?!\w)", text))
    return max(mentioned, key=len, default=None)


class RuleShopper(_Shopper):
    """Searches the instruction, opens the first hit, selects what the instruction names, buys."""

    name = "heuristic"

    def _prepare(self) -> None:
        self.words_left = searchable(self.task.instruction).split()[::-1]

    def _choose(self) -> Reply:
        visit = self.shop.visit
        if visit.page is Page.RESULTS and visit.shown:
            return self._click_product("The first result will do.", visit.shown[0])
        if visit.page is Page.ITEM:
            return self._select_or_buy()
        if visit.page is Page.START:
            return self._search("I search the request.", searchable(self.task.instruction))
        word = self.words_left.pop() if self.words_left else "product"
        return self._search("Nothing was found; I search one word.", word)

    def _select_or_buy(self) -> Reply:
        visit = self.shop.visit
        assert visit.product is not None
        targets = self.shop.option_targets()
        for name, values in self.shop.views(visit.product).product.options.items():
            value = mentioned_value(values, self.task.instruction)
            if value is None or (name, value) not in targets:
                continue
            if visit.selected.get(name) != value:
                return self._click(f"The request names {value}.", targets[name, value])
        return self._click("I buy it.", "buy now")


class CarefulShopper(_Shopper):
    """Opens the results from the top and buys the first that has the options asked for.

    It knows only what the student reads, so the student can follow all of its demonstrations. It
    searches for words of the request, selects the options that the request names, and goes back if
    that is impossible. It buys the last of a few products with the options that this product has.
    """

    name = "careful"

    def _prepare(self) -> None:
        self.options = asked_options(self.task.instruction)
        self.queries = instruction_queries(self.task.instruction, self.options)[:2]
        self.num_opened = 0
        self.tried: set[str] = set()

    def _choose(self) -> Reply:
        visit = self.shop.visit
        if visit.page is Page.ITEM:
            return self._select_or_leave()
        if visit.page is Page.SUB_PAGE:
            return self._click("I go back.", "< prev")
        if visit.page is Page.RESULTS and self.num_opened < len(visit.shown):
            return self._look_at_next()
        query = searchable(self.queries.pop() if self.queries else "product")
        return self._search("I search for what is asked.", query)

    def _look_at_next(self) -> Reply:
        which = "next" if self.num_opened else "first"
        target = self._result_targets()[self.num_opened]
        self.num_opened += 1
        self.tried.clear()
        return self._click(f"I look at the {which} result.", target)

    def _select_or_leave(self) -> Reply:
        targets = self.shop.option_targets()
        is_last = self.num_opened == MAX_OPENED
        for name, value in self.options:
            if self.shop.visit.selected.get(name) == value:
                continue
            if name not in self.tried:
                self.tried.add(name)
                target = targets.get((name, value), value)
                return self._click(f"I need one with {name}: {value}.", target)
            if not is_last:
                return self._click(f"It has no {name}: {value}.", "< prev")
        return self._click("Everything fits, I buy it.", "buy now")


class HastyShopper(_Shopper):
    """Draws at random what the careful shopper decides by reading, and so mostly fails.

    It searches for one of three queries, opens one of the first four results, and ignores some of
    the requested options. If an option is missing, it goes back to another result or buys without
    it. It knows only the instruction. Its students know how to make a purchase; reinforcement has
    to teach them to choose well.
    """

    name = "hasty"

    def _prepare(self) -> None:
        self.options = asked_options(self.task.instruction)
        self.query = self.draws.choice(instruction_queries(self.task.instruction, self.options)[:3])
        self.num_returns = 0
        self.wishes: list[tuple[str, str]] = []
        self.missed: tuple[str, str] | None = None

    def _choose(self) -> Reply:
        visit = self.shop.visit
        if visit.page is Page.ITEM:
            return self._select_or_leave()
        if visit.page is Page.SUB_PAGE:
            return self._click("I go back.", "< prev")
        if visit.page is Page.RESULTS and visit.shown:
            return self._look_at_one()
        query = "product" if visit.page is Page.RESULTS else self.query
        return self._search("I search for what is asked.", searchable(query))

    def _look_at_one(self) -> Reply:
        visit = self.shop.visit
        ranks = [rank for rank in HASTY_RANKS if rank < len(visit.shown)]
        rank = self.draws.choice(ranks)
        thought = ""
        if opened := [n for n, each in enumerate(visit.shown) if each in visit.opened]:
            rank = next((each for each in ranks if each not in opened), rank)
            thought = f"Opened: {', '.join(str(n + 1) for n in opened)}. "
        self.wishes = [o for o in self.options if self.draws.random() < HASTY_SELECTS_SHARE]
        return self._click(f"{thought}I look at {rank + 1}.", self._result_targets()[rank])

    def _select_or_leave(self) -> Reply:
        if self.missed is not None:
            name, value = self.missed
            self.missed = None
            may_leave = self.num_returns < HASTY_MAX_RETURNS
            if may_leave and self.draws.random() < HASTY_LEAVES_SHARE:
                self.num_returns += 1
                return self._click(f"It has no {name}: {value}.", "< prev")
        if not self.wishes:
            return self._click("I buy it.", "buy now")
        name, value = wish = self.wishes.pop(0)
        target = self.shop.option_targets().get(wish)
        if target is None:
            self.missed = wish
        return self._click(f"I need one with {name}: {value}.", target or value)


class GoalShopper(_Shopper):
    """Finds the wanted product with the best of some searches, selects its options, buys.

    Now and then it goes wrong on purpose, as its students will, and shows the way back: once in an
    episode it may open another product and return. That turn is marked (`Reply.is_mistake`), what
    follows is to be imitated.
    """

    name = "teacher"
    mistake_share = TEACHER_MISTAKE_SHARE

    def _prepare(self) -> None:
        self.has_erred = False
        self.goal = goal_of_task(self.task, self.shop.catalog)
        self.clicked: set[tuple[str, str]] = set()
        queries = [searchable(query) for query in self._queries()]
        ranks: list[int] = []
        for query in queries:
            ranks.append(self._rank(query))
            if ranks[-1] < PAGE_SIZE:
                break
        self.query = queries[ranks.index(min(ranks))]

    def _rank(self, query: str) -> int:
        found = self.shop.catalog.search(query.lower())
        return found.index(self.goal.product) if self.goal.product in found else len(found) + 1000

    def _queries(self) -> list[str]:
        return instruction_queries(self.task.instruction, self.goal.options)

    def _choose(self) -> Reply:
        visit = self.shop.visit
        if visit.page is Page.RESULTS:
            return self._choose_result()
        if visit.page is Page.ITEM:
            return self._select_or_buy()
        return self._search("I search for what is asked.", self.query)

    def _choose_result(self) -> Reply:
        visit = self.shop.visit
        if self.goal.product in visit.shown:
            others = [product for product in visit.shown if product != self.goal.product]
            if others and not self.has_erred and self.draws.random() < self.mistake_share:
                self.has_erred = True
                wrong = self._click_product(FOUND, self.draws.choice(others))
                return replace(wrong, is_mistake=True)
            return self._click_product(FOUND, self.goal.product)
        later = visit.results[visit.page_number * PAGE_SIZE :]
        if self.goal.product in later:
            return self._click("It is not on this page.", "next >")
        if not visit.shown:
            return self._search("Nothing was found.", searchable(self.task.instruction))
        return self._click_product("The first result comes close.", visit.shown[0])

    def _select_or_buy(self) -> Reply:
        visit = self.shop.visit
        if visit.product != self.goal.product and self.has_erred:
            return self._click("This is not what is asked for.", "< prev")
        targets = self.shop.option_targets()
        for name, wanted in self.goal.options:
            offered = {value: click for (of, value), click in targets.items() if name in ("", of)}
            value = _closest(wanted, list(offered))
            taken = visit.selected if name else visit.selected.values()
            if value is None or (name or value) in taken or (name, value) in self.clicked:
                continue
            if not name:  # people may want two values of one option: the second undoes the first
                self.clicked.add((name, value))
            wish = f"{name}: {value}" if name else value
            return self._click(f"I need one with {wish}.", offered[value])
        return self._click("Everything fits, I buy it.", "buy now")


class ForgetfulShopper(GoalShopper):
    """As the teacher, but in some episodes it misnames the product and goes on as `careful`.

    A student that knows products by heart mixes up the names of those that it knows badly. The name
    is marked as a mistake; what is to be imitated is that one reads what is there from then on.
    It errs only where the careful shopper finds the wanted product on this page.
    """

    name = "forgetful"

    def _prepare(self) -> None:
        super()._prepare()
        self.careful: CarefulShopper | None = None

    def _choose(self) -> Reply:
        return self.careful._choose() if self.careful else super()._choose()

    def _choose_result(self) -> Reply:
        shop = self.shop
        can_err = not self.has_erred and self._careful_choice() == self.goal.product
        name = self._mixed_name()
        is_name = shop.visit.shown_as(name, shop.views) is not None
        if not can_err or is_name or self.draws.random() >= MISNAMING_SHARE:
            return super()._choose_result()
        self.has_erred = True
        self.careful = CarefulShopper(self._make_shop)
        self.careful.follow(shop, self.task)
        return replace(self._click(FOUND, name), is_mistake=True)

    def _careful_choice(self) -> int | None:
        """What the careful shopper would buy of the open results before the last that it tries."""
        asked = asked_options(self.task.instruction)
        if len(asked) < len(self.goal.options):  # as people write requests
            return None
        for product in self.shop.visit.shown[: MAX_OPENED - 1]:
            offered = self.shop.views(product).product.options
            if all(value in offered.get(name, ()) for name, value in asked):
                return product
        return None

    def _mixed_name(self) -> str:
        """Up to two words of the wanted product's title, and then another's."""
        other = self.draws.randrange(self.shop.catalog.num_products)
        words, other_words = (
            self.shop.views(product).title_words for product in (self.goal.product, other)
        )
        num_kept = self.draws.randrange(3)
        return searchable(" ".join([*words[:num_kept], *other_words[:5]]))


class Oracle(GoalShopper):
    """As the teacher, but its first search is the wanted product's own title."""

    name = "oracle"
    mistake_share = 0.0

    def _queries(self) -> list[str]:
        product = self.shop.catalog.product(self.goal.product)
        return [product.title, product.document, *super()._queries()]


def _without_price(instruction: str) -> str:
    return instruction.rpartition(_PRICE_TEXT)[0] or instruction


def asked_options(instruction: str) -> tuple[tuple[str, str], ...]:
    """The options (name and value) that a synthetic instruction asks for, as it says them."""
    return tuple(_ASKED_OPTION.findall(_without_price(instruction)))


def instruction_queries(instruction: str, options: Sequence[tuple[str, str]]) -> list[str]:
    """Searches made of the instruction: without options and price, with options, all of it."""
    wanted = _without_price(instruction)
    names = [name for name, _ in options if name]
    bare = wanted.split(f" with {names[0]}: ")[0] if names else wanted
    if bare.lower().startswith(_OPENING):
        bare = bare[len(_OPENING) :]
    values = " ".join(value for _, value in options)
    return [bare, f"{bare} {values}", wanted, instruction]


def _closest(wanted: str, offered: list[str]) -> str | None:
    """The offered value that is the wanted one, or else is enough like it to be rewarded."""
    if wanted in offered:
        return wanted
    likes = [(token_set_ratio(normalize_color(v), normalize_color(wanted)), v) for v in offered]
    score, value = max(likes, default=(0, ""))
    return value if score > MATCH_ABOVE else None


def policies_for(make_shop: Callable[[], Shop]) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """The scripted policies of an environment, given how to copy it."""
    kinds = (
        RandomShopper,
        RuleShopper,
        CarefulShopper,
        HastyShopper,
        GoalShopper,
        ForgetfulShopper,
        Oracle,
    )
    return {kind.name: functools.partial(kind, make_shop) for kind in kinds}
