"""Two steps of the trainer, by one process or several, in numbers that can be compared.

In float64 the tokens are equal, and losses, gradients and weights up to the order of sums: the
norms of transformers compute in float32 whatever the weights are, so a last bit of a sum can become
one of a float32, 6e-8 of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ragen_apo.distributed.ranks import Ranks
from ragen_apo.distributed.sharding import whole_tensor, whole_tensors
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import open_session
from ragen_apo.stages.stored_values import reference_values
from tests import factories
from tests.distributed.runs import TWO_LAYERS
from tests.factories import ALGORITHM_KEYS

TOLERANCE = 1e-6
"""Of gradients and weights, relative to the largest number; float32 resolves 6e-8 of one number."""
NUM_STEPS = 2


@dataclass(frozen=True)
class Seen:
    """What two steps were, in plain numbers that travel between processes."""

    tokens: list[list[int]]
    """Sampled in each turn."""
    logprobs: list[list[float]]
    metrics: list[Mapping[str, float]]
    gradients: list[np.ndarray]
    """Of each update, as it reached the optimizer."""
    state: Mapping[str, np.ndarray]
    """Weights, moments, and what the algorithm trains besides."""


def steps(
    ranks: Ranks,
    run: Path,
    algorithm: str,
    num_tasks: int,
    dtype: str,
    sharding: str = "none",
    *others: str,
) -> Seen:
    """Two steps with updates, whose episodes have returns that differ; `others` are overrides."""
    config = factories.config(*TWO_LAYERS, f"--machine.sharding={sharding}", *others)
    session = open_session(config, RunDirectory(run), SilentProgress())
    assert session.ranks.worker == ranks.worker
    keys = [f"--training.tasks_per_step={num_tasks}", *ALGORITHM_KEYS[algorithm]]
    chosen = factories.with_keys(session, f"--algorithm={algorithm}", *keys)
    values = reference_values(chosen, factories.reference(chosen), chosen.training_tasks())
    trainer = factories.trainer_of(
        replace(session, dtype=getattr(torch, dtype)), algorithm, *keys, values=values
    )
    num_episodes = num_tasks * trainer.config.algorithm.rollouts_per_task
    gradients, results = [], []
    update = trainer.optimizer.update

    def seen_update(**options: Any) -> float:
        found = [p.grad for p in trainer.policy.model.parameters() if p.grad is not None]
        flat = [whole_tensor(gradient).flatten().numpy() for gradient in found]
        gradients.append(np.concatenate([[0.0], *flat]))
        return update(**options)

    returns = [0.25 * (index % 4) - 0.1 * (index % 3) for index in range(num_episodes)]
    with (
        patch.object(trainer.optimizer, "update", seen_update),
        factories.paying(trainer, returns),
    ):
        for step in range(NUM_STEPS):
            results.append(trainer.step(step))
    turns = [turn for each in results for episode in each.trajectories for turn in episode.turns]
    state = {
        **{f"weights/{name}": each for name, each in trainer.policy.model.state_dict().items()},
        **{f"moments/{name}": each for name, each in trainer.optimizer.state_tensors().items()},
        **trainer.algorithm.state_tensors(),
    }
    clock = ("seconds", "num_ranks")
    return Seen(
        tokens=[list(turn.response_token_ids) for turn in turns],
        logprobs=[list(turn.logprobs) for turn in turns],
        metrics=[
            {name: each.metrics[name] for name in each.metrics if not name.endswith(clock)}
            for each in results
        ],
        gradients=gradients,
        state={
            name: each.double().numpy() for name, each in whole_tensors(state, keep=True).items()
        },
    )


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    largest = np.abs(expected).max(initial=0.0)
    difference = np.abs(actual - expected).max(initial=0.0)
    assert difference <= tolerance * max(largest, 1e-3), (difference, largest)


def assert_same_steps(several: Seen, one: Seen) -> None:
    assert several.tokens == one.tokens
    for mine, theirs in zip(several.logprobs, one.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)
    for mine, theirs in zip(several.metrics, one.metrics, strict=True):
        assert mine == pytest.approx(dict(theirs), rel=1e-5, abs=1e-6)
    assert np.abs(one.gradients[-1]).max() > 1e-3
    for mine, theirs in zip(several.gradients, one.gradients, strict=True):
        assert_close(mine, theirs, TOLERANCE)
    assert several.state.keys() == one.state.keys()
    for name, tensor in one.state.items():
        assert_close(several.state[name], tensor, TOLERANCE)
