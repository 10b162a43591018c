"""Intervals of success rates against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.evaluation.summary import (
    independent_episodes,
    outcome_summary,
    student_quantile,
    wilson_interval,
)
from tests import factories

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


@pytest.mark.parametrize(
    ("by_task", "expected"),
    [
        # Two tasks always and two never solved, deviations 2, 2, -2, -2: variance
        # (16/16²)·4/3 = 1/12, and 0.25·12 = 3 is less than the four tasks.
        ([[True] * 4, [True] * 4, [False] * 4, [False] * 4], 4),
        # Each task solved in half of its episodes: its episodes have nothing in common.
        ([[True, False], [False, True], [True, False]], 6),
        # Deviations from 0.5: 1, 0, 0, -1. Variance (2/8²)·4/3 = 1/24, 0.25·24 = 6 of 8. Four tasks
        # say little about it: 6·(1.960/3.182)² = 2.3 is less than the four.
        ([[True, True], [True, False], [False, True], [False, False]], 4),
        # Deviations 1 in five tasks and -1 in as many of 40. Variance (10/160²)·40/39 = 1/2496,
        # 0.25·2496 = 624 is more than the 160 episodes.
        (
            [[True, True, True, False]] * 5 + [[True, False] * 2] * 30 + [[True] + [False] * 3] * 5,
            160,
        ),
        # Ten of 20 tasks are solved three times in four, the others once: deviations ±1. Variance
        # (20/80²)·20/19 = 1/304, 0.25·304 = 76, and 76·(1.960/2.093)² = 66.6 of 80.
        ([[True, True, True, False]] * 10 + [[True, False, False, False]] * 10, 66.6),
        ([[True] * 5, [True] * 5, [True] * 5], 3),
        ([[False] * 7, [False] * 2], 2),
        ([[True], [False], [True]], 3),
        ([[True, True, False]], 3),
    ],
)
def test_episodes_of_a_task_count_for_what_they_do_not_have_in_common(
    by_task: list[list[bool]], expected: float
) -> None:
    assert independent_episodes(by_task) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045), (120, 1.980)],
)
def test_the_quantile_of_student_is_that_of_printed_tables(degrees: int, expected: float) -> None:
    assert student_quantile(degrees) == pytest.approx(expected, rel=0.01)


def test_the_quantile_of_student_needs_a_degree() -> None:
    with pytest.raises(ValueError, match="degrees must be at least 1, got 0"):
        student_quantile(0)


@pytest.mark.parametrize("num_tasks", [2, 3, 5, 10])
def test_the_interval_of_few_tasks_played_ten_times_holds_the_truth(num_tasks: int) -> None:
    # Chances are uniform, so the truth is one half. Without Student's quantile 80 to 93% hold it.
    draws = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        chances = draws.random(num_tasks)
        by_task = [(draws.random(10) < chance).tolist() for chance in chances]
        size = independent_episodes(by_task)
        low, high = wilson_interval(sum(map(sum, by_task)) / (10 * num_tasks) * size, size)
        held += low <= 0.5 <= high
    assert held / 1000 > 0.94


def test_playing_the_same_tasks_ten_times_makes_no_interval_ten_times_as_sure() -> None:
    once = [
        factories.episode(factories.turn(), task=factories.task(f"task {i}"), success=i < 10)
        for i in range(20)
    ]
    assert outcome_summary(once)["success_ci95"] == list(wilson_interval(10, 20))
    assert outcome_summary(once * 10)["success_ci95"] == pytest.approx(
        list(wilson_interval(10, 20))
    )


def test_the_interval_holds_the_truth_in_95_of_100_draws_of_tasks_played_five_times() -> None:
    # Half of the tasks are solved with probability 0.9, the others with 0.1.
    draws = np.random.default_rng(0)
    held = {"clustered": 0, "all independent": 0}
    for _ in range(400):
        chances = np.where(draws.random(60) < 0.5, 0.9, 0.1)
        by_task = [(draws.random(5) < chance).tolist() for chance in chances]
        successes, episodes = sum(map(sum, by_task)), 300
        size = independent_episodes(by_task)
        low, high = wilson_interval(successes / episodes * size, size)
        held["clustered"] += low <= 0.5 <= high
        low, high = wilson_interval(successes, episodes)
        held["all independent"] += low <= 0.5 <= high
    assert held["clustered"] / 400 > 0.93
    assert held["all independent"] / 400 < 0.8, "what the correction is for"
