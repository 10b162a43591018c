"""Prices and goals of a catalogue, a function of one seed, and the splits of the goals.

Consumes a `Catalog` and a price seed; produces a price for each product and each `Goal` by the
number that upstream gives it. Goals are made on demand. One private generator draws first
uniform(a, b) for each product with two prices, and then a price limit for each product with an
instruction. A second generator, seeded 233, shuffles the goals.

Source: WebShop's engine and goal modules with the global generator seeded just before construction.
Upstream itself leaves it unseeded, so its goals differ from process to process.
"""

import bisect
import functools
import hashlib
import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import overload

import numpy as np
import numpy.typing as npt

from ragen_apo.environments.webshop.catalog import Catalog, Product
from ragen_apo.environments.webshop.records import HumanRecord
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task, make_task

ENVIRONMENT_NAME = "webshop"
SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000.0
TASK_CACHE_SIZE = 16384
STANDARD_SPLITS = {
    "test": slice(0, 500),
    "validation": slice(500, 1500),
    "train": slice(1500, None),
}
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


def draw_limit(price: float, source: random.Random) -> float:
    """A price limit among the next four tens above the price; NO_LIMIT if it is high."""
    first = bisect.bisect_right(_LIMITS, price)
    above = _LIMITS[first : first + 4]
    return max(source.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def limit_text(limit: float) -> str:
    """How an instruction names its price limit."""
    return "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"


def shuffled_order(num_goals: int) -> npt.NDArray[np.int32]:
    """The order in which upstream numbers its goals: a function of their count alone."""
    order = array("i", range(num_goals))
    random.Random(SHUFFLE_SEED).shuffle(order)  # pyright: ignore[reportArgumentType]
    return np.array(order, np.int32)


def count_goals(product: Product, kind: GoalKind) -> int | None:
    """How many goals of a kind a product has; None where it has no instruction of this kind."""
    if kind is GoalKind.HUMAN:
        written = product.human_instructions
        return len(_with_attributes(product)) if written else None
    if product.instruction is None:
        return None
    return math.prod(len(values) for values in product.options.values())


def synthetic_goal(number: int, product: Product, limit: float, index: int) -> Goal:
    """The goal of a product for the combination of its options at `index`.

    The combinations are those of itertools.product over the options sorted by name. A value that
    an option lists twice makes equal goals; `repetition` counts those before this one.
    """
    options: list[tuple[str, str]] = []
    repetition, num_equal = 0, 1
    for name in sorted(product.options, reverse=True):
        values = product.options[name]
        index, chosen = divmod(index, len(values))
        options.append((name, values[chosen]))
        repetition += values[:chosen].count(values[chosen]) * num_equal
        num_equal *= values.count(values[chosen])
    options.reverse()
    described = ", and ".join(f"{name}: {value}" for name, value in options)
    with_options = f" with {described}" if described else ""
    return Goal(
        product=number,
        instruction=f"{product.instruction}{with_options}{limit_text(limit)}",
        attributes=product.instruction_attributes,
        options=tuple(options),
        price_limit=limit,
        repetition=repetition,
    )


def human_goal(number: int, product: Product, limits: Sequence[float], index: int) -> Goal:
    """The goal of a product for the instruction at `index`, given the limits up to it."""
    goals = [
        Goal(
            product=number,
            instruction=written.instruction.strip(".") + limit_text(limit),
            attributes=tuple(written.instruction_attributes),
            options=tuple(("", value) for value in written.instruction_options),
            price_limit=limit,
        )
        for written, limit in zip(_with_attributes(product), limits, strict=False)
    ]
    return replace(goals[index], repetition=goals[:index].count(goals[index]))


def _with_attributes(product: Product) -> list[HumanRecord]:
    return [each for each in product.human_instructions if each.instruction_attributes]


def product_split(asin: str) -> str:
    """The split of a product's goals under the scheme `product`: a function of its asin alone."""
    digest = hashlib.sha256(f"webshop split {asin}".encode()).digest()
    bucket = int.from_bytes(digest[:4], "big") % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")


class GoalBook:
    """The prices and goals of one catalogue, seed and kind; immutable, shared by environments.

    Holds a price per product and a limit per draw; goals and tasks are made when they are asked
    for, the latest kept.
    """

    def __init__(self, catalog: Catalog, *, price_seed: int, kind: GoalKind) -> None:
        self.catalog = catalog
        self._kind = kind
        self._index = catalog.goal_index(kind.value)
        source = random.Random(price_seed)
        self.prices = draw_prices(catalog, source)
        """The price of each product by its number."""
        drawing = self._index.products
        if kind is GoalKind.HUMAN:
            drawing = np.repeat(drawing, np.diff(self._index.ends))
        limits = (draw_limit(price, source) for price in self.prices[drawing].tolist())
        self._limits = np.fromiter(limits, np.float64, len(drawing))
        self._indices: dict[tuple[SplitScheme, str, int | None], Sequence[int]] = {}
        self.task = functools.lru_cache(TASK_CACHE_SIZE)(self._make_task)
        """The task of the goal of this number under a scheme of splits."""

    @property
    def num_goals(self) -> int:
        """The number of goals of all splits."""
        return len(self._index.order)

    def goal(self, index: int) -> Goal:
        """The goal of this number; raises IndexError for a number that no goal has."""
        if not 0 <= index < self.num_goals:
            raise IndexError(f"goal {index} of {self.num_goals}")
        drawn = int(self._index.order[index])
        row = int(np.searchsorted(self._index.ends, drawn, side="right")) - 1
        number, start = int(self._index.products[row]), int(self._index.ends[row])
        product = self.catalog.product(number)
        if self._kind is GoalKind.SYNTHETIC:
            return synthetic_goal(number, product, float(self._limits[row]), drawn - start)
        limits = self._limits[start : drawn + 1].tolist()
        return human_goal(number, product, limits, drawn - start)

    def split_of(self, index: int, scheme: SplitScheme) -> str:
        if scheme is SplitScheme.PRODUCT:
            return SPLITS[self._split_of_goal[index]]
        whole = range(self.num_goals)
        return next(split for split, part in STANDARD_SPLITS.items() if index in whole[part])

    def tasks(
        self, split: str, scheme: SplitScheme, *, per_product: int | None = None
    ) -> "TaskSequence":
        """At most `per_product` goals of a product, in order; ConfigError for an unknown split."""
        if split not in SPLITS:
            raise ConfigError(
                f"unknown split {split!r} of webshop; expected one of {', '.join(SPLITS)}"
            )
        key = (scheme, split, per_product)
        if key not in self._indices:
            indices = self._indices_of(split, scheme)
            if per_product is not None:
                indices = self._first_of_each_product(indices, per_product)
            self._indices[key] = indices
        return TaskSequence(self, self._indices[key], scheme)

    def _indices_of(self, split: str, scheme: SplitScheme) -> Sequence[int]:
        if scheme is SplitScheme.PRODUCT:
            return array("q", np.flatnonzero(self._split_of_goal == SPLITS.index(split)).tolist())
        return range(self.num_goals)[STANDARD_SPLITS[split]]

    def _first_of_each_product(self, indices: Sequence[int], number: int) -> Sequence[int]:
        products = self._index.products[self._rows()[np.asarray(indices, np.int64)]]
        num_seen: Counter[int] = Counter()
        chosen = array("q")
        for index, product in zip(indices, products.tolist(), strict=True):
            num_seen[product] += 1
            if num_seen[product] <= number:
                chosen.append(index)
        return chosen

    @functools.cached_property
    def _split_of_goal(self) -> npt.NDArray[np.uint8]:
        """The split of each goal by its number, as an index into SPLITS, under `product`."""
        asins = self.catalog.asins[self._index.products]
        of_row = np.array([SPLITS.index(product_split(asin.decode())) for asin in asins], np.uint8)
        return of_row[self._rows()]

    def _rows(self) -> npt.NDArray[np.int64]:
        """The row of each goal's product in the index, by the goal's number."""
        ends = self._index.ends
        return np.repeat(np.arange(len(ends) - 1), np.diff(ends))[self._index.order]

    def _make_task(self, index: int, scheme: SplitScheme) -> Task:
        goal = self.goal(index)
        product = self.catalog.product(goal.product)
        return make_task(
            environment=ENVIRONMENT_NAME,
            instruction=goal.instruction,
            split=self.split_of(index, scheme),
            category=product.category,
            payload={
                "asin": product.asin,
                "attributes": list(goal.attributes),
                "options": [list(option) for option in goal.options],
                "price_limit": goal.price_limit,
                "repetition": goal.repetition,
            },
        )


class TaskSequence(Sequence[Task]):
    """The tasks of a split, each made when it is asked for. Slices are tuples."""

    def __init__(self, book: GoalBook, indices: Sequence[int], scheme: SplitScheme) -> None:
        self._book, self._indices, self._scheme = book, indices, scheme

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Task, ...]: ...
    def __getitem__(self, index: int | slice) -> Task | tuple[Task, ...]:
        if isinstance(index, slice):
            return tuple(self._book.task(number, self._scheme) for number in self._indices[index])
        return self._book.task(self._indices[index], self._scheme)


def goal_book(catalog: Catalog, *, price_seed: int, kind: GoalKind) -> GoalBook:
    """The book of these conditions; one object for all that ask in this process."""
    key = (price_seed, kind)
    if key not in catalog.shared:
        catalog.shared[key] = GoalBook(catalog, price_seed=price_seed, kind=kind)
    return catalog.shared[key]


def goal_of_task(task: Task, catalog: Catalog) -> Goal:
    """The goal that a task's payload describes; ConfigError for another environment's task."""
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
