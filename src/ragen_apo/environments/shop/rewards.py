"""The rewards of the shop, and the bounds of a return that follow from them.

Preset `slides` is the original scheme: every helpful search pays, so searching without end earns
more than buying. Preset `fixed` is the default: one search is rewarded, every turn costs, and never
buying earns less than 0.1.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ragen_apo.config.section import Section
from ragen_apo.environments.toolkit.game import digest_of_options


class RewardScheme(Section):
    """What is added to the reward of a turn; the defaults are the preset `fixed`."""

    correct_buy: float = 1.0
    """The goal is bought, which ends the episode."""
    wrong_buy: float = -0.1
    """Another product is bought, which ends the episode."""
    helpful_search: float = 0.1
    """The goal is among the results that were shown."""
    max_helpful_searches: int | None = Field(default=1, ge=0)
    """How many helpful searches of an episode are rewarded; null: all."""
    helpful_search_decay: float = Field(default=0.5, ge=0.0, le=1.0)
    """The k-th rewarded search earns `helpful_search * helpful_search_decay ** (k - 1)`."""
    irrelevant_click: float = -0.05
    """The page of an existing product that is not the goal was opened."""
    invalid_action: float = -0.05
    """The text was no action, or named no existing product."""
    turn: float = -0.01
    """Every turn of an episode, the last one included."""

    def rewards_search(self, num_rewarded: int) -> bool:
        """Whether a helpful search after `num_rewarded` rewarded ones still counts as rewarded."""
        return self.max_helpful_searches is None or num_rewarded < self.max_helpful_searches

    def search_bonus(self, num_rewarded: int) -> float:
        """The reward of the next helpful search, without the turn's cost."""
        if not self.rewards_search(num_rewarded):
            return 0.0
        return self.helpful_search * self.helpful_search_decay**num_rewarded

    def return_range(self, max_turns: int) -> tuple[float, float]:
        """Bounds of the return of an episode of at most `max_turns` turns, cut off anywhere."""
        others = (0.0, self.irrelevant_click, self.invalid_action)
        buys = (self.correct_buy, self.wrong_buy)
        low = high = lowest_so_far = highest_so_far = 0.0
        for num_turns in range(max_turns):
            low = min(low, lowest_so_far + self.turn + min(buys))
            high = max(high, highest_so_far + self.turn + max(buys))
            bonus = self.search_bonus(num_turns)
            lowest_so_far += self.turn + min(bonus, *others)
            highest_so_far += self.turn + max(bonus, *others)
            low, high = min(low, lowest_so_far), max(high, highest_so_far)
        return low, high

    @property
    def version(self) -> str:
        """Equal exactly for equal numbers."""
        name = next((name for name, scheme in PRESETS.items() if scheme == self), "custom")
        return f"{name}-{digest_of_options(self)}"


PRESETS: Mapping[str, RewardScheme] = {
    "fixed": RewardScheme(),
    "slides": RewardScheme(
        max_helpful_searches=None, helpful_search_decay=1.0, invalid_action=0.0, turn=0.0
    ),
}


def reward_scheme(value: Any) -> Any:
    """A preset's name becomes its scheme; a mapping is left for pydantic to check."""
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise ValueError(f"expected one of {', '.join(PRESETS)}, or a mapping of the numbers")
    return PRESETS[value]
