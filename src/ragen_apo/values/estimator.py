"""V* of a task from returns of the reference, and the number of returns to sample. Pure.

    V*(x)    = beta log E_{tau ~ pi_ref} exp(R(tau) / beta)
    V_hat(x) = m + beta (log sum_i exp((r_i - m) / beta) - log N),    m = max_i r_i

Brantley et al., "Accelerating RL for LLM Reasoning with Optimal Advantage Regression" (arXiv
2505.20686), equation of Stage 1. The mean of a logarithm is below the logarithm of the mean, so
V_hat is biased downwards.

The error of V_hat is at most about beta sqrt((1 - p) / (p N)), that is beta times the relative
error of a success rate p from N samples. It is close to this bound if p exp(1 / beta) is large. So
with a small beta `SampleSchedule` spends its samples on tasks with a low success rate.
docs/algorithm.md says how stopping by results biases V_hat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragen_apo.plural import counted


def soft_value(returns: ArrayLike, *, beta: float) -> float:
    """The soft value beta log mean exp(r / beta) of one task's returns.

    `returns` has shape [N], N >= 1, in the unit of `beta`. `beta = inf` is the mean and `beta = 0`
    the maximum. Lies between mean and maximum, moves with a shift of the returns, does not depend
    on their order, and falls as beta grows. Raises ValueError for no returns, a return that is not
    finite, and a beta that is negative or NaN.
    """
    values = _checked(returns, beta)
    if math.isinf(beta):
        return float(values.mean())
    highest = float(values.max())
    if beta == 0:
        return highest
    # expm1 and log1p keep the digits that log(sum(exp)) - log(N) loses when beta is large.
    with np.errstate(over="ignore"):
        mean_below_highest = float(np.expm1((values - highest) / beta).mean())
    return highest + beta * math.log1p(mean_below_highest)


def optimal_policy_weights(returns: ArrayLike, *, beta: float) -> NDArray[np.float64]:
    """pi*(tau_i) / pi_ref(tau_i) = exp((r_i - V_hat) / beta) of one task's samples of pi_ref.

    `returns` [N] and `beta` as in `soft_value`, whose V_hat normalises the weights: their mean is
    1. At `beta = inf` all are 1; at `beta = 0` the highest returns share the weight N. Raises
    ValueError where `soft_value` does.
    """
    values = _checked(returns, beta)
    weights = _relative_weights(values, beta)
    return weights / weights.mean()


def effective_sample_size(returns: ArrayLike, *, beta: float) -> float:
    """The effective sample size of the weights w = exp(r / beta) of the soft value.

    (sum w)^2 / sum w^2, from 1 (one return decides) to N (all weigh the same). `returns` and
    `beta` as in `soft_value`: at `beta = inf` it is N, at `beta = 0` the number of highest returns.
    Raises ValueError where `soft_value` does.
    """
    values = _checked(returns, beta)
    weights = _relative_weights(values, beta)
    return float(weights.sum() ** 2 / (weights**2).sum())


def _relative_weights(values: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
    """exp(r / beta), divided by the largest of them."""
    with np.errstate(over="ignore"):
        below = values - values.max()
        if beta == 0:
            return (below >= -ROUNDING).astype(np.float64)
        return np.exp(below / beta)


def _checked(returns: ArrayLike, beta: float) -> NDArray[np.float64]:
    values = np.asarray(returns, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"expected at least one return in one dimension, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"returns must be finite, got {values[~np.isfinite(values)].tolist()}")
    if math.isnan(beta) or beta < 0:
        raise ValueError(f"beta must be 0, positive or inf, got {beta}")
    return values


ROUNDING = 1e-9
"""Returns no further apart are equal: a sum of rewards in another order rounds otherwise."""

MAX_ERROR = 0.5
"""In units of beta1, a bound on the standard error of V_hat; met by p = 1/2 at N = 4."""


@dataclass(frozen=True)
class SampleSchedule:
    """The number of returns of a task: `first`, then twice as many each round, up to `cap`.

    `first = cap` samples every task equally often. Raises ValueError unless 1 <= first <= cap.
    """

    first: int
    cap: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.cap:
            raise ValueError(f"expected 1 <= first <= cap, got first={self.first}, cap={self.cap}")

    def rounds(self) -> tuple[int, ...]:
        """The totals after each round, for example (4, 8, 16, 32, 64); the last one is the cap."""
        totals = [self.first]
        while totals[-1] < self.cap:
            totals.append(min(2 * totals[-1], self.cap))
        return tuple(totals)

    def goes_on(self, *, num_successes: int, num_samples: int) -> bool:
        """Whether a task with these samples takes part in another round.

        It does without a success, and while its `success_rate_error` is above `MAX_ERROR`.
        """
        error = success_rate_error(num_successes=num_successes, num_samples=num_samples)
        return num_samples < self.cap and error > MAX_ERROR


def success_rate_error(*, num_successes: int, num_samples: int) -> float:
    """sqrt((1 - p) / (p N)): relative standard error of the success rate p = successes / N.

    Infinite without a success and 0 when every sample is one. Raises ValueError unless
    0 <= num_successes <= num_samples and num_samples >= 1.
    """
    if not 0 <= num_successes <= num_samples or num_samples < 1:
        successes = counted(num_successes, "success", "successes")
        raise ValueError(f"{successes} in {counted(num_samples, 'sample')} is impossible")
    if num_successes == 0:
        return math.inf
    return math.sqrt((num_samples - num_successes) / (num_successes * num_samples))
