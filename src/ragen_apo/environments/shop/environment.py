"""The catalogue shop: find one product among 497 and buy it.

Actions are `search <keywords>`, `click <id>` and `buy <id>`; everything else costs a turn and is
answered with the possible actions. Only buying an existing product ends an episode; `max_turns`
cuts it off. The shop is deterministic: seeds are accepted and not used.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ragen_apo.config.section import Section
from ragen_apo.environments.base import (
    EnvironmentProperties,
    FailureWords,
    PatternWords,
    ScriptedPolicy,
    validate_options,
)
from ragen_apo.environments.shop.catalogue import Catalogue, Product, load_catalogue
from ragen_apo.environments.shop.rewards import PRESETS, RewardScheme, reward_scheme
from ragen_apo.environments.shop.scripted import policies_for
from ragen_apo.environments.shop.tasks import SPLITS, make_tasks
from ragen_apo.environments.toolkit.game import EPISODE_OVER
from ragen_apo.environments.tools import Tool
from ragen_apo.errors import ConfigError
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

_ACTION = re.compile(r"\s*(search|click|buy)\s+(\S.*)", re.IGNORECASE | re.DOTALL)
_PRODUCT_ID = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


class ShopOptions(Section):
    """The options of the environment `shop`."""

    catalogue: str | None = None
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
        name="search loop",
        advice="Check that searching again cannot pay: `environment.reward: fixed` limits rewarded "
        "searches. Add demonstrations that recover from a fruitless search.",
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


class ShopEnvironment:
    """One shopping episode at a time."""

    def __init__(self, /, **options: Any) -> None:
        self.options = validate_options(ShopOptions, options)
        self.catalogue = load_catalogue(self.options.catalogue, self.options.num_products)
        self._tasks = make_tasks(self.catalogue, self.options.phrasings == "all")
        self.properties = _declare(self.options, self.catalogue)
        self._task: Task | None = None
        self._start_episode(goal_id=0)

    def _start_episode(self, *, goal_id: int) -> None:
        self._goal_id = goal_id
        self.screen = Screen()
        """To be read, not changed."""
        self._observation = ""
        self._num_turns = 0
        self._num_rewarded_searches = 0
        self._bought_id: int | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise ConfigError(
                f"the environment shop has no split {split!r}; expected one of {', '.join(SPLITS)}"
            )
        return [task for task in self._tasks if split in ("all", task.split)]

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        goal_id = task.payload.get("product_id")
        if not (isinstance(goal_id, int) and goal_id in self.catalogue.by_id):
            raise ConfigError(
                f"the shop cannot set up task {task.task_id} of {task.environment!r} with the "
                f"product id {goal_id!r}; expected a task of a shop with the same options"
            )
        self._task = task
        self._start_episode(goal_id=goal_id)
        self._observation = (
            f"TASK: {task.instruction}\nAvailable: {len(self.catalogue.products)} products "
            f"across {len(self.catalogue.categories)} categories."
        )
        return self._observation, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Executes any text; after the end nothing changes and nothing is earned."""
        if self._task is None:
            raise RuntimeError(
                "the shop has no episode yet; call reset(task, seed=...) before step"
            )
        if self._terminated or self._truncated:
            return EPISODE_OVER, 0.0, self._terminated, self._truncated, self._final_info()
        self._num_turns += 1
        info: dict[str, Any] = {}
        self._observation, earned = self._execute(action, info)
        if self._terminated or self._truncated:
            info |= self._final_info()
        reward = earned + self.options.reward.turn
        return self._observation, reward, self._terminated, self._truncated, info

    def state_key(self) -> str:
        """Task, turns used, rewarded searches, and a digest of the page that is open."""
        task_id = self._task.task_id if self._task else "none"
        page = hashlib.blake2b(self._observation.encode(), digest_size=6).hexdigest()
        ended = "end" if self._terminated else "open"
        return f"{task_id}:{self._num_turns}:{self._num_rewarded_searches}:{ended}:{page}"

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        return policies_for(self.catalogue)

    @property
    def _terminated(self) -> bool:
        return self._bought_id is not None

    @property
    def _truncated(self) -> bool:
        return not self._terminated and self._num_turns >= self.options.max_turns

    def _final_info(self) -> dict[str, Any]:
        return {"success": self._bought_id == self._goal_id}

    def _execute(self, action: str, info: dict[str, Any]) -> tuple[str, float]:
        """The next observation, and the reward without the turn's cost."""
        parsed = _ACTION.fullmatch(action)
        if parsed:
            verb, argument = parsed[1].lower(), parsed[2].strip()
            if verb == "search":
                return self._search(argument, info)
            product = self._product(argument)
            if product is not None:
                return self._click(product, info) if verb == "click" else self._buy(product)
        info["invalid_action"] = True
        return POSSIBLE_ACTIONS, self.options.reward.invalid_action

    def _product(self, text: str) -> Product | None:
        return self.catalogue.by_id.get(int(text)) if _PRODUCT_ID.fullmatch(text) else None

    def _search(self, keywords: str, info: dict[str, Any]) -> tuple[str, float]:
        found = self.catalogue.index.search(keywords)
        self.screen = Screen(keywords, found)
        shown = found[: self.options.max_results]
        if not shown:
            return "Found 0 results.", 0.0
        listing = "; ".join(self.catalogue.by_id[product_id].listing for product_id in shown)
        noun = "result" if len(found) == 1 else "results"
        observation = f"Found {len(found)} {noun}. Top {len(shown)}: {listing}"
        if self._goal_id not in shown:
            return observation, 0.0
        info["flags"] = (TurnFlag.TARGET_SHOWN.value,)
        scheme = self.options.reward
        bonus = scheme.search_bonus(self._num_rewarded_searches)
        if scheme.rewards_search(self._num_rewarded_searches):
            self._num_rewarded_searches += 1
        return observation, bonus

    def _click(self, product: Product, info: dict[str, Any]) -> tuple[str, float]:
        self.screen = replace(self.screen, product=product)
        if product.product_id != self._goal_id:
            return product.details, self.options.reward.irrelevant_click
        info["flags"] = (TurnFlag.TARGET_SHOWN.value,)
        return product.details, 0.0

    def _buy(self, product: Product) -> tuple[str, float]:
        self.screen = replace(self.screen, product=product)
        self._bought_id = product.product_id
        scheme = self.options.reward
        correct = product.product_id == self._goal_id
        return f"You bought {product.title}.", scheme.correct_buy if correct else scheme.wrong_buy


def _declare(options: ShopOptions, catalogue: Catalogue) -> EnvironmentProperties:
    return EnvironmentProperties(
        name="shop",
        version=(
            f"shop-{TEXT_VERSION}-{catalogue.content_hash}"
            f"-turns{options.max_turns}-results{options.max_results}"
        ),
        reward_version=options.reward.version,
        deterministic=True,
        return_range=options.reward.return_range(options.max_turns),
        splits=SPLITS,
        rules=RULES,
        max_turns=options.max_turns,
        failure_words=FAILURE_WORDS,
        tools=TOOLS,
    )
