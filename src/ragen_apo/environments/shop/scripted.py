"""Scripted shoppers: a mediocre teacher, an oracle, and two baselines.

All but the oracle read observations only. Their replies can be copied from observations: search
words are in the TASK line in the same spelling, the thought before buying (id and title) is in the
results line.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Literal

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.environments.shop.catalogue import Catalogue
from ragen_apo.environments.shop.tasks import PHRASING_WORDS
from ragen_apo.seeding import generator
from ragen_apo.types import Task

_TASK_LINE = re.compile(r"TASK: (.*)")
_RESULTS = re.compile(r"Found \d+ results?\. Top \d+: (.*)")
_LISTING = re.compile(r"(\d+) (\S[^;]*)")
_PAGE = re.compile(r"(\d+) (\S[^;:]*): ")

Listing = tuple[str, str]
"""A title and its id, as shown."""


def task_words(observation: str) -> list[str]:
    """All words of the TASK line as they stand, without punctuation; empty when there is none."""
    found = _TASK_LINE.search(observation)
    return re.findall(r"\w+", found[1]) if found else []


def product_words(words: list[str]) -> list[str]:
    """The words that describe the product."""
    return [word for word in words if word.lower() not in PHRASING_WORDS]


def listings(observation: str) -> list[Listing]:
    """The products of a results line or a product page, in the order shown."""
    results = _RESULTS.match(observation)
    if results:
        return [
            (entry[2], entry[1])
            for part in results[1].split("; ")
            if (entry := _LISTING.fullmatch(part))
        ]
    page = _PAGE.match(observation)
    return [(page[2], page[1])] if page else []


Want = Literal["all", "one", "some", "noise"]


class Teacher:
    """Searches with some of the task's words and buys one of the results, often not the best."""

    search_shares: Mapping[Want, float] = {"all": 0.54, "one": 0.26, "some": 0.13, "noise": 0.07}
    """How often a search uses all product words, one, a part of them, or any word of the task."""
    buy_share = 0.70
    """With results on the page: buy one of them ..."""
    click_share = 0.15
    """... or open one; otherwise search again."""
    first_result_share = 0.32
    """Which result: the first, which is the best match ..."""
    second_result_share = 0.48
    """... or the second, as people do who take the first for an advertisement; otherwise any."""
    max_patience_turns = 4
    """After this many turns, whatever is shown is bought."""

    def begin(self, task: Task, *, seed: int) -> None:
        """Forgets the last episode; the task is not looked at."""
        self._generator = generator(seed, "shop-teacher")
        self._words: list[str] = []
        self._num_turns = 0

    def act(self, observation: str) -> Reply:
        self._words = task_words(observation) or self._words
        self._num_turns += 1
        offers = listings(observation)
        if not offers:
            return self._search()
        draw = self._generator.random()
        if draw < self.buy_share or self._num_turns > self.max_patience_turns:
            title, product_id = self._choose(offers)
            return Reply(thought=f"{product_id} {title}", action=f"buy {product_id}")
        if draw < self.buy_share + self.click_share and len(offers) > 1:
            title, product_id = self._choose(offers)
            return Reply(thought=f"look at {product_id} {title}", action=f"click {product_id}")
        return self._search()

    def _choose(self, offers: list[Listing]) -> Listing:
        draw = self._generator.random()
        if draw < self.first_result_share or len(offers) == 1:
            return offers[0]
        if draw < self.first_result_share + self.second_result_share:
            return offers[1]
        return offers[self._generator.integers(len(offers))]

    def _search(self) -> Reply:
        described = product_words(self._words) or ["product"]
        wants = list(self.search_shares)
        want = wants[self._generator.choice(len(wants), p=list(self.search_shares.values()))]
        keywords = " ".join(self._keywords(want, described))
        return Reply(thought=f"find {keywords}", action=f"search {keywords}")

    def _keywords(self, want: Want, described: list[str]) -> list[str]:
        if want == "all":
            return described
        if want == "some":
            left_out = int(self._generator.integers(len(described)))
            return described[:left_out] + described[left_out + 1 :] or described
        words = described if want == "one" else self._words or described
        return [words[self._generator.integers(len(words))]]


class Oracle:
    """Knows the goal from the payload: searches all words, then buys it. For tests only."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._goal_id = task.payload["product_id"]

    def act(self, observation: str) -> Reply:
        """Two turns: a search, then the purchase."""
        words = product_words(task_words(observation))
        if words:
            keywords = " ".join(words)
            return Reply(thought=f"find {keywords}", action=f"search {keywords}")
        shown = {product_id: title for title, product_id in listings(observation)}
        title = shown.get(str(self._goal_id), "the product")
        return Reply(thought=f"{self._goal_id} {title}", action=f"buy {self._goal_id}")


class Heuristic:
    """Searches the last word of the request and buys the first result."""

    def begin(self, task: Task, *, seed: int) -> None:
        """The rule has no memory and no draws."""

    def act(self, observation: str) -> Reply:
        offers = listings(observation)
        if offers:
            title, product_id = offers[0]
            return Reply(thought=f"{product_id} {title}", action=f"buy {product_id}")
        keyword = (product_words(task_words(observation)) or ["product"])[-1]
        return Reply(thought=f"find {keyword}", action=f"search {keyword}")


class RandomShopper:
    """Searches random words and clicks or buys random ids, whatever it reads."""

    def __init__(self, words: tuple[str, ...], ids: tuple[int, ...]) -> None:
        self._words, self._ids = words, ids

    def begin(self, task: Task, *, seed: int) -> None:
        self._generator = generator(seed, "shop-random")

    def act(self, observation: str) -> Reply:
        """Each verb with the same probability."""
        verb = ("search", "click", "buy")[self._generator.integers(3)]
        choices = self._words if verb == "search" else self._ids
        return Reply(thought="", action=f"{verb} {choices[self._generator.integers(len(choices))]}")


def policies_for(catalogue: Catalogue) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """The scripted policies of a shop with this catalogue, by name."""
    words = tuple(
        sorted({word for product in catalogue.products for word in product.title.lower().split()})
    )
    ids = tuple(product.product_id for product in catalogue.products)
    return {
        "teacher": Teacher,
        "oracle": Oracle,
        "random": functools.partial(RandomShopper, words, ids),
        "heuristic": Heuristic,
    }
