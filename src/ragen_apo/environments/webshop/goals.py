"""Prices and goals of a catalogue, a function of one seed, and the splits of the goals.

Consumes a `Catalog` and a price seed; produces a price for each product and the list of `Goal`s in
upstream's order. With one private generator: each product with two prices draws uniform(a, b),
then each product with an instruction draws its price limit; then a second generator, seeded 233,
shuffles the goals. Source: WebShop's engine and goal modules with the global generator seeded just
before construction; upstream itself leaves it unseeded, so its goals differ from process to
process.
"""

import hashlib
import itertools
import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ragen_apo.environments.webshop.catalog import Catalog, Product
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task, make_task

ENVIRONMENT_NAME = "webshop"
SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000.0
NUM_STANDARD_TEST = 500
NUM_STANDARD_VALIDATION = 1000
_LIMITS = tuple(10.0 * step for step in range(1, 100))
SPLITS = ("train", "validation", "test")


class GoalKind(str, Enum):
    """Who wrote the instructions."""

    SYNTHETIC = "synthetic"
    HUMAN = "human"


class SplitScheme(str, Enum):
    """How goals are divided into train, validation and test."""

    STANDARD = "standard"
    """Test: goals 0 to 499, validation 500 to 1,499, train the rest (Yao et al., 2022)."""
    PRODUCT = "product"
    """By product, so that no product has goals in two splits: a tenth test, a tenth validation."""


@dataclass(frozen=True)
class Goal:
    """What a customer wants."""

    product: int
    """The number of the product that the instruction describes."""
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """(name, value) pairs; human instructions name values only, their names are empty."""
    price_limit: float
    repetition: int = 0
    """How many equal goals come before it; the data lists some option values twice."""


def draw_prices(catalog: Catalog, source: random.Random) -> npt.NDArray[np.float64]:
    """A price for each product: its own, or drawn between its two ends, in product order."""
    prices = np.array(catalog.price_ends[:, 0])
    ranges = np.flatnonzero(~np.isnan(catalog.price_ends[:, 1]))
    prices[ranges] = [source.uniform(*ends) for ends in catalog.price_ends[ranges].tolist()]
    return prices


def draw_limit(price: float, source: random.Random) -> tuple[float, str]:
    """A price limit among the next four tens above the price, and its text; none for a high
    price.
    """
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(source.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _synthetic_goals(
    number: int, product: Product, price: float, source: random.Random
) -> list[Goal]:
    limit, limit_text = draw_limit(price, source)
    names = sorted(product.options)
    goals: list[Goal] = []
    for values in itertools.product(*(product.options[name] for name in names)):
        options = tuple(zip(names, values, strict=True))
        described = ", and ".join(f"{name}: {value}" for name, value in options)
        with_options = f" with {described}" if described else ""
        goals.append(
            Goal(
                product=number,
                instruction=f"{product.instruction}{with_options}{limit_text}",
                attributes=product.instruction_attributes,
                options=options,
                price_limit=limit,
            )
        )
    return goals


def _human_goals(
    number: int, product: Product, price: float, source: random.Random
) -> Iterator[Goal]:
    for written in product.human_instructions:
        if written.attributes:
            limit, limit_text = draw_limit(price, source)
            yield Goal(
                product=number,
                instruction=written.text.strip(".") + limit_text,
                attributes=written.attributes,
                options=tuple(("", value) for value in written.options),
                price_limit=limit,
            )


def _count_repetitions(goals: list[Goal]) -> list[Goal]:
    """Numbers equal goals, so that each has an id of its own."""
    seen: dict[Goal, int] = {}
    numbered: list[Goal] = []
    for goal in goals:
        repetition = seen.get(goal, 0)
        seen[goal] = repetition + 1
        numbered.append(
            goal if repetition == 0 else Goal(**{**goal.__dict__, "repetition": repetition})
        )
    return numbered


def make_goals(
    catalog: Catalog, *, price_seed: int, kind: GoalKind
) -> tuple[npt.NDArray[np.float64], list[Goal]]:
    """Prices by product number, and the goals in the order in which they are numbered."""
    source = random.Random(price_seed)
    prices = draw_prices(catalog, source)
    goals: list[Goal] = []
    if kind is GoalKind.SYNTHETIC:
        for number in catalog.instructed.tolist():
            goals += _synthetic_goals(
                number, catalog.product(number), float(prices[number]), source
            )
    else:
        for number in catalog.with_human.tolist():
            goals += _human_goals(number, catalog.product(number), float(prices[number]), source)
    goals = _count_repetitions(goals)
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return prices, goals


def product_split(asin: str) -> str:
    """The split of all goals of a product under the scheme `product`: a function of its asin
    alone.
    """
    bucket = (
        int.from_bytes(hashlib.sha256(f"webshop split {asin}".encode()).digest()[:4], "big") % 10
    )
    return {0: "test", 1: "validation"}.get(bucket, "train")


class GoalBook:
    """The prices and goals of one catalogue, seed and kind; immutable, shared by environments."""

    def __init__(self, catalog: Catalog, *, price_seed: int, kind: GoalKind) -> None:
        self.catalog = catalog
        self.prices, self.goals = make_goals(catalog, price_seed=price_seed, kind=kind)
        self._tasks: dict[tuple[SplitScheme, str], tuple[Task, ...]] = {}

    def split_of(self, index: int, scheme: SplitScheme) -> str:
        """The split of the goal of this number."""
        if scheme is SplitScheme.PRODUCT:
            return product_split(self.catalog.product(self.goals[index].product).asin)
        if index < NUM_STANDARD_TEST:
            return "test"
        return "validation" if index < NUM_STANDARD_TEST + NUM_STANDARD_VALIDATION else "train"

    def tasks(self, split: str, scheme: SplitScheme) -> tuple[Task, ...]:
        """The tasks of a split in the order of the goals; raises ConfigError for an unknown
        split.
        """
        if split not in SPLITS:
            raise ConfigError(
                f"unknown split {split!r} of webshop; expected one of {', '.join(SPLITS)}"
            )
        key = (scheme, split)
        if key not in self._tasks:
            self._tasks[key] = tuple(
                self._task(goal, split)
                for index, goal in enumerate(self.goals)
                if self.split_of(index, scheme) == split
            )
        return self._tasks[key]

    def task(self, index: int, scheme: SplitScheme) -> Task:
        """The task of the goal of this number."""
        return self._task(self.goals[index], self.split_of(index, scheme))

    def _task(self, goal: Goal, split: str) -> Task:
        product = self.catalog.product(goal.product)
        return make_task(
            environment=ENVIRONMENT_NAME,
            instruction=goal.instruction,
            split=split,
            category=product.category,
            payload={
                "asin": product.asin,
                "attributes": list(goal.attributes),
                "options": [list(option) for option in goal.options],
                "price_limit": goal.price_limit,
                "repetition": goal.repetition,
            },
        )


_BOOKS: "weakref.WeakValueDictionary[tuple, GoalBook]" = weakref.WeakValueDictionary()


def goal_book(catalog: Catalog, *, price_seed: int, kind: GoalKind) -> GoalBook:
    """The book of these conditions; one object for all that ask in this process."""
    key = (catalog.folder, price_seed, kind)
    book = _BOOKS.get(key)
    if book is None:
        book = GoalBook(catalog, price_seed=price_seed, kind=kind)
        _BOOKS[key] = book
    return book


def goal_of_task(task: Task, catalog: Catalog) -> Goal:
    """The goal that a task's payload describes; raises ConfigError for another environment's
    task.
    """
    try:
        payload = task.payload
        return Goal(
            product=catalog.number_of(payload["asin"]),
            instruction=task.instruction,
            attributes=tuple(payload["attributes"]),
            options=tuple((name, value) for name, value in payload["options"]),
            price_limit=payload["price_limit"],
            repetition=payload["repetition"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task {task.task_id} of {task.environment!r} is not a webshop task "
            f"({type(error).__name__}: {error}); make it with WebShopEnvironment.tasks"
        ) from error
