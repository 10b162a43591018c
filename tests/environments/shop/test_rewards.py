from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.shop.rewards import PRESETS, RewardScheme
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task
from tests.environments.shop.goal import GOAL_ID, OTHER_ID, goal_task, shop_with_goal


def rewards(shop: ShopEnvironment, actions: Iterable[str]) -> list[float]:
    return [shop.step(action)[1] for action in actions]


def test_under_fixed_only_the_first_helpful_search_is_rewarded() -> None:
    shop = shop_with_goal()
    actions = ["search atlas", "search history atlas", f"click {OTHER_ID}"]
    assert rewards(shop, actions) == pytest.approx([0.10 - 0.01, 0.0 - 0.01, -0.05 - 0.01])


def test_under_slides_every_helpful_search_is_rewarded_and_turns_are_free() -> None:
    shop = shop_with_goal(reward="slides")
    actions = ["search atlas", "search atlas", f"click {OTHER_ID}", "?", "search spoon"]
    assert rewards(shop, actions) == [0.1, 0.1, -0.05, 0.0, 0.0]


def test_a_raised_limit_pays_further_searches_with_decay() -> None:
    shop = shop_with_goal(reward={"max_helpful_searches": 3, "turn": 0.0})
    assert rewards(shop, ["search history"] * 4) == pytest.approx([0.1, 0.05, 0.025, 0.0])


def best_return(shop: ShopEnvironment, task: Task, *, actions: Sequence[str], sign: float) -> float:
    """The best (sign 1) or worst (sign -1) return of any policy that may stop at any time.

    A best response over all histories: states with equal keys have equal futures, so each is
    expanded once, by replaying the actions that led to it.
    """
    best_from: dict[str, float] = {}

    def expand(history: tuple[str, ...]) -> float:
        options = [0.0]
        for action in actions:
            shop.reset(task, seed=0)
            for earlier in history:
                shop.step(earlier)
            _, reward, terminated, truncated, _ = shop.step(action)
            key = shop.state_key()
            if key not in best_from:
                ended = terminated or truncated
                best_from[key] = 0.0 if ended else expand((*history, action))
            options.append(reward + best_from[key])
        return sign * max(sign * option for option in options)

    return expand(())


REPRESENTATIVE_ACTIONS = (
    "search history atlas",
    "search spoon",
    f"click {GOAL_ID}",
    f"click {OTHER_ID}",
    "?",
)
"""One for each kind of reward: helpful, useless, right page, wrong page, invalid."""


@pytest.mark.parametrize("max_turns", [1, 3, 10])
def test_under_fixed_never_buying_earns_at_most_one_search(max_turns: int) -> None:
    shop = shop_with_goal(max_turns=max_turns)
    task = goal_task(shop)
    best = best_return(shop, task, actions=REPRESENTATIVE_ACTIONS, sign=1.0)
    assert best == pytest.approx(0.10 - 0.01)
    assert best < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("max_turns", [3, 10, 20])
def test_under_slides_endless_searching_pays_without_buying(max_turns: int) -> None:
    shop = shop_with_goal(max_turns=max_turns, reward="slides")
    task = goal_task(shop)
    best = best_return(shop, task, actions=REPRESENTATIVE_ACTIONS, sign=1.0)
    assert best == pytest.approx(0.10 * max_turns)
    search_and_buy = 0.10 + 1.00
    assert (best > search_and_buy) == (max_turns == 20)


@pytest.mark.parametrize(
    "reward",
    [
        "fixed",
        "slides",
        {"max_helpful_searches": 3, "invalid_action": -0.2},
        {"max_helpful_searches": None, "helpful_search": 0.3},
        {"turn": 0.1},
        {"helpful_search": -0.3, "max_helpful_searches": 2, "irrelevant_click": 0.05},
        {"wrong_buy": 3.0},
    ],
)
def test_the_return_range_is_what_best_and_worst_play_reach(reward: Any) -> None:
    shop = shop_with_goal(max_turns=4, reward=reward)
    task = goal_task(shop)
    buys = [f"buy {GOAL_ID}", f"buy {OTHER_ID}"]
    actions = [*REPRESENTATIVE_ACTIONS, *buys]
    reached = [best_return(shop, task, actions=actions, sign=sign) for sign in (-1.0, 1.0)]
    assert reached == pytest.approx(shop.properties.return_range)


def test_the_range_under_fixed_is_nine_invalid_turns_and_a_wrong_buy_to_search_and_buy() -> None:
    low, high = PRESETS["fixed"].return_range(10)
    assert low == pytest.approx(9 * (-0.05 - 0.01) + (-0.10 - 0.01))
    assert high == pytest.approx((0.10 - 0.01) + (1.00 - 0.01))


def test_the_reward_version_follows_the_numbers() -> None:
    fixed = ShopEnvironment().properties
    same = ShopEnvironment(reward={"turn": -0.01}).properties
    other = ShopEnvironment(reward={"turn": -0.02}).properties
    assert fixed.reward_version == same.reward_version
    assert fixed.reward_version.startswith("fixed-")
    assert ShopEnvironment(reward="slides").properties.reward_version.startswith("slides-")
    assert other.reward_version.startswith("custom-")
    assert fixed.version == other.version


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_rewards_are_finite_numbers(number: float) -> None:
    with pytest.raises(ConfigError, match="environment.reward.turn: got"):
        ShopEnvironment(reward={"turn": number})


def test_an_unknown_preset_and_an_unknown_number_are_errors() -> None:
    with pytest.raises(ConfigError, match="reward: got 'fixd', expected one of fixed, slides"):
        ShopEnvironment(reward="fixd")
    with pytest.raises(ConfigError, match="reward.corect_buy: unknown key; .*correct_buy"):
        ShopEnvironment(reward={"corect_buy": 2.0})


@given(count=st.integers(0, 50), decay=st.floats(0, 1))
def test_bonuses_never_grow(count: int, decay: float) -> None:
    scheme = RewardScheme(max_helpful_searches=20, helpful_search_decay=decay)
    assert 0.0 <= scheme.search_bonus(count + 1) <= scheme.search_bonus(count)
