"""The Wilson interval against numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.evaluation.summary import wilson_interval

# z = 1.959964, so z² = 3.841459 in all the arithmetic below.


def test_half_of_ten_episodes_gives_the_wilson_interval_worked_out_by_hand() -> None:
    # centre (0.5 + 3.841459/20) / (1 + 3.841459/10) = 0.692073 / 1.384146 = 0.5
    # half   1.959964 √(0.25/10 + 3.841459/400) / 1.384146 = 1.959964 · 0.186021 / 1.384146
    #        = 0.263407
    assert wilson_interval(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)


def test_ninety_eight_of_a_hundred_gives_the_wilson_interval_worked_out_by_hand() -> None:
    # centre (0.98 + 3.841459/200) / (1 + 0.03841459) = 0.99920730 / 1.03841459 = 0.962243
    # half   1.959964 √(0.98·0.02/100 + 3.841459/40000) / 1.03841459
    #        = 1.959964 · 0.01708908 / 1.03841459 = 0.032255
    assert wilson_interval(98, 100) == pytest.approx((0.929988, 0.994498), abs=1e-6)


def test_no_success_in_ten_leaves_zero_as_lower_bound_and_more_than_zero_above() -> None:
    # high = (z²/2n + z √(z²/4n²)) / (1 + z²/n) = (z²/n) / (1 + z²/n) = 0.3841459 / 1.3841459
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.277533, abs=1e-6))


def test_all_successes_mirror_no_success() -> None:
    low, high = wilson_interval(10, 10)
    assert (low, high) == (pytest.approx(1 - 0.277533, abs=1e-6), 1.0)


def test_no_episodes_say_nothing_about_the_success_rate() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate_and_stays_within_zero_and_one(counts: tuple[int, int]) -> None:
    successes, episodes = counts
    low, high = wilson_interval(successes, episodes)
    assert 0.0 <= low <= successes / episodes <= high <= 1.0


@pytest.mark.parametrize(("successes", "episodes"), [(-1, 3), (4, 3), (0, -1)])
def test_counts_that_cannot_be_are_refused(successes: int, episodes: int) -> None:
    with pytest.raises(ValueError, match="successes must lie in"):
        wilson_interval(successes, episodes)
