"""V* by regression: where samples are few, what they have in common says more than each alone."""

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from ragen_apo.values import regression
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.regression import (
    RIDGES,
    RandomFeatures,
    ValueRegression,
    fit_values,
    folds_of,
)

BETA = 0.5
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("few_random_features")


def tasks(num: int = 300, *, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Numbers of each task, and how often the reference solves it: between 5 and 95%."""
    draws = np.random.default_rng(seed)
    features = draws.normal(size=(num, 6))
    rates = 0.05 + 0.9 / (1 + np.exp(-2 * features[:, 0] - features[:, 1]))
    return torch.from_numpy(features).float(), rates


def optimal(rates: np.ndarray, beta: float = BETA) -> np.ndarray:
    """V* of returns 0 and 1, from the success rate."""
    if math.isinf(beta):
        return rates
    return beta * np.log(1 + rates * np.expm1(1 / beta))


def fitted(returns: np.ndarray, features: torch.Tensor, beta: float = BETA) -> ValueRegression:
    each = range(len(returns))
    return fit_values(
        features, returns.tolist(), episodes=each, tasks=each, beta=beta, held_out="episodes"
    )


def values_of(regression: ValueRegression, features: torch.Tensor) -> torch.Tensor:
    return regression.on(CPU)(features)


def error(values: Any, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(values) - expected) ** 2)))


@pytest.mark.parametrize("beta", [BETA, math.inf])
def test_one_sample_of_each_task_values_all_tasks_and_unseen_ones(beta: float) -> None:
    features, rates = tasks()
    returns = (np.random.default_rng(1).random(len(rates)) < rates).astype(float)
    found = fitted(returns, features, beta)
    own = [soft_value([value], beta=beta) for value in returns]
    assert error(values_of(found, features), optimal(rates, beta)) < 0.3 * error(
        own, optimal(rates, beta)
    )
    new_features, new_rates = tasks(seed=2)
    values = values_of(found, new_features)
    mean = np.full(len(new_rates), optimal(rates, beta).mean())
    assert error(values, optimal(new_rates, beta)) < 0.6 * error(mean, optimal(new_rates, beta))


@pytest.mark.slow
def test_without_noise_the_values_are_the_returns_and_little_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regression, "NUM_FEATURES", 1024)
    features, rates = tasks()
    found = fitted(rates, features)
    assert error(values_of(found, features), rates) < 0.02
    new_features, new_rates = tasks(1000, seed=2)
    assert error(values_of(found, new_features), new_rates) < 0.06
    assert found.unexplained < 0.05


def test_returns_that_have_nothing_to_do_with_the_states_are_not_explained() -> None:
    features, _ = tasks()
    returns = (np.random.default_rng(3).random(len(features)) < 0.4).astype(float)
    found = fitted(returns, features)
    assert 0.95 < found.unexplained < 1.1
    assert values_of(found, features).std() < 0.1
    assert values_of(found, features).mean() == pytest.approx(
        optimal(np.array([returns.mean()]))[0], abs=0.05
    )


def test_a_beta_far_above_the_returns_is_the_mean_and_not_a_perfect_fit() -> None:
    """The variance of exp(G / beta) is then a rest of rounding, of which nothing is unexplained."""
    features, _ = tasks()
    returns = (np.random.default_rng(3).random(len(features)) < 0.4).astype(float)
    huge, mean = fitted(returns, features, 1e8), fitted(returns, features, math.inf)
    assert huge == mean
    assert huge.unexplained > 0.95
    low, high = (fitted(1e3 * returns, features, beta) for beta in (1e8, 1e6))
    assert values_of(low, features) == pytest.approx(values_of(high, features), abs=1)


@pytest.mark.parametrize("beta", [0.001, 0.5, math.inf])
def test_values_lie_between_the_lowest_and_the_highest_return(beta: float) -> None:
    """exp((G - highest) / beta) of a failure may be 0 in float64; f is negative in places, and
    more than what is highest in others."""
    features, rates = tasks()
    returns = (np.random.default_rng(1).random(len(rates)) < rates).astype(float)
    values = values_of(fitted(returns, features, beta), tasks(1000, seed=2)[0])
    assert values.isfinite().all()
    assert values.min() == 0.0
    assert values.max() == 1.0


def test_a_task_counts_alike_however_often_it_was_sampled() -> None:
    """Hard tasks were sampled four times as often, and features do not tell them apart."""
    draws = np.random.default_rng(4)
    features = torch.from_numpy(draws.normal(size=(1000, 6))).float()
    task_of = [number // 8 if number < 800 else 100 + (number - 800) // 2 for number in range(1000)]
    returns = (draws.random(1000) < np.where(np.array(task_of) < 100, 0.1, 0.9)).astype(float)
    found = fit_values(
        features,
        returns.tolist(),
        episodes=range(1000),
        tasks=task_of,
        beta=math.inf,
        held_out="episodes",
    )
    assert values_of(found, features).mean() == pytest.approx(0.5, abs=0.03)
    assert returns.mean() < 0.3


def test_what_tells_sampled_tasks_apart_explains_nothing_of_held_out_ones() -> None:
    """Four samples of each task, whose features say nothing of how often it is solved."""
    draws = np.random.default_rng(5)
    rates = draws.permutation(np.repeat([0.05, 0.95], 100))
    features = torch.from_numpy(draws.normal(size=(200, 6))).float().repeat_interleave(4, 0)
    task_of = np.repeat(np.arange(200), 4)
    returns = (draws.random(800) < rates[task_of]).astype(float)
    asked: dict[str, Any] = {"episodes": range(800), "tasks": task_of.tolist(), "beta": math.inf}
    found = {
        held_out: fit_values(features, returns.tolist(), **asked, held_out=held_out)
        for held_out in ("episodes", "tasks")
    }
    assert found["episodes"].unexplained < 0.6
    assert 0.95 < found["tasks"].unexplained < 1.1
    assert "of what is earned in held-out tasks" in found["tasks"].sentence()


def test_folds_are_of_whole_groups_alike_in_size_and_of_all_kinds() -> None:
    """Tasks of five parts in turns: a fold by number would be one part, and never be known."""
    groups = [number // 2 for number in range(600)]
    folds = folds_of(groups)
    assert folds == folds_of(groups)
    assert folds[::2] == folds[1::2], "the states of a group"
    assert Counter(folds) == dict.fromkeys(range(5), 120)
    kinds = {(group % 5, fold) for group, fold in zip(groups, folds, strict=True)}
    assert len(kinds) == 5 * 5, "each part in each fold"
    assert {*folds_of([0, 5, 10, 15, 20])} == {*range(5)}


def test_a_fold_is_not_all_of_a_part_so_parts_in_turns_are_predicted() -> None:
    draws = np.random.default_rng(7)
    part = np.arange(300) % 5
    features = torch.from_numpy(draws.normal(size=(300, 6)) + 3 * np.eye(6)[part]).float()
    returns = np.array([0.0, 1.0, 0.2, 0.8, 0.5])[part] + 0.1 * draws.normal(size=300)
    assert fitted(returns, features, math.inf).unexplained < 0.3


def test_standard_numbers_count_each_task_alike() -> None:
    """A task that was sampled a hundred times is one of six tasks, here of their numbers' mean."""
    features = torch.tensor([[float(number)] for number in range(6)] + [[5.0]] * 99)
    found = fit_values(
        features,
        [float(number % 2) for number in range(len(features))],
        episodes=range(len(features)),
        tasks=[*range(6), *[5] * 99],
        beta=math.inf,
        held_out="episodes",
    )
    assert found.means == pytest.approx([2.5])
    assert found.deviations == pytest.approx([math.sqrt(35 / 12)])


@pytest.mark.parametrize("num_tasks", [5, 10, 20])
def test_few_tasks_whose_features_say_nothing_are_not_explained(num_tasks: int) -> None:
    """The mean of all rows tells that of what is held out: with it, nothing of five was left."""
    left = []
    for seed in range(10):
        draws = np.random.default_rng(seed)
        features = torch.from_numpy(draws.normal(size=(num_tasks, 6))).float()
        left.append(fitted(draws.normal(size=num_tasks), features, math.inf).unexplained)
    assert min(left) > 0.6
    assert np.mean(left) > 1.0, "worse than the mean, which such tasks do not know well either"


def test_equal_returns_are_the_value_of_every_state() -> None:
    features, _ = tasks()
    found = fitted(np.full(len(features), 0.7), features)
    assert torch.allclose(values_of(found, features), torch.tensor(0.7), atol=1e-6)
    assert found.unexplained == 0.0


def test_it_is_the_ridge_regression_of_the_best_ridge_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By least squares with a row for each penalty, and each ridge tried on whole episodes."""
    monkeypatch.setattr(regression, "NUM_FEATURES", 64)
    monkeypatch.setattr(regression, "MAX_ROWS", 7)
    features, rates = tasks(60)
    returns = (np.random.default_rng(1).random(60) < rates).astype(float)
    episodes = [index // 3 for index in range(60)]
    found = fit_values(
        features,
        returns.tolist(),
        episodes=episodes,
        tasks=episodes,
        beta=BETA,
        held_out="episodes",
    )

    standard = (features - features.mean(0)) / features.std(0, correction=0)
    waves = RandomFeatures(6, CPU)(standard.double()).numpy()
    target = np.exp((returns - returns.max()) / BETA)

    def predicted(train: np.ndarray, asked: np.ndarray, ridge: float) -> np.ndarray:
        middle, level = waves[train].mean(0), target[train].mean()
        rows = np.vstack([waves[train] - middle, math.sqrt(ridge) * np.eye(waves.shape[1])])
        aims = np.concatenate([target[train] - level, np.zeros(waves.shape[1])])
        weights = np.linalg.lstsq(rows, aims, rcond=None)[0]
        return (waves[asked] - middle) @ weights + level

    fold = np.array(folds_of(episodes))
    errors = {}
    for ridge in RIDGES:
        held = np.concatenate(
            [
                (predicted(fold != each, fold == each, ridge) - target[fold == each]) ** 2
                for each in range(5)
            ]
        )
        errors[ridge] = held.mean()
    best = min(errors, key=errors.__getitem__)
    everything = np.full(60, True)
    f = predicted(everything, everything, best).clip(target.min(), target.max())
    assert values_of(found, features).numpy() == pytest.approx(
        returns.max() + BETA * np.log(f), abs=1e-6
    )
    assert found.unexplained == pytest.approx(errors[best] / target.var())


def test_random_features_have_the_products_of_a_gaussian_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regression, "NUM_FEATURES", 4096)
    points = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    waves = RandomFeatures(8, CPU)(points)
    kernel = (-torch.cdist(points, points).square() / (2 * 8)).exp()
    assert (waves @ waves.T - kernel).abs().max() < 0.1
    assert (waves @ waves.T - kernel).abs().mean() < 0.02


def test_random_features_stay_those_that_stored_regressions_were_fitted_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regression, "NUM_FEATURES", 1024)
    point = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    first = RandomFeatures(3, CPU)(point)[0, :4].tolist()
    assert first == pytest.approx([-0.0289691111, 0.0179439185, 0.0347121684, 0.0421258782])


def test_it_is_sent_to_other_processes_as_json() -> None:
    features, rates = tasks(50)
    found = fitted(rates, features)
    kind = TypeAdapter(ValueRegression)
    received = kind.validate_json(kind.dump_json(found))
    assert torch.equal(values_of(received, features), values_of(found, features))
    assert asdict(received) == asdict(found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"beta": 0.0}, "beta must be positive or inf, got 0.0"),
        ({"beta": math.nan}, "beta must be positive or inf, got nan"),
        ({"episodes": [0, 0, 1, 1, 2, 2, 3, 3]}, "expected at least 5 episodes, got 4"),
        ({"tasks": [0] * 8, "held_out": "tasks"}, "expected at least 5 tasks, got 1"),
        ({"returns_to_go": [math.inf, *[0.0] * 7]}, "features and returns must be finite"),
        ({"features_NH": torch.full((8, 2), math.nan)}, "features and returns must be finite"),
        ({"returns_to_go": [0.0] * 7}, "for each of 8 states, got 7, 8, 8"),
        ({"episodes": range(9)}, "for each of 8 states, got 8, 9, 8"),
        ({"tasks": range(9)}, "for each of 8 states, got 8, 8, 9"),
    ],
)
def test_what_cannot_be_fitted_is_refused(changed: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {
        "features_NH": torch.eye(8)[:, :2],
        "returns_to_go": [0.0] * 8,
        "episodes": range(8),
        "tasks": range(8),
        "beta": BETA,
        "held_out": "episodes",
    }
    with pytest.raises(ValueError, match=message):
        fit_values(**asked | changed)
