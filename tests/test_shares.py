from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.shares import interleaved, turns_by_weight

weights_by_name = st.dictionaries(
    st.text(max_size=3), st.one_of(st.integers(1, 20), st.floats(1e-3, 1e3)), min_size=1, max_size=6
)


def first(num_turns: int, weights: dict[str, float]) -> list[str]:
    return list(islice(turns_by_weight(weights), num_turns))


def test_two_to_one_is_two_turns_of_every_three() -> None:
    assert first(9, {"a": 2, "b": 1}) == ["a", "a", "b"] * 3


def test_equal_weights_take_turns() -> None:
    assert first(6, {"a": 0.1, "b": 0.1, "c": 0.1}) == ["a", "b", "c"] * 2


def test_weights_are_read_as_decimals() -> None:
    # 0.1 + 0.2 is not 0.3 in binary: as decimals they repeat after three turns for ever.
    turns = first(3_000, {"a": 0.1, "b": 0.2})
    assert turns == turns[:3] * 1_000


@pytest.mark.slow
@settings(max_examples=30)
@given(weights=weights_by_name)
def test_a_share_is_never_a_whole_turn_away_from_the_weights(weights: dict[str, float]) -> None:
    total = sum(Fraction(str(weight)) for weight in weights.values())
    num_turns: Counter[str] = Counter()
    for number, name in enumerate(first(200, weights), 1):
        num_turns[name] += 1
        for each, weight in weights.items():
            assert abs(num_turns[each] - number * Fraction(str(weight)) / total) < 1


def test_interleaving_goes_by_weight_until_one_has_nothing_left() -> None:
    items = {"a": [1, 2, 3, 4, 5], "b": [-1, -2], "none": []}
    merged = interleaved(items, {"a": 1, "b": 2, "none": 5})
    assert merged == (-1, 1, -2, 2, 3, 4, 5)


@given(
    items=st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(), max_size=20)),
    weights=st.fixed_dictionaries({name: st.floats(1e-6, 1e6) for name in "abcd"}),
)
def test_interleaving_keeps_every_item_and_each_ones_order(
    items: dict[str, list[int]], weights: dict[str, float]
) -> None:
    named = {name: [(name, index) for index in range(len(each))] for name, each in items.items()}
    merged = interleaved(named, weights)
    assert len(merged) == sum(map(len, items.values()))
    for name, each in named.items():
        assert [item for item in merged if item[0] == name] == each
