"""V* of any state, by regression on what the reference makes of it.

Consumes features of the states that Stage 1 visited (`policy.turn_features`) and what the reference
earned from there; produces values of states, seen or not. Pure.

    V_hat(s) = beta log f(s),   f minimises  sum_i (exp(G_i / beta) - f(s_i))^2 + ridge ||w||^2

G is the return-to-go, and f is linear in random Fourier features (Rahimi and Recht, "Random
Features for Large-Scale Kernel Machines", 2007): an approximate kernel ridge regression, solved in
closed form. E[exp(G / beta) | s] minimises the expected square. So V_hat(s) approaches V*(s) as far
as the features tell states apart. One sample of each task serves all tasks.

Axes: N states, H numbers of a state, D random features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.plural import counted
from ragen_apo.seeding import generator

NUM_FEATURES = 1024
NUM_FOLDS = 5
RIDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 3))
"""What is tried; the one that predicts held-out episodes best is taken."""
MAX_ROWS = 4096
"""States whose random features are in memory at a time."""
MIN_SPREAD = 1e-12
"""A smaller variance is rounding."""
MIN_DEVIATION = 1e-6
"""Of a number that is nearly the same in all states, such as one that the model does not use."""


@dataclass(frozen=True)
class ValueRegression:
    """A fitted regression: plain numbers, which can be sent to other processes."""

    beta: float
    highest: float
    """The highest return-to-go; exponentials are of differences to it."""
    means: Sequence[float]
    """Of each number of a state."""
    deviations: Sequence[float]
    weights: Sequence[float]
    """Of each random feature."""
    constant: float
    """f where all random features are 0."""
    lowest_f: float
    """The smallest that was fitted: no prediction is lower, as f is positive."""
    unexplained: float
    """Share of the variance of exp(G / beta) that held-out episodes leave (of G at beta inf)."""

    num_states: int
    num_episodes: int

    def sentence(self) -> str:
        """What it was fitted to, and how well it predicts."""
        return (
            f"V* by regression on {counted(self.num_states, 'state')} of "
            f"{counted(self.num_episodes, 'episode')}; it leaves {self.unexplained:.0%} of the "
            "variance of what held-out episodes earn"
        )

    def on(self, device: torch.device) -> ValueFunction:
        """The function itself, whose numbers are on a device."""
        return ValueFunction(self, device)


class ValueFunction:
    """V_hat of features. Its numbers are moved once, so that calls do not wait for a device."""

    def __init__(self, regression: ValueRegression, device: torch.device) -> None:
        self._beta, self._highest = regression.beta, regression.highest
        self._constant, self._lowest_f = regression.constant, regression.lowest_f
        self._mean_H, self._deviation_H, self._weight_D = (
            _row(numbers).to(device)
            for numbers in (regression.means, regression.deviations, regression.weights)
        )
        self._features = RandomFeatures(len(regression.means), device)

    def __call__(self, features_NH: Tensor) -> Tensor:
        """V_hat [N] of the features [N, H], float32."""
        features_ND = self._features((features_NH.double() - self._mean_H) / self._deviation_H)
        f_N = features_ND @ self._weight_D + self._constant
        if not math.isinf(self._beta):
            f_N = self._highest + self._beta * f_N.clamp(min=self._lowest_f).log()
        return f_N.float()


class RandomFeatures:
    """cos(w z + b) of standardised numbers z: random Fourier features of a Gaussian kernel.

    Its width is sqrt(H), near the typical distance of two states. The same for equal H.
    """

    def __init__(self, num_numbers: int, device: torch.device) -> None:
        draws = generator(0, "random-features", num_numbers)
        frequency_HD = draws.standard_normal((num_numbers, NUM_FEATURES))
        phase_D = draws.uniform(0, 2 * math.pi, NUM_FEATURES)
        self._frequency_HD = torch.from_numpy(frequency_HD / math.sqrt(num_numbers)).to(device)
        self._phase_D = torch.from_numpy(phase_D).to(device)

    def __call__(self, standard_NH: Tensor) -> Tensor:
        """Features [N, D], whose products approximate the kernel."""
        waves_ND = (standard_NH @ self._frequency_HD + self._phase_D).cos()
        return waves_ND * math.sqrt(2 / NUM_FEATURES)


def fit_values(
    features_NH: Tensor, returns_to_go: Sequence[float], *, episodes: Sequence[int], beta: float
) -> ValueRegression:
    """The regression of N states; `episodes` says which episode each is of.

    `beta` is positive, or inf for the mean of returns. Episodes are held out as a whole, since
    their states share what came of them. Raises ValueError for fewer episodes than folds, for
    numbers that are not finite, and for another number of returns or episodes than of features.
    """
    if not len(features_NH) == len(returns_to_go) == len(episodes):
        raise ValueError(
            f"expected one return-to-go and one episode for each of {len(features_NH)} states, got "
            f"{len(returns_to_go)} and {len(episodes)}"
        )
    if not beta > 0:
        raise ValueError(f"beta must be positive or inf, got {beta}")
    if len(set(episodes)) < NUM_FOLDS:
        raise ValueError(f"expected at least {NUM_FOLDS} episodes, got {len(set(episodes))}")
    features_NH = features_NH.double().cpu()
    target_N = _row(returns_to_go)
    if not (features_NH.isfinite().all() and target_N.isfinite().all()):
        raise ValueError("features and returns must be finite")
    highest = float(target_N.max())
    if not math.isinf(beta):
        target_N = ((target_N - highest) / beta).exp()
    mean_H = features_NH.mean(0)
    deviation_H = features_NH.std(0, correction=0).clamp(min=MIN_DEVIATION)
    random_features = RandomFeatures(features_NH.shape[1], features_NH.device)
    fold_N = torch.tensor([episode % NUM_FOLDS for episode in episodes])
    sums = [Sums.zero() for _ in range(NUM_FOLDS)]
    for part_N in torch.arange(len(features_NH)).split(MAX_ROWS):
        features_ND = random_features((features_NH[part_N] - mean_H) / deviation_H)
        for fold, of_fold in enumerate(sums):
            held_N = fold_N[part_N] == fold
            of_fold.add(features_ND[held_N], target_N[part_N][held_N])
    whole = sum(sums, start=Sums.zero())
    middle_D, middle = whole.feature_D / whole.count, whole.target / whole.count
    folds = [each.around(middle_D, middle) for each in sums]
    centred = sum(folds, start=Sums.zero())
    ridge, error = _best_ridge(folds, centred)
    weight_D = centred.solved(ridge)
    spread = centred.square / centred.count
    return ValueRegression(
        beta=beta,
        highest=highest,
        means=mean_H.tolist(),
        deviations=deviation_H.tolist(),
        weights=weight_D.tolist(),
        constant=float(middle - middle_D @ weight_D),
        lowest_f=float(target_N.min()),
        unexplained=error / spread if spread > MIN_SPREAD else 0.0,
        num_states=len(episodes),
        num_episodes=len(set(episodes)),
    )


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass
class Sums:
    """What a least-squares fit has to know of some states: sums over them, in D x D numbers."""

    count: float
    feature_D: Tensor
    target: float
    gram_DD: Tensor
    moment_D: Tensor
    """Of features times targets."""
    square: float
    """Of targets."""

    @staticmethod
    def zero() -> Sums:
        """Those of no states."""
        zero_D = torch.zeros(NUM_FEATURES, dtype=torch.float64)
        return Sums(0.0, zero_D, 0.0, zero_D.new_zeros(NUM_FEATURES, NUM_FEATURES), zero_D, 0.0)

    def add(self, features_ND: Tensor, target_N: Tensor) -> None:
        """More states."""
        self.count += len(target_N)
        self.feature_D = self.feature_D + features_ND.sum(0)
        self.target += float(target_N.sum())
        self.gram_DD = self.gram_DD + features_ND.T @ features_ND
        self.moment_D = self.moment_D + features_ND.T @ target_N
        self.square += float(target_N.square().sum())

    def __add__(self, other: Sums) -> Sums:
        return self._with(other, 1.0)

    def __sub__(self, other: Sums) -> Sums:
        return self._with(other, -1.0)

    def _with(self, other: Sums, sign: float) -> Sums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(own + sign * its for own, its in pairs))

    def around(self, feature_D: Tensor, target: float) -> Sums:
        """The sums of what is left when a constant is subtracted from features and targets."""
        cross_DD = torch.outer(self.feature_D, feature_D)
        return Sums(
            self.count,
            self.feature_D - self.count * feature_D,
            self.target - self.count * target,
            self.gram_DD - cross_DD - cross_DD.T + self.count * torch.outer(feature_D, feature_D),
            self.moment_D
            - target * self.feature_D
            - self.target * feature_D
            + self.count * target * feature_D,
            self.square - 2 * target * self.target + self.count * target**2,
        )

    def solved(self, ridge: float) -> Tensor:
        """The weights [D] of the ridge regression: (gram + ridge)^-1 moment."""
        identity_DD = torch.eye(NUM_FEATURES, dtype=torch.float64)
        lower_DD = torch.linalg.cholesky(self.gram_DD + ridge * identity_DD)
        return torch.cholesky_solve(self.moment_D[:, None], lower_DD)[:, 0]

    def error(self, weight_D: Tensor) -> float:
        """The sum of the squared errors of a prediction."""
        explained = weight_D @ (self.gram_DD @ weight_D - 2 * self.moment_D)
        return self.square + float(explained)


def _best_ridge(folds: Sequence[Sums], whole: Sums) -> tuple[float, float]:
    """The ridge whose predictions of held-out folds err least, and their mean squared error."""
    errors = {
        ridge: sum(held.error((whole - held).solved(ridge)) for held in folds) / whole.count
        for ridge in RIDGES
    }
    best = min(RIDGES, key=lambda ridge: (errors[ridge], -ridge))
    return best, errors[best]
