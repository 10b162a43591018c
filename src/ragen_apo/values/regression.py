"""V* of any state, or Q* of any move, by regression on what the reference makes of it.

Consumes features of the states that Stage 1 visited, or of the moves that it made there
(`policy.turn_features`), and what the reference earned from there; produces values of others, seen
or not. Pure. What is said of states below holds for moves as well.

    V_hat(s) = beta log f(s),   f minimises  sum_i (exp(G_i / beta) - f(s_i))^2 + ridge ||w||^2

G is the return-to-go, and f is linear in random Fourier features (Rahimi and Recht, "Random
Features for Large-Scale Kernel Machines", 2007): an approximate kernel ridge regression, solved in
closed form. E[exp(G / beta) | s] minimises the expected square. So V_hat(s) approaches V*(s) as far
as the features tell states apart. One sample of each task serves all tasks. How often a task was
sampled does not matter in the sum. How long its episodes are does: each state counts.

Axes: N states, H numbers of a state, D random features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragen_apo.plural import counted
from ragen_apo.seeding import generator

HeldOut = Literal["episodes", "tasks"]
"""What a regression is judged on: episodes that it has not seen, of tasks that it may have seen, or
tasks that it has not seen."""
_HELD_OUT = {"episodes": "held-out episodes of these tasks", "tasks": "held-out tasks"}

NUM_FEATURES = 1024
NUM_FOLDS = 5
RIDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 3))
"""What is tried; the one that predicts what is held out best is taken."""
MAX_ROWS = 4096
"""States whose random features are in memory at a time."""
MIN_VARIANCE = 1e-12
"""A smaller variance of what is predicted is rounding."""
MIN_SPREAD = 1e-5
"""Of returns, in units of beta. Below it V* is their mean to five digits of the spread, and the
variance of exp(G / beta) is lost in rounding."""
MIN_DEVIATION = 1e-6
"""Of a number that is nearly the same in all states, such as one that the model does not use."""


@dataclass(frozen=True)
class ValueRegression:
    """A fitted regression: plain numbers, which can be sent to other processes."""

    beta: float
    highest: float
    """The highest return-to-go: no prediction is higher, and exponentials are of differences to
    it."""
    means: Sequence[float]
    """Of each number of a state."""
    deviations: Sequence[float]
    weights: Sequence[float]
    """Of each random feature."""
    constant: float
    """f where all random features are 0."""
    lowest: float
    """The lowest return-to-go: no prediction is lower, as where f is not positive."""
    unexplained: float
    """The share of the variance of exp(G / beta), or of G at beta inf, that predictions of what was
    held out leave."""
    held_out: HeldOut
    num_states: int
    num_episodes: int

    def sentence(self, name: str = "V*", kind: str = "state") -> str:
        """What it was fitted to, and how well it predicts."""
        return (
            f"{name} by regression on {counted(self.num_states, kind)} of "
            f"{counted(self.num_episodes, 'episode')}; it leaves {self.unexplained:.0%} of the "
            f"variance of what is earned in {_HELD_OUT[self.held_out]}"
        )

    def on(self, device: torch.device) -> ValueFunction:
        """The function itself, whose numbers are on a device."""
        return ValueFunction(self, device)


class ValueFunction:
    """V_hat of features. Its numbers are moved once, so that calls do not wait for a device."""

    def __init__(self, regression: ValueRegression, device: torch.device) -> None:
        self._beta, self._constant = regression.beta, regression.constant
        self._highest, self._lowest = regression.highest, regression.lowest
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
            f_N = self._highest + self._beta * f_N.clamp(min=0).log()
        return f_N.clamp(self._lowest, self._highest).float()


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
    features_NH: Tensor,
    returns_to_go: Sequence[float],
    *,
    episodes: Sequence[int],
    tasks: Sequence[int],
    beta: float,
    held_out: HeldOut,
) -> ValueRegression:
    """The regression of N states; `episodes` and `tasks` say of which episode and task each is.

    `beta` is positive, or inf for the mean of returns. Episodes are held out as a whole, since
    their states share what came of them: for tasks that were sampled, any; for new tasks, all
    episodes of a task. Raises ValueError for fewer episodes or tasks than folds, for numbers that
    are not finite, and for another number of returns, episodes or tasks than of features.
    """
    lengths = [len(returns_to_go), len(episodes), len(tasks)]
    if {*lengths} != {len(features_NH)}:
        raise ValueError(
            f"expected one return-to-go, one episode and one task for each of {len(features_NH)} "
            f"states, got {', '.join(map(str, lengths))}"
        )
    if not beta > 0:
        raise ValueError(f"beta must be positive or inf, got {beta}")
    groups = tasks if held_out == "tasks" else episodes
    if (num_groups := len(set(groups))) < NUM_FOLDS:
        raise ValueError(f"expected at least {NUM_FOLDS} {held_out}, got {num_groups}")
    features_NH = features_NH.cpu()
    target_N = _row(returns_to_go)
    if not (features_NH.isfinite().all() and target_N.isfinite().all()):
        raise ValueError("features and returns must be finite")
    highest, lowest = float(target_N.max()), float(target_N.min())
    if highest - lowest < MIN_SPREAD * beta:
        beta = math.inf
    if not math.isinf(beta):
        target_N = ((target_N - highest) / beta).exp()
    weight_N = _weights(episodes, tasks)
    total = float(weight_N.sum())
    mean_H, deviation_H = _mean_and_deviation(features_NH, weight_N)
    random_features = RandomFeatures(features_NH.shape[1], features_NH.device)
    fold_N = torch.tensor(folds_of(groups))
    folds = torch.zeros(NUM_FOLDS, NUM_FEATURES + 2, NUM_FEATURES + 2, dtype=torch.float64)
    for part_N in torch.arange(len(features_NH)).split(MAX_ROWS):
        features_ND = random_features((features_NH[part_N] - mean_H) / deviation_H)
        target_N1 = target_N[part_N, None]
        rows = torch.cat([features_ND, target_N1, torch.ones_like(target_N1)], dim=1)
        rows *= weight_N[part_N, None].sqrt()
        for fold in range(NUM_FOLDS):
            of_fold = rows[fold_N[part_N] == fold]
            folds[fold] += of_fold.T @ of_fold
    ridge, error = _best_ridge(folds)
    whole = folds.sum(0)
    means = _means(whole)
    whole = _around(whole, means)
    weight_D, spread = _solved(whole, ridge), float(whole[-1, -1])
    return ValueRegression(
        beta=beta,
        highest=highest,
        means=mean_H.tolist(),
        deviations=deviation_H.tolist(),
        weights=weight_D.tolist(),
        constant=float(means[-2] - means[:-2] @ weight_D),
        lowest=lowest,
        unexplained=error / spread if spread > MIN_VARIANCE * total else 0.0,
        held_out=held_out,
        num_states=len(episodes),
        num_episodes=len(set(episodes)),
    )


def folds_of(groups: Sequence[int]) -> list[int]:
    """The fold of each, groups as a whole, at random: their order may repeat every few tasks, as
    that of a mixture's parts, and then a fold would be all of a kind.
    """
    distinct = list(dict.fromkeys(groups))
    order = generator(0, "folds", len(distinct)).permutation(len(distinct)).tolist()
    fold = {group: position % NUM_FOLDS for group, position in zip(distinct, order, strict=True)}
    return [fold[group] for group in groups]


def _mean_and_deviation(features_NH: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """Of each number over the weighted states [H], float64."""
    parts = [*zip(features_NH.split(MAX_ROWS), weight_N.split(MAX_ROWS), strict=True)]
    total = weight_N.sum()
    mean_H = sum(weight @ part.double() for part, weight in parts) / total
    square_H = sum(weight @ (part.double() - mean_H).square() for part, weight in parts) / total
    return mean_H, square_H.sqrt().clamp(min=MIN_DEVIATION)


def _weights(episodes: Sequence[int], tasks: Sequence[int]) -> Tensor:
    """The weight of each state [N]: 1 / episodes of its task, relative to the task with the fewest.

    Adaptive sampling plays hard tasks more often, which would draw all values down.
    """
    num_episodes = Counter(task for task, _ in {*zip(tasks, episodes, strict=True)})
    fewest = min(num_episodes.values())
    return _row([fewest / num_episodes[task] for task in tasks])


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Of its rows, random features, the target and then a one, a least-squares fit has to know the sums
# of products of any two columns [D + 2, D + 2]. Those of folds add up.


def _means(sums: Tensor) -> Tensor:
    """Of each column [D + 2]."""
    return sums[-1] / sums[-1, -1]


def _around(sums: Tensor, means: Tensor) -> Tensor:
    """The sums [D + 1, D + 1] of rows less their means, from those with a last column of ones."""
    mean = means[:-1]
    of_row, of_column, number = sums[..., -1:, :-1], sums[..., :-1, -1:], sums[..., -1:, -1:]
    shifted = sums[..., :-1, :-1] - of_column * mean
    return shifted - mean[:, None] * (of_row - number * mean)


def _solved(sums: Tensor, ridge: float) -> Tensor:
    """The weights [D] of the ridge regression."""
    gram_DD, moment_D1 = sums[:-1, :-1].clone(), sums[:-1, -1:]
    gram_DD.diagonal().add_(ridge)
    lower_DD = torch.linalg.cholesky(gram_DD)
    return torch.cholesky_solve(moment_D1, lower_DD)[:, 0]


def _best_ridge(folds: Tensor) -> tuple[float, float]:
    """The ridge whose predictions of held-out folds err least, and the sum of squared errors.

    The means, too, are of what a fit has seen: those of all rows would tell what is held out.
    """
    whole, minus_one = folds.sum(0), -torch.ones(1, dtype=folds.dtype)
    errors = dict.fromkeys(RIDGES, 0.0)
    for fold in folds:
        means = _means(whole - fold)
        others, held = _around(whole - fold, means), _around(fold, means)
        for ridge in RIDGES:
            residual = torch.cat([_solved(others, ridge), minus_one])  # of the columns
            errors[ridge] += float(residual @ held @ residual)
    best = min(RIDGES, key=lambda ridge: (errors[ridge], -ridge))
    return best, errors[best]
