"""WebShop as a text environment: one customer, one goal, one purchase.

Consumes a `Task` (a goal of the catalogue) and actions `search[words]` and `click[target]`;
produces observations in one of three modes and, on Buy Now, the reward. Everything large is
shared: the mapped catalogue, its views, the prices and goals. The rest is a `Visit`, which
belongs to its environment.
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ragen_apo.config.section import AtHome, Section
from ragen_apo.environments.base import (
    EnvironmentProperties,
    FailureWords,
    PatternWords,
    ScriptedPolicy,
    validate_options,
)
from ragen_apo.environments.toolkit.game import EPISODE_OVER, no_episode
from ragen_apo.environments.webshop.goals import (
    ENVIRONMENT_NAME,
    SPLITS,
    Goal,
    GoalKind,
    SplitScheme,
    goal_book,
    goal_of_task,
)
from ragen_apo.environments.webshop.nouns import NOUN_RULES, NounRule
from ragen_apo.environments.webshop.pages import (
    INVALID_ACTION_LINE,
    RENDERERS,
    AvailableActions,
    ObservationMode,
    clickables,
    compact_actions,
    option_targets,
    product_name,
    render_done,
    shopping_tools,
)
from ragen_apo.environments.webshop.reward import RewardRule, RewardVariant, Score
from ragen_apo.environments.webshop.scripted import policies_for
from ragen_apo.environments.webshop.store import (
    AUTO,
    is_generated,
    open_catalog,
    open_prepared,
    resolve_data,
)
from ragen_apo.environments.webshop.views import product_views
from ragen_apo.environments.webshop.visit import Page, Visit, parse_action, parse_plain_action
from ragen_apo.errors import ConfigError
from ragen_apo.plural import counted
from ragen_apo.types import Task, TurnFlag

TEXT_VERSION = 9
"""Raise it whenever the words of an observation, the search, the goals or the dynamics change."""
REWARD_VERSION = 2
"""Raise it whenever the same purchase would earn something else."""

FAILURE_WORDS = FailureWords(
    loop=PatternWords(
        advice="Add demonstrations that recover from a fruitless search or click.",
    ),
    wrong_final_action=PatternWords(
        name="wrong purchase",
        meaning="The agent bought something that does not fit in all respects: another product, or "
        "the right one with a wrong or missing option.",
        advice="Read what was bought. Another product although the right one was on screen: "
        "choosing is the problem. A missing option: demonstrate that options are selected first.",
    ),
    unreachable_target=PatternWords(
        advice="See whether the heuristic baseline finds these products. If it does not, the "
        "search or the task is at fault. If it does, demonstrate searches in other words."
    ),
    timeout=PatternWords(
        advice="See whether the agent was on its way: then raise `environment.max_turns` or "
        "`agent.max_context_tokens`."
    ),
)


def rules(observation: ObservationMode) -> str:
    """What a system prompt says about the shop; the actions as the mode writes them."""
    search, click, buy = "search[words]", "click[target]", "click[buy now]"
    product, option = "a product id", "an option"
    if observation is ObservationMode.COMPACT:
        search, click, buy = "search <words>", "click <target>", "click buy now"
        product = "a result's number or the first words of its title"
        option = "an option or its number (click #3)"
    return (
        f"You shop for a customer. Actions: {search} anywhere; {click} for what the page offers: "
        f"{product}, {option}, next >, < prev, back to search, description, features, reviews, "
        f"buy now. Find what the task asks for, select the asked options, then {buy}; buying ends "
        "the episode."
    )


class WebShopOptions(Section):
    """The options of the environment `webshop`."""

    model_config = ConfigDict(strict=False, arbitrary_types_allowed=True)

    data: Annotated[str | Path, AtHome] = AUTO
    """A folder with upstream's files; `generated` or `generated:<number of products>`; `auto`: the
    downloaded data where there is some, else `generated`."""
    store: Annotated[Path | None, AtHome] = None
    """Where prepared catalogues are kept; null: the user's data folder."""
    price_seed: int = 0
    """The seed of prices, price limits and so of the goals."""
    goals: GoalKind = GoalKind.SYNTHETIC
    """Instructions made of a product's data, or those that people wrote."""
    split_scheme: SplitScheme = SplitScheme.STANDARD
    """How goals are divided: as in the paper, or so that no product is in two splits."""
    train_goals_per_product: int | None = Field(default=None, ge=1)
    """Most goals of one product in the split `train`; null: all. A few products, with many options,
    have hundreds."""
    observation: ObservationMode = ObservationMode.COMPACT
    """Ours for language models, or one of upstream's two text modes."""
    reward: RewardVariant = RewardVariant.CORRECTED
    """Whether options are compared as upstream does, or by value."""
    payoff: Literal["dense", "binary"] = "dense"
    """What the purchase pays: the score, or 1 for success and 0 otherwise."""
    nouns: str | NounRule = "rule"
    """A noun rule by name (rule, words, spacy), or a function of your own from title to nouns."""
    max_turns: int | None = Field(default=15, ge=1)
    """Truncates an episode after this many actions, by default those of published agents; null:
    never, as upstream."""
    states: Literal["exact", "similar"] = "exact"
    """What `state_key` tells apart: all that decides the future, or what it mostly depends on."""


def _noun_rule(choice: str | NounRule) -> tuple[str, NounRule]:
    """The name and the function of a noun rule.

    The name is part of the reward's version, so a rule without one of its own is refused. Raises
    ConfigError, and EnvironmentDataError where spaCy or its model is missing.
    """
    if not isinstance(choice, str):
        name = getattr(choice, "__qualname__", "")
        if not name or "<" in name:
            raise ConfigError(
                f"environment.nouns: got {choice!r}, expected a function that a module defines: "
                "its name tells stored rewards from those of other rules"
            )
        return f"{choice.__module__}.{name}", choice
    if choice not in NOUN_RULES:
        raise ConfigError(
            f"environment.nouns: got {choice!r}, expected one of {', '.join(NOUN_RULES)} "
            "or a function"
        )
    rule = NOUN_RULES[choice]
    rule("")  # spaCy's model is missing now, not at the first purchase
    return choice, rule


class WebShopEnvironment:
    """One shopping episode at a time."""

    def __init__(self, /, **options: Any) -> None:
        self.options = validate_options(WebShopOptions, options)
        self.is_compact = self.options.observation is ObservationMode.COMPACT
        """Whether actions are written without brackets; with brackets works in every mode."""
        self._attach(None)
        self.properties = self._declare()
        self._task: Task | None = None
        self._goal: Goal | None = None
        self.visit = Visit(page=Page.DONE)
        """The state of the visit; to be read, not changed."""
        self._num_turns = 0
        self._score: Score | None = None

    def _attach(self, folder: Path | None) -> None:
        """Takes hold of everything shared; `folder` is the prepared one where it is known."""
        data, store = str(self.options.data), self.options.store
        self.catalog = open_prepared(folder) if folder else open_catalog(data, store=store)
        self.views = product_views(self.catalog)
        self._book = goal_book(
            self.catalog, price_seed=self.options.price_seed, kind=self.options.goals
        )
        self._noun_rule_name, nouns = _noun_rule(self.options.nouns)
        self._reward_rule = RewardRule(self.options.reward, nouns)
        self._render = RENDERERS[self.options.observation]

    def _declare(self) -> EnvironmentProperties:
        options = self.options
        content = f"{self.catalog.fingerprint}|{options.price_seed}|{options.goals.value}"
        data = hashlib.sha256(content.encode()).hexdigest()[:12]
        turns = "" if options.max_turns is None else f"-turns{options.max_turns}"
        return EnvironmentProperties(
            name=ENVIRONMENT_NAME,
            version=f"{data}-{options.observation.value}{TEXT_VERSION}{turns}",
            reward_version=(
                f"{options.reward.value}{REWARD_VERSION}-{options.payoff}-nouns:{self._noun_rule_name}"
            ),
            deterministic=True,
            return_range=(0.0, 1.0),
            splits=SPLITS,
            rules=rules(options.observation),
            data=self._data_in_words(),
            max_turns=options.max_turns,
            failure_words=FAILURE_WORDS,
            tools=shopping_tools(options.observation),
        )

    def _data_in_words(self) -> str:
        number, data = self.catalog.num_products, resolve_data(str(self.options.data))
        if not is_generated(data):
            return f"{counted(number, 'product')} of {data}"
        instead = " (`ragen-apo data webshop` gets real ones)" if self.options.data == AUTO else ""
        return f"{counted(number, 'generated product')}{instead}"

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is shared, which the other process maps for itself."""
        shared = ("catalog", "views", "_book", "_reward_rule", "_render", "_noun_rule_name")
        state = {name: value for name, value in self.__dict__.items() if name not in shared}
        return state | {"folder": self.catalog.folder, "visit": copy.deepcopy(self.visit)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        folder = state.pop("folder")
        self.__dict__.update(state)
        self._attach(folder)

    def tasks(self, split: str) -> Sequence[Task]:
        """The goals of a split in upstream's order; raises ConfigError for an unknown split."""
        if self.options.goals == "human" and self.num_goals == 0:
            raise ConfigError(
                f"environment.goals is human, and {resolve_data(str(self.options.data))} has no "
                "goals that people wrote (items_human_ins.json); get them with `ragen-apo data "
                "webshop`, or set goals to synthetic"
            )
        per_product = self.options.train_goals_per_product if split == "train" else None
        return self._book.tasks(split, self.options.split_scheme, per_product=per_product)

    @property
    def num_goals(self) -> int:
        return self._book.num_goals

    def goal_task(self, index: int) -> Task:
        """The task of a goal by the number that upstream gives it."""
        return self._book.task(index, self.options.split_scheme)

    def prices(self) -> Mapping[str, float]:
        """The price of each product by its id."""
        asins = (asin.decode() for asin in self.catalog.asins.tolist())
        return dict(zip(asins, self._book.prices.tolist(), strict=True))

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode; the seed is accepted and not used, nothing here is random.

        Raises ConfigError for a task of another environment, or of other prices where they show.
        """
        goal = goal_of_task(task, self.catalog)
        price = float(self._book.prices[goal.product])
        if price > goal.price_limit:
            raise ConfigError(
                f"task {task.task_id} asks for less than {goal.price_limit:g} and its product "
                f"costs {price:g}: it is of another price seed than {self.options.price_seed}; "
                "take the task from this environment"
            )
        self._goal = goal
        self._task = task
        self.visit = Visit()
        self._num_turns = 0
        self._score = None
        return self.observation, {"available_actions": self.available_actions()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Executes any text; see `TextEnvironment.step` and the module's rules."""
        if self._task is None:
            raise RuntimeError(no_episode(ENVIRONMENT_NAME))
        if self._over():
            is_success = self._score is not None and self._score.success
            info = {"invalid_action": True, "available_actions": None, "success": is_success}
            return EPISODE_OVER, 0.0, self._score is not None, self._score is None, info
        valid = self._follow(action)
        self._num_turns += 1
        reward = 0.0
        info: dict[str, Any] = {"invalid_action": not valid}
        if self.visit.page is Page.DONE:
            reward = self._pay(info)
        elif valid and self._target_is_shown():
            info["flags"] = (TurnFlag.TARGET_SHOWN.value,)
        info["metrics"] = self._measured()
        info["available_actions"] = self.available_actions()
        observation = self.observation
        if not valid and self.is_compact:
            observation = f"{INVALID_ACTION_LINE}\n{compact_actions(self.visit, self.views)}"
        terminated = self._score is not None
        truncated = not terminated and self._num_turns == self.options.max_turns
        if truncated:
            info["success"] = False
        return observation, reward, terminated, truncated, info

    def product_name(self, product: int) -> str:
        """How a product of the open results is clicked in this mode; its id works in every mode."""
        return product_name(self.visit, product, self.views, self.options.observation)

    def option_targets(self) -> Mapping[tuple[str, str], str]:
        """How the options (name and value) of the open product are clicked in this mode."""
        return option_targets(self.visit, self.views, self.options.observation)

    def _over(self) -> bool:
        limit = self.options.max_turns
        return self.visit.page is Page.DONE or (limit is not None and self._num_turns >= limit)

    def _follow(self, action: str) -> bool:
        """Carries an action out; False where it is none, or none that the page offers."""
        parsed = (parse_plain_action if self.is_compact else parse_action)(action)
        if parsed is None:
            return False
        name, argument = parsed
        if name == "search":
            self.visit.search(argument, self.catalog)
            return True
        if name != "click":
            return False
        if self.is_compact:
            return self._click_compact(argument)
        return self.visit.click(argument, self.views)

    def _click_compact(self, target: str) -> bool:
        """As in upstream's modes, but a number of the page comes first and a title's start last."""
        visit, views = self.visit, self.views
        if visit.select_numbered(target, views):
            return True
        result = visit.result_named(target, views)
        if result is None:
            return visit.click(target, views)
        visit.open_result(result)
        return True

    def _pay(self, info: dict[str, Any]) -> float:
        goal, bought = self._goal, self.visit.product
        assert goal is not None and bought is not None
        self._score = self._reward_rule.score(
            goal,
            self.catalog.product(goal.product),
            self.catalog.product(bought),
            price=float(self._book.prices[bought]),
            selected=self.visit.selected,
        )
        info["success"] = self._score.success
        info["reward_parts"] = dict(self._score.parts)
        return float(self._score.success) if self.options.payoff == "binary" else self._score.value

    def _measured(self) -> dict[str, float]:
        """The score and its parts as WebShop's papers report them: 0 until something is bought."""
        assert self._goal is not None
        score = self._score or Score(0.0, {})
        parts = {"type_match": "r_type", "attribute_match": "r_att", "price_match": "r_price"}
        if self._goal.options:
            parts["option_match"] = "r_option"
        matches = {name: float(score.parts.get(part, 0)) for name, part in parts.items()}
        return {"score": score.value, **matches}

    def _target_is_shown(self) -> bool:
        assert self._goal is not None
        if self.visit.page is Page.RESULTS:
            return self._goal.product in self.visit.shown
        return self._goal.product == self.visit.product

    @property
    def observation(self) -> str:
        """The open page in the chosen mode."""
        if self.visit.page is Page.DONE:
            if self._score is None:
                return EPISODE_OVER
            mode = self.options.observation
            return render_done(self.visit, mode, self.views, self._score.value)
        assert self._task is not None
        return self._render(self.visit, self._task.instruction, self.views)

    def available_actions(self) -> AvailableActions | None:
        """Whether the page has a search field and what it offers to click; None after the end."""
        if self.visit.page is Page.DONE:
            return None
        return AvailableActions(
            has_search_bar=self.visit.page is Page.START,
            clickables=clickables(self.visit, self.views, self.options.observation),
        )

    def state_key(self) -> str:
        """Hash of the task and the state, as exact as the option `states` says.

        - `exact`: the page, the selections, the pages that led here and can be gone back to, the
          turn number if episodes are truncated and, except in `text`, the opened products.
        - `similar`: the page; for results, the products on it and which were opened; for a product,
          its selections. For a results page after the last one: all results. Episodes that searched
          with different words or took one turn more are then in the same state, although their
          futures may differ a little.
        """
        visit = self.visit
        state: list[Any] = [
            self._task.task_id if self._task else "",
            visit.page.value,
            visit.product,
            visit.sub_page if visit.page is Page.SUB_PAGE else "",
            sorted(visit.selected.items()),
        ]
        if self.options.states == "similar":
            if visit.page is Page.RESULTS:
                state += [visit.shown, sorted(visit.opened)]
                if not visit.shown:  # nothing was found, or the page lies behind the last one
                    state.append(visit.results)
        else:
            state += [visit.query, visit.page_number]
            if self.options.observation is not ObservationMode.TEXT:
                state.append(sorted(visit.opened))
            if self.options.max_turns is not None:
                state.append(self._num_turns)
        text = repr(state).encode("utf-8", "backslashreplace")
        return hashlib.blake2b(text, digest_size=12).hexdigest()

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        return policies_for(functools.partial(copy.copy, self))
