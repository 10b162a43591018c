"""What a purchase earns.

Consumes the wanted `Goal`, the bought product with its price and selected options; produces the
score in [0, 1] and its parts:

    r = r_type (matched attributes + matched options + price_ok) / (attributes + options + 1)

Source: Yao et al., "WebShop", 2022, appendix A.4, and the program. Two variants: `upstream`
compares a synthetic goal's option as Python's text of the pair (name, value), so that its colour
is normalised only where it is exactly a colour word; `corrected` compares the value. Success means
r >= 1.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ragen_apo.environments.webshop.catalog import Product
from ragen_apo.environments.webshop.colors import COLOR_WORDS, normalize_color
from ragen_apo.environments.webshop.goals import Goal
from ragen_apo.environments.webshop.nouns import NounRule
from ragen_apo.environments.webshop.text_match import token_set_ratio

MATCH_ABOVE = 85
LEVELS_SHARED = 2
TITLE_SCORE_WITHOUT_NOUNS = 0.2


class RewardVariant(str, Enum):
    """How the goal's options enter the comparison."""

    UPSTREAM = "upstream"
    CORRECTED = "corrected"


@dataclass(frozen=True)
class Score:
    """The score of a purchase and the parts it is made of."""

    value: float
    parts: Mapping[str, float | bool]

    @property
    def success(self) -> bool:
        """Everything asked for was bought."""
        return self.value >= 1


def title_score(goal_nouns: Iterable[str], bought_nouns: Iterable[str]) -> float:
    """Distinct nouns of both titles over the number of the goal's nouns, repeats counted."""
    wanted = tuple(goal_nouns)
    if not wanted:
        return TITLE_SCORE_WITHOUT_NOUNS
    return len(set(wanted) & set(bought_nouns)) / len(wanted)


def type_factor(score: float, *, same_type: bool) -> float:
    """r_type: how far the bought product is the kind of thing that was asked for."""
    if score == 0:
        return 0.0
    if score < 0.1:
        return 0.1
    return 1.0 if same_type or score > 0.2 else 0.5


@functools.lru_cache(maxsize=65536)
def _levels(product_category: str) -> frozenset[str]:
    return frozenset(level.strip() for level in product_category.split("\u203a"))


@functools.lru_cache(maxsize=65536)
def _nouns(rule: NounRule, title: str) -> tuple[str, ...]:
    return rule(title)


def attribute_matches(attribute: str, product: Product) -> bool:
    """One of the product's attributes is nearly this one, or its texts contain it."""
    if any(token_set_ratio(own, attribute) > MATCH_ABOVE for own in product.attributes):
        return True
    return (
        attribute in product.title.lower()
        or attribute in " ".join(product.bullet_points).lower()
        or attribute in product.description.lower()
    )


def wanted_option_text(option: tuple[str, str], variant: RewardVariant) -> str:
    """The goal's side of the option comparison; the name is empty for human instructions."""
    if variant is RewardVariant.CORRECTED or not option[0]:
        return normalize_color(option[1])
    return next((color for color in COLOR_WORDS if color in option), str(option))


def option_matches(wanted: str, selected: Iterable[str], variant: RewardVariant) -> bool:
    """One of the selected values is nearly the wanted one."""
    values = [normalize_color(value) for value in selected]
    if variant is RewardVariant.CORRECTED and wanted in values:
        return True  # also where the ratio leaves out all that it has, as it does with signs
    return any(token_set_ratio(value, wanted) > MATCH_ABOVE for value in values)


@dataclass(frozen=True)
class RewardRule:
    """The reward of one variant with one noun rule."""

    variant: RewardVariant
    nouns: NounRule

    def score(
        self,
        goal: Goal,
        wanted: Product,
        bought: Product,
        *,
        price: float,
        selected: Mapping[str, str],
    ) -> Score:
        """The score of buying `bought` at `price` with the selected options."""
        query_match = bought.query == wanted.query
        shared = _levels(bought.product_category) & _levels(wanted.product_category)
        category_match = len(shared) >= LEVELS_SHARED
        of_titles = title_score(_nouns(self.nouns, wanted.title), _nouns(self.nouns, bought.title))
        factor = type_factor(of_titles, same_type=query_match or category_match)
        price_ok = price <= goal.price_limit
        num_attributes, num_options = len(goal.attributes), len(goal.options)
        attributes = sum(attribute_matches(attribute, bought) for attribute in goal.attributes)
        options = sum(
            option_matches(
                wanted_option_text(option, self.variant), selected.values(), self.variant
            )
            for option in goal.options
        )
        total = num_attributes + num_options + 1
        parts: dict[str, float | bool] = {
            "r_type": factor,
            "r_att": attributes / num_attributes if num_attributes else 1.0,
            "w_att": num_attributes / total,
            "query_match": query_match,
            "category_match": category_match,
            "title_score": of_titles,
        }
        if num_options:
            parts |= {"r_option": options / num_options, "w_option": num_options / total}
        parts |= {"r_price": price_ok, "w_price": 1 / total}
        return Score((attributes + options + price_ok) / total * factor, parts)
