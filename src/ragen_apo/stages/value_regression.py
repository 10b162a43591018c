"""The regression of V* on what the reference makes of the states that Stage 1 visited."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.turn_features import turn_features
from ragen_apo.training.batching import collate, loss_mask_of
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.values.regression import ValueRegression, fit_values


def values_by_regression(
    reference: LanguageModel, episodes: Sequence[Trajectory], *, beta: float
) -> tuple[ValueRegression, dict[str, float]]:
    """What is fitted to all turns of the reference's episodes, and what it says of each task.

    A task's value is that of its first state, the mean where its episodes begin differently. `beta`
    as in `fit_values`.
    """
    returns_to_go: list[float] = []
    first_turns: list[int] = []
    for episode in episodes:
        first_turns.append(len(returns_to_go))
        rewards = [turn.reward for turn in reversed(episode.turns)]
        returns_to_go += reversed(list(itertools.accumulate(rewards)))
    features_NH = torch.cat(list(_features(reference, episodes)))
    numbers = [number for number, each in enumerate(episodes) for _ in each.turns]
    regression = fit_values(features_NH, returns_to_go, episodes=numbers, beta=beta)
    values: dict[str, list[float]] = defaultdict(list)
    first_N = regression.values(features_NH[first_turns]).tolist()
    for episode, value in zip(episodes, first_N, strict=True):
        values[episode.task.task_id].append(value)
    return regression, {task_id: sum(each) / len(each) for task_id, each in values.items()}


def _features(reference: LanguageModel, episodes: Sequence[Trajectory]) -> Iterator[torch.Tensor]:
    """Those of all turns, episode by episode, on the CPU: of many episodes they are large."""
    for episode in episodes:
        for sample in training_samples(episode):
            batch = collate([sample], pad_id=reference.pad_id, device=reference.device)
            mask_ML = loss_mask_of([sample], num_positions=batch.token_ids_RT.shape[1])
            yield turn_features(reference, batch.token_ids_RT, mask_ML).cpu()
