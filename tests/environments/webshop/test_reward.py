import dataclasses

import pytest

from ragen_apo.environments.webshop.catalog import Product
from ragen_apo.environments.webshop.colors import normalize_color
from ragen_apo.environments.webshop.goals import Goal
from ragen_apo.environments.webshop.nouns import every_word, rule_nouns
from ragen_apo.environments.webshop.reward import (
    RewardRule,
    RewardVariant,
    attribute_matches,
    option_matches,
    title_score,
    type_factor,
    wanted_option_text,
)
from ragen_apo.environments.webshop.text_match import token_set_ratio

SHIRT = Product(
    asin="B000000001",
    title="Soft Cotton Shirt",
    description="Keeps its shape in the tumble dryer.",
    bullet_points=("BUTTON CLOSURE in front",),
    prices=(19.0,),
    price_tag="$19.0",
    options={"color": ("navy", "wine red"), "size": ("small", "x-large")},
    category="fashion",
    query="men's shirts",
    product_category="Clothing › Men › Shirts",
    attributes=("machine wash", "long sleeve"),
    instruction=None,
    instruction_attributes=(),
    human_instructions=(),
)
GOAL = Goal(
    product=0,
    instruction="",
    attributes=("machine wash", "button closure"),
    options=(("color", "navy"), ("size", "small")),
    price_limit=20.0,
)
UPSTREAM = RewardRule(RewardVariant.UPSTREAM, every_word)
CORRECTED = RewardRule(RewardVariant.CORRECTED, every_word)


def score(
    rule: RewardRule = UPSTREAM, goal: Goal = GOAL, bought: Product = SHIRT, **changes: object
) -> float:
    values = {"price": 19.0, "selected": {"color": "navy", "size": "small"}, **changes}
    return rule.score(goal, SHIRT, bought, **values).value  # pyright: ignore[reportArgumentType]


def test_everything_right_is_worth_one() -> None:
    # (2 attributes + 2 options + price) / (2 + 2 + 1)
    assert score() == 1.0


def test_each_missing_part_costs_its_share() -> None:
    assert score(price=21.0) == pytest.approx(4 / 5)
    assert score(selected={"color": "navy"}) == pytest.approx(4 / 5)
    assert score(selected={}) == pytest.approx(3 / 5)
    lost = dataclasses.replace(GOAL, attributes=("machine wash", "faux fur"))
    assert score(goal=lost) == pytest.approx(4 / 5)


def test_the_price_may_be_the_limit_itself() -> None:
    assert score(price=20.0) == 1.0


def test_a_purchase_of_another_kind_is_halved_and_a_foreign_title_is_worth_nothing() -> None:
    other = dataclasses.replace(SHIRT, query="rugs", product_category="Home › Rugs")
    # The titles share one of five words: 0.2 is not above 0.2.
    goal_product = dataclasses.replace(SHIRT, title="Soft Linen Tee For Boys")
    given = {"price": 19.0, "selected": {"color": "navy", "size": "small"}}
    half = UPSTREAM.score(GOAL, goal_product, other, **given)
    assert half.parts["title_score"] == 0.2
    assert half.value == pytest.approx(0.5)
    foreign = dataclasses.replace(other, title="Rug")
    assert UPSTREAM.score(GOAL, goal_product, foreign, **given).value == 0.0


@pytest.mark.parametrize(
    ("of_titles", "same_type", "expected"),
    [
        (0.0, True, 0.0),
        (0.05, True, 0.1),
        (0.1, True, 1.0),  # the step is below 0.1
        (0.15, True, 1.0),
        (0.15, False, 0.5),
        (0.2, False, 0.5),  # and the next one above 0.2
        (0.3, False, 1.0),
    ],
)
def test_the_type_factor_has_four_steps(of_titles: float, same_type: bool, expected: float) -> None:
    assert type_factor(of_titles, same_type=same_type) == expected


def test_the_title_score_counts_distinct_shared_words_over_all_words_of_the_goal() -> None:
    assert title_score(("red", "red", "shoe", "box"), ("red", "shoe")) == 2 / 4
    assert title_score((), ("red",)) == 0.2


def test_the_first_colour_word_in_the_lists_order_replaces_a_value() -> None:
    assert normalize_color("light blue") == "blue"  # "blue" stands before "light" in the list
    assert normalize_color("titanium") == "tan"  # as a substring, upstream too
    assert normalize_color("x-large") == "x-large"


def test_upstream_compares_the_pair_and_the_corrected_reward_the_value() -> None:
    option = ("color", "b1-navy stripes")
    assert wanted_option_text(option, RewardVariant.UPSTREAM) == "('color', 'b1-navy stripes')"
    assert wanted_option_text(option, RewardVariant.CORRECTED) == "navy"
    assert wanted_option_text(("color", "navy"), RewardVariant.UPSTREAM) == "navy"
    assert wanted_option_text(("", "b1-navy stripes"), RewardVariant.UPSTREAM) == "navy"


def test_an_option_that_upstream_cannot_match_is_matched_by_the_corrected_reward() -> None:
    goal = dataclasses.replace(GOAL, options=(("color", "b1-navystripes"),))
    selected = {"color": "b1-navystripes"}
    # Upstream compares "color b1 navystripes" with the normalised "navy".
    assert score(goal=goal, selected=selected) == pytest.approx(3 / 4)
    assert score(CORRECTED, goal=goal, selected=selected) == 1.0


def test_an_attribute_may_stand_in_title_bullet_points_or_description() -> None:
    for attribute in ("soft cotton", "button closure", "tumble dryer"):
        assert score(goal=dataclasses.replace(GOAL, attributes=(attribute,))) == 1.0


def test_the_rule_without_a_model_leaves_out_colours_adjectives_and_function_words() -> None:
    title = "Soft Navy Cotton Shirt for Men, 2 Pack (100% Machine-Washable)"
    assert rule_nouns(title) == ("cotton", "shirt", "men", "pack", "machine-washable")


def test_goals_without_options_are_scored_by_attributes_and_price() -> None:
    assert score(goal=dataclasses.replace(GOAL, options=()), selected={}) == 1.0


@pytest.mark.parametrize(
    ("own", "attribute", "likeness"),
    [("abcdefghijk", "abcdefghijk0123", 85), ("abc", "abc0", 86)],
)
def test_texts_match_if_they_are_more_than_85_percent_alike(
    own: str, attribute: str, likeness: int
) -> None:
    assert token_set_ratio(own, attribute) == likeness
    product = dataclasses.replace(SHIRT, attributes=(own,))
    assert attribute_matches(attribute, product) == (likeness > 85)
    assert option_matches(attribute, [own], RewardVariant.UPSTREAM) == (likeness > 85)


@pytest.mark.parametrize("value", ["+", "ß", "..."])
def test_an_option_of_signs_alone_is_itself_in_the_corrected_variant(value: str) -> None:
    """The ratio leaves such signs out, and upstream keeps it so."""
    assert token_set_ratio(value, value) == 0
    assert option_matches(value, ["large", value], RewardVariant.CORRECTED)
    assert not option_matches(value, ["large"], RewardVariant.CORRECTED)
    assert not option_matches(value, [value], RewardVariant.UPSTREAM)


@pytest.mark.parametrize(
    ("query", "category", "factor"),
    [
        ("men's shirts", "Home › Rugs", 1.0),  # the same query is enough
        ("rugs", "Clothing › Men › Rugs", 1.0),  # as are two levels of the category
        ("rugs", "Clothing › Rugs", 0.5),
    ],
)
def test_a_product_is_of_the_same_kind_by_its_query_or_two_levels_of_its_category(
    query: str, category: str, factor: float
) -> None:
    # 3 of 20 words: too few to make titles alike by themselves, too many to make them foreign.
    wanted = dataclasses.replace(SHIRT, title="soft cotton shirt " + " ".join("abcdefghijklmnopq"))
    bought = dataclasses.replace(SHIRT, query=query, product_category=category)
    found = UPSTREAM.score(
        GOAL, wanted, bought, price=19.0, selected={"color": "navy", "size": "small"}
    )
    assert found.parts["title_score"] == 0.15
    assert found.parts["r_type"] == factor
