"""V_hat against brute force and exact expectations, and the schedule of Stage 1."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.values.estimator import (
    SampleSchedule,
    effective_sample_size,
    optimal_policy_weights,
    soft_value,
    success_rate_error,
)

some_returns = st.lists(st.floats(-10, 10), min_size=1, max_size=12)
some_beta = st.floats(1e-3, 1e3)


def brute_force(returns: list[float], *, beta: float) -> float:
    """The definition as it stands; overflows where r / beta exceeds 709."""
    return beta * math.log(sum(math.exp(r / beta) for r in returns) / len(returns))


def binomial(count: int, *, n: int, p: float) -> float:
    return math.comb(n, count) * p**count * (1 - p) ** (n - count)


def returns_with(num_successes: int, *, n: int) -> list[float]:
    return [1.0] * num_successes + [0.0] * (n - num_successes)


@given(returns=some_returns, beta=st.floats(0.1, 100))
def test_soft_value_equals_its_definition(returns, beta):
    assert soft_value(returns, beta=beta) == pytest.approx(
        brute_force(returns, beta=beta), rel=1e-9, abs=1e-9
    )


def test_a_hand_computed_soft_value():
    # 0.5 log((e^2 + 1) / 2) = 0.5 log(4.194528) = 0.716890
    assert soft_value([1.0, 0.0], beta=0.5) == pytest.approx(0.716890, abs=1e-6)


@given(returns=some_returns, beta=some_beta)
def test_soft_value_lies_between_mean_and_maximum(returns, beta):
    value = soft_value(returns, beta=beta)
    assert np.mean(returns) - 1e-9 <= value <= max(returns) + 1e-9


@given(returns=some_returns, beta=some_beta, factor=st.floats(1, 100))
def test_soft_value_falls_as_beta_grows(returns, beta, factor):
    assert soft_value(returns, beta=factor * beta) <= soft_value(returns, beta=beta) + 1e-9


@given(returns=some_returns, beta=some_beta, shift=st.floats(-100, 100))
def test_shifting_the_returns_shifts_soft_value(returns, beta, shift):
    shifted = [r + shift for r in returns]
    assert soft_value(shifted, beta=beta) == pytest.approx(
        soft_value(returns, beta=beta) + shift, abs=1e-9
    )


@given(returns=some_returns, beta=some_beta, data=st.data())
def test_the_order_of_the_returns_does_not_matter(returns, beta, data):
    shuffled = data.draw(st.permutations(returns))
    assert soft_value(shuffled, beta=beta) == pytest.approx(
        soft_value(returns, beta=beta), abs=1e-12
    )


@given(single=st.floats(-1e6, 1e6), beta=some_beta)
def test_one_return_is_its_own_soft_value(single, beta):
    assert soft_value([single], beta=beta) == single


def test_the_limits_have_names():
    returns = [0.0, 0.25, 1.0]
    assert soft_value(returns, beta=math.inf) == pytest.approx(1.25 / 3)
    assert soft_value(returns, beta=0) == 1.0


@pytest.mark.parametrize("beta", [1e6, 1e12, 1e300])
def test_a_huge_beta_is_close_to_the_mean_and_not_rounding_noise(beta):
    # log(sum(exp)) - log(N) loses all digits here: at beta = 1e16 its error is of the order of 1.
    assert soft_value([0.0, 0.25, 1.0], beta=beta) == pytest.approx(1.25 / 3, abs=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("beta", [1e-4, 1e-300, 5e-324])
def test_a_return_ten_thousand_times_beta_stays_finite(beta):
    # beta (log(e^(1/beta) + 1) - log 2) = 1 - beta log 2 when e^(-1/beta) is nothing.
    assert soft_value([1.0, 0.0], beta=beta) == pytest.approx(1 - beta * math.log(2), abs=1e-12)


@pytest.mark.parametrize("returns", [[], [math.nan], [1.0, math.inf], [[1.0]]])
def test_returns_that_are_no_returns_are_rejected(returns):
    with pytest.raises(ValueError, match="returns? "):
        soft_value(returns, beta=1.0)


@pytest.mark.parametrize("beta", [-0.1, -math.inf, math.nan])
def test_a_negative_or_undefined_beta_is_rejected(beta):
    with pytest.raises(ValueError, match="beta must be"):
        soft_value([1.0], beta=beta)


@pytest.mark.parametrize(
    ("p", "bias", "deviation"), [(0.1, -0.040, 0.197), (0.25, -0.039, 0.205), (0.5, -0.020, 0.149)]
)
def test_bias_and_deviation_at_the_papers_settings_are_the_exact_ones(p, bias, deviation):
    # Success 1, failure 0, beta1 = 0.5, N = 8: the number of successes is Binomial(8, p), so
    # E V_hat is a sum of nine terms, and V* = 0.5 log(1 - p + p e^2).
    n, beta = 8, 0.5
    exact = beta * math.log(1 - p + p * math.exp(1 / beta))
    chances = [binomial(count, n=n, p=p) for count in range(n + 1)]
    values = [soft_value(returns_with(count, n=n), beta=beta) for count in range(n + 1)]
    mean = sum(chance * value for chance, value in zip(chances, values, strict=True))
    variance = sum(
        chance * (value - mean) ** 2 for chance, value in zip(chances, values, strict=True)
    )
    assert mean - exact == pytest.approx(bias, abs=5e-4)
    assert math.sqrt(variance) == pytest.approx(deviation, abs=5e-4)


def test_a_hand_computed_effective_sample_size():
    # Weights 1, e^-2, e^-2, e^-2: (1 + 3 * 0.1353)^2 / (1 + 3 * 0.0183) = 1.9768 / 1.0549 = 1.873
    assert effective_sample_size([1.0, 0.0, 0.0, 0.0], beta=0.5) == pytest.approx(1.873, abs=1e-3)
    # All that the bound on the error of V_hat needs: (N / ESS - 1) / N is the squared relative
    # standard error of the mean weight.
    weights = np.exp(np.array([1.0, 0.0, 0.0, 0.0]) / 0.5)
    size = effective_sample_size([1.0, 0.0, 0.0, 0.0], beta=0.5)
    assert (4 / size - 1) / 4 == pytest.approx(weights.var() / weights.mean() ** 2 / 4)


@given(returns=some_returns, beta=some_beta)
def test_an_effective_sample_size_lies_between_one_and_the_number_of_samples(returns, beta):
    size = effective_sample_size(returns, beta=beta)
    assert 1 - 1e-9 <= size <= len(returns) + 1e-9


@pytest.mark.filterwarnings("error")
def test_the_limits_of_the_effective_sample_size_have_names():
    returns = [0.0, 1.0, 1.0]
    assert effective_sample_size(returns, beta=math.inf) == 3
    assert effective_sample_size(returns, beta=0) == 2
    in_another_order = [0.1 + 0.2 + 0.7, 0.7 + 0.2 + 0.1, 0.0]  # equal but for rounding
    assert in_another_order[0] != in_another_order[1]
    assert optimal_policy_weights(in_another_order, beta=0).tolist() == [1.5, 1.5, 0.0]
    assert effective_sample_size(returns, beta=5e-324) == 2
    assert effective_sample_size([2.0, 2.0], beta=0.5) == pytest.approx(2)
    with pytest.raises(ValueError, match="beta must be"):
        effective_sample_size(returns, beta=-1.0)


@pytest.mark.parametrize(("p", "shrunk"), [(0.1, 0.77), (0.5, 0.90), (0.9, 0.94)])
def test_a_sample_inside_its_own_value_shrinks_the_gradient(p, shrunk):
    # Two outcomes with chance p of success: d E[R] / dp = 1, and its estimate from a sample is
    # (r - V) score with score = 1/p for a success and -1/(1-p) for a failure, so in expectation
    # sum over the other seven of P(others) ((1 - V with a success) - (0 - V with a failure)).
    inside = 0.0
    for count in range(8):
        chance = binomial(count, n=7, p=p)
        success = [1.0, *returns_with(count, n=7)]
        failure = [0.0, *returns_with(count, n=7)]
        inside += chance * (1 - soft_value(success, beta=0.5) + soft_value(failure, beta=0.5))
    assert inside == pytest.approx(shrunk, abs=5e-3)


def test_rounds_double_up_to_the_cap():
    assert SampleSchedule(first=4, cap=64).rounds() == (4, 8, 16, 32, 64)
    assert SampleSchedule(first=4, cap=20).rounds() == (4, 8, 16, 20)
    assert SampleSchedule(first=8, cap=8).rounds() == (8,)


@pytest.mark.parametrize("first", [0, 9])
def test_an_impossible_schedule_is_rejected(first):
    with pytest.raises(ValueError, match="1 <= first <= cap"):
        SampleSchedule(first=first, cap=8)


def test_the_error_of_a_success_rate_is_relative_to_the_rate():
    # p = 1/4 with N = 12: sqrt((3/4) / (1/4 * 12)) = sqrt(1/4) = 0.5
    assert success_rate_error(num_successes=3, num_samples=12) == pytest.approx(0.5)
    assert success_rate_error(num_successes=0, num_samples=8) == math.inf
    assert success_rate_error(num_successes=8, num_samples=8) == 0.0
    with pytest.raises(ValueError, match="impossible"):
        success_rate_error(num_successes=9, num_samples=8)


@pytest.mark.parametrize(
    ("num_successes", "num_samples", "goes_on"),
    [
        (0, 4, True),  # no success yet
        (1, 4, True),  # sqrt((3/4) / (1/4 * 4)) = 0.87 > 0.5
        (2, 4, False),  # sqrt((1/2) / (1/2 * 4)) = 0.5, not above
        (4, 4, False),
        (0, 64, False),  # the cap
        (0, 70, False),
    ],
)
def test_a_task_is_sampled_again_until_its_error_is_small_or_the_cap_reached(
    num_successes, num_samples, goes_on
):
    schedule = SampleSchedule(first=4, cap=64)
    found = schedule.goes_on(num_successes=num_successes, num_samples=num_samples)
    assert found is goes_on


def test_a_low_success_rate_gets_more_samples_than_one_half():
    # At rate p the error is at most 0.5 from N = 4 (1 - p) / p on: 4 for p = 1/2, 12 for 1/4 and
    # 28 for 1/8, each rounded up to the end of a round.
    schedule = SampleSchedule(first=4, cap=64)
    num_samples_at = {
        one_in: next(
            total
            for total in schedule.rounds()
            if not schedule.goes_on(num_successes=total // one_in, num_samples=total)
        )
        for one_in in (2, 4, 8)
    }
    assert num_samples_at == {2: 4, 4: 16, 8: 32}
