import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.webshop.text_match import process, token_set_ratio

WORDS = st.lists(
    st.sampled_from(
        ["red", "navy", "blue", "32w", "x", "30l", "dark-blue", "ca", "fé", "(b1)", "[x]", "İ", "ß"]
    )
)
TEXTS = st.one_of(WORDS.map(" ".join), st.text(max_size=12))


def longest_common_subsequence(first: str, second: str) -> int:
    """The textbook table: L[i][j] = L[i-1][j-1] + 1 on equal characters, else the larger."""
    row = [0] * (len(second) + 1)
    for a in first:
        previous = row
        row = [0]
        for j, b in enumerate(second, 1):
            row.append(previous[j - 1] + 1 if a == b else max(previous[j], row[j - 1]))
    return row[-1]


def ratio(first: str, second: str) -> float:
    length = len(first) + len(second)
    distance = length - 2 * longest_common_subsequence(first, second)
    return 100 - 100 * distance / length if length else 100.0


def recomputed(first: str, second: str) -> int:
    """By the definition: the best of three comparisons of whole joined strings.

    Only the comparison of the two rests is taken with the common words cut off, as rapidfuzz does.
    """
    a, b = set(process(first).split()), set(process(second).split())
    if not a or not b:
        return 0
    common = " ".join(sorted(a & b))
    with_a = f"{common} {' '.join(sorted(a - b))}".strip()
    with_b = f"{common} {' '.join(sorted(b - a))}".strip()
    if common and common in (with_a, with_b):
        return 100
    rest_a, rest_b = " ".join(sorted(a - b)), " ".join(sorted(b - a))
    distance = len(rest_a) + len(rest_b) - 2 * longest_common_subsequence(rest_a, rest_b)
    candidates = [100 - 100 * distance / (len(with_a) + len(with_b))]
    if common:
        candidates += [ratio(common, with_a), ratio(common, with_b)]
    return round(max(candidates))


@pytest.mark.slow
@given(TEXTS, TEXTS)
def test_the_ratio_equals_an_independent_recomputation(first: str, second: str) -> None:
    assert token_set_ratio(first, second) == recomputed(first, second)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("navy", "navy", 100),
        ("navy", "navy blue", 100),  # the words of one contain the other's
        ("", "navy", 0),
        ("!!", "!!", 0),  # no word is left
        ("abcd", "abce", 75),  # d = 2 of 8 characters
        ("('color', 'navy')", "navy", 100),  # the text of a pair contains its value
        ("café", "caf", 100),  # characters U+0080 to U+00FF are dropped
        ("a_b", "a b", 100),  # the underscore separates
    ],
)
def test_ratios_worked_out_by_hand(first: str, second: str, expected: int) -> None:
    assert token_set_ratio(first, second) == expected


def test_a_half_is_rounded_to_the_even_number() -> None:
    # Two words of 4 and 5 letters with 4 in order in common: d = 1, 100 - 100/9 = 88.9.
    assert token_set_ratio("abcd", "abcde") == 89
    # d = 2 of 16: 87.5, whose even neighbour is 88.
    assert token_set_ratio("abcdefgh", "abcdefgi") == 88
    # d = 6 of 16: 62.5, whose even neighbour is 62.
    assert token_set_ratio("abcdefgh", "abcdexyz") == 62
