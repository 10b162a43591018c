"""The regression of V* on what the reference makes of the states that Stage 1 visited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ragen_apo.errors import TrainingError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.turn_features import turn_features
from ragen_apo.training.batching import collate, loss_mask_of, micro_batches
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.values.regression import NUM_FOLDS, ValueRegression, fit_values
from ragen_apo.values.state_values import returns_to_go


def values_by_regression(
    reference: LanguageModel,
    episodes: Sequence[Trajectory],
    *,
    beta: float,
    micro_batch_size: int,
) -> tuple[ValueRegression, dict[str, float]]:
    """What is fitted to all turns of the reference's episodes, and what it says of each task.

    A task's value is that of its first state, the mean where its episodes begin differently. `beta`
    as in `fit_values`; at most `micro_batch_size` contexts are read at a time. Raises TrainingError
    for too few episodes.
    """
    if len(episodes) < NUM_FOLDS:
        raise TrainingError(
            f"values.estimator regression needs at least {NUM_FOLDS} episodes of the reference, "
            f"got {len(episodes)}; train on more tasks, raise values.num_samples, or set "
            "values.estimator to samples"
        )
    features = features_by_episode(reference, episodes, micro_batch_size=micro_batch_size)
    regression = fit_values(
        torch.cat(features),
        [to_go for episode in episodes for to_go in returns_to_go(episode)],
        episodes=[number for number, each in enumerate(episodes) for _ in each.turns],
        beta=beta,
    )
    first_NH = torch.stack([each[0] for each in features])
    first_N = regression.on(first_NH.device)(first_NH).tolist()
    values: dict[str, list[float]] = defaultdict(list)
    for episode, value in zip(episodes, first_N, strict=True):
        values[episode.task.task_id].append(value)
    return regression, {task_id: sum(each) / len(each) for task_id, each in values.items()}


def features_by_episode(
    reference: LanguageModel, episodes: Sequence[Trajectory], *, micro_batch_size: int
) -> list[torch.Tensor]:
    """Those of each episode's turns, on the CPU: of many episodes they are large."""
    samples = [training_samples(episode) for episode in episodes]
    found: dict[int, torch.Tensor] = {}
    for group in micro_batches(samples, size=micro_batch_size):
        together = [sample for index in group for sample in samples[index]]
        batch = collate(together, pad_id=reference.pad_id, device=reference.device)
        mask_ML = loss_mask_of(together, num_positions=batch.token_ids_RT.shape[1])
        features_NH = turn_features(reference, batch.token_ids_RT, mask_ML).cpu()
        parts = features_NH.split([len(episodes[index].turns) for index in group])
        found.update(zip(group, parts, strict=True))
    return [found[index] for index in range(len(episodes))]
