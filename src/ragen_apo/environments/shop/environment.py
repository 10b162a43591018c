"""The catalogue shop: find one product among 497 and buy it.

Actions are `search <keywords>`, `click <id>` and `buy <id>`; everything else costs a turn and is
answered with the possible actions. Only buying an existing product ends an episode; `max_turns`
cuts it off. The shop is deterministic: seeds are accepted and not used.
"""

import functools
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ragen_apo.config.section import PathText, Section
from ragen_apo.environments.base import (
    EnvironmentProperties,
    FailureWords,
    PatternWords,
    validate_options,
)
from ragen_apo.environments.shop.catalogue import Catalogue, Product, load_catalogue
from ragen_apo.environments.shop.rewards import PRESETS, RewardScheme, reward_scheme
from ragen_apo.environments.shop.scripted import policies_for
from ragen_apo.environments.shop.tasks import SPLITS, make_tasks
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.environments.tools import Tool
from ragen_apo.types import Task, TurnFlag

TEXT_VERSION = 2
"""Raise it whenever the words of an observation, the search or the dynamics change."""

RULES = (
    "You shop for a user. Actions: search <keywords>, click <id>, buy <id>. "
    "Buy the one product that the task names; buying ends the episode."
)
_ID = {"id": {"type": "integer", "description": "The product's id."}}
TOOLS = (
    Tool(
        "search",
        "Search the shop.",
        "search {keywords}",
        {"keywords": {"type": "string", "description": "Words of the product."}},
    ),
    Tool("click", "Look at a product.", "click {id}", _ID),
    Tool("buy", "Buy a product, which ends the episode.", "buy {id}", _ID),
)
POSSIBLE_ACTIONS = "Invalid action. Use: search <keywords>, click <id> or buy <id>."

_TARGET_SHOWN = (TurnFlag.TARGET_SHOWN.value,)
_ACTION = re.compile(r"\s*(search|click|buy)\s+(\S.*)", re.IGNORECASE | re.DOTALL)
_PRODUCT_ID = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


class ShopOptions(Section):
    """The options of the environment `shop`."""

    catalogue: PathText | None = None
    """A catalogue file of your own; null: the 497 products of the package."""
    num_products: int | None = Field(default=None, ge=1)
    """Offer only this many products, categories in turn; null: all."""
    phrasings: Literal["one", "all"] = "one"
    """One task per product, or one per product and phrasing."""
    max_turns: int = Field(default=10, ge=1, le=1000)
    """Truncates an episode after this many turns."""
    max_results: int = Field(default=5, ge=1, le=50)
    """How many results a search shows."""
    reward: Annotated[RewardScheme, BeforeValidator(reward_scheme)] = PRESETS["fixed"]
    """A preset's name, or the numbers that differ from the preset `fixed`."""


FAILURE_WORDS = FailureWords(
    loop=PatternWords(
        advice="If it searches again and again, check that this cannot pay: `environment.reward: "
        "fixed` limits rewarded searches. Add demonstrations that recover from a fruitless search. "
        "If it looks at products again and again, add some that buy after a look.",
    ),
    wrong_final_action=PatternWords(
        name="wrong purchase",
        meaning="The agent bought another product than the one that was asked for.",
        advice="If the goal was on screen, choosing is the problem: train longer, or let the agent "
        "look at a product before it buys. If it was not, searching is: see which words of the "
        "task the agent drops.",
    ),
    unreachable_target=PatternWords(
        advice="See whether the heuristic baseline finds these products. If it does not, the "
        "search or the task is at fault. If it does, demonstrate searches in other words."
    ),
    timeout=PatternWords(
        advice="See whether the agent was on its way: then raise `environment.max_turns` or "
        "`agent.max_context_tokens`. If it wanders, a cost per turn helps (`turn` in "
        "`environment.reward`)."
    ),
)


@dataclass(frozen=True)
class Screen:
    """What the episode has shown last; an action that is not possible leaves it as it is."""

    query: str = ""
    """The last search; empty before the first one."""
    found: tuple[int, ...] = ()
    """The ids that it found, best first; the first `max_results` of them were shown."""
    product: Product | None = None
    """The product that was opened or bought after it."""


class ShopGame:
    """One shopping episode."""

    def __init__(self, options: ShopOptions, catalogue: Catalogue, task: Task, seed: int) -> None:
        goal_id = task.payload.get("product_id")
        if not (isinstance(goal_id, int) and goal_id in catalogue.by_id):
            raise ValueError(f"there is no product with the id {goal_id!r}")
        self._options, self._catalogue, self._goal_id = options, catalogue, goal_id
        self.screen = Screen()
        self._page = (
            f"TASK: {task.instruction}\nAvailable: {len(catalogue.products)} products "
            f"across {len(catalogue.categories)} categories."
        )
        self._num_rewarded_searches = 0
        self._is_over = False

    def first_observation(self) -> str:
        return self._page

    def play(self, text: str) -> Answer:
        answer = self._answer(text)
        self._page, self._is_over = answer.observation, answer.terminated
        return replace(answer, reward=answer.reward + self._options.reward.turn)

    def key(self) -> str:
        """Rewarded searches, whether something was bought, and a digest of the page."""
        page = hashlib.blake2b(self._page.encode(), digest_size=6).hexdigest()
        return f"{self._num_rewarded_searches}:{'end' if self._is_over else 'open'}:{page}"

    def _answer(self, text: str) -> Answer:
        """The answer without the cost that every turn has."""
        parsed = _ACTION.fullmatch(text)
        if parsed:
            verb, argument = parsed[1].lower(), parsed[2].strip()
            if verb == "search":
                return self._search(argument)
            number = int(argument) if _PRODUCT_ID.fullmatch(argument) else 0
            if product := self._catalogue.by_id.get(number):
                self.screen = replace(self.screen, product=product)
                return self._click(product) if verb == "click" else self._buy(product)
        return Answer(POSSIBLE_ACTIONS, self._options.reward.invalid_action, invalid=True)

    def _search(self, keywords: str) -> Answer:
        found = self._catalogue.index.search(keywords)
        self.screen = Screen(keywords, found)
        shown = found[: self._options.max_results]
        if not shown:
            return Answer("Found 0 results.")
        listing = "; ".join(self._catalogue.by_id[product_id].listing for product_id in shown)
        noun = "result" if len(found) == 1 else "results"
        observation = f"Found {len(found)} {noun}. Top {len(shown)}: {listing}"
        if self._goal_id not in shown:
            return Answer(observation)
        scheme, num_rewarded = self._options.reward, self._num_rewarded_searches
        self._num_rewarded_searches += scheme.rewards_search(num_rewarded)
        return Answer(observation, scheme.search_bonus(num_rewarded), flags=_TARGET_SHOWN)

    def _click(self, product: Product) -> Answer:
        if product.product_id != self._goal_id:
            return Answer(product.details, self._options.reward.irrelevant_click)
        return Answer(product.details, flags=_TARGET_SHOWN)

    def _buy(self, product: Product) -> Answer:
        scheme, is_right = self._options.reward, product.product_id == self._goal_id
        reward = scheme.correct_buy if is_right else scheme.wrong_buy
        bought = f"You bought {product.title}."
        return Answer(bought, reward, terminated=True, success=is_right)


class ShopEnvironment(GameEnvironment):
    """One shopping episode at a time."""

    def __init__(self, /, **options: Any) -> None:
        self.options = checked = validate_options(ShopOptions, options)
        self.catalogue = load_catalogue(checked.catalogue, checked.num_products)
        super().__init__(
            properties=EnvironmentProperties(
                name="shop",
                version=(
                    f"shop-{TEXT_VERSION}-{self.catalogue.content_hash}"
                    f"-turns{checked.max_turns}-results{checked.max_results}"
                ),
                reward_version=checked.reward.version,
                deterministic=True,
                return_range=checked.reward.return_range(checked.max_turns),
                splits=SPLITS,
                rules=RULES,
                failure_words=FAILURE_WORDS,
                tools=TOOLS,
            ),
            tasks=make_tasks(self.catalogue, checked.phrasings == "all"),
            start=functools.partial(ShopGame, checked, self.catalogue),
            policies=policies_for(self.catalogue),
            max_turns=checked.max_turns,
        )

    @property
    def screen(self) -> Screen:
        """What the present episode has shown last."""
        assert isinstance(self._game, ShopGame), "there is an episode"
        return self._game.screen

    def state_key(self) -> str:
        """Task, turns used, and the game's own state, as stored values have them."""
        if self._task is None or self._game is None:
            return "none"
        return f"{self._task.task_id}:{self._num_turns}:{self._game.key()}"
