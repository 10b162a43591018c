"""The regressions of V* of states, and of Q* of moves, on what the reference makes of them.

Both are fitted to the episodes of Stage 1. Q* of a move is V* of the state after it and the reward
on the way there: what is fitted to it is what was earned from the move on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ragen_apo.errors import TrainingError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import in_pieces
from ragen_apo.policy.turn_features import MakeReader, num_turns_of, state_reader, turn_features
from ragen_apo.training.batching import collate, loss_mask_of, micro_batches, pass_cost
from ragen_apo.types import TrainingSample, Trajectory, training_samples
from ragen_apo.values.regression import NUM_FOLDS, HeldOut, ValueRegression, fit_values
from ragen_apo.values.state_values import returns_to_go


def values_by_regression(
    reference: LanguageModel, episodes: Sequence[Trajectory], *, beta: float, micro_batch_size: int
) -> tuple[ValueRegression, dict[str, float]]:
    """V* of states, fitted to all turns of the reference's episodes, and what it says of each task.

    It is judged on held-out episodes of the tasks that were sampled, as these are trained on.
    A task's value is that of its first state, the mean where its episodes begin differently. `beta`
    as in `fit_values`; at most `micro_batch_size` contexts are read at a time. Raises TrainingError
    for too few episodes.
    """
    regression, features = fit_to_turns(
        reference,
        episodes,
        state_reader,
        beta=beta,
        held_out="episodes",
        micro_batch_size=micro_batch_size,
    )
    first_NH = torch.stack([each[0] for each in features])
    first_N = regression.on(first_NH.device)(first_NH).tolist()
    values: dict[str, list[float]] = defaultdict(list)
    for episode, value in zip(episodes, first_N, strict=True):
        values[episode.task.task_id].append(value)
    return regression, {task_id: sum(each) / len(each) for task_id, each in values.items()}


def fit_to_turns(
    reference: LanguageModel,
    episodes: Sequence[Trajectory],
    make_reader: MakeReader,
    *,
    beta: float,
    held_out: HeldOut,
    micro_batch_size: int,
) -> tuple[ValueRegression, list[Tensor]]:
    """The regression of what was earned from each turn on, and the features of each episode.

    V* of states, or Q* of moves, is what the reader reads; the rest as in `values_by_regression`.
    """
    if len(episodes) < NUM_FOLDS:
        raise TrainingError(
            f"values.estimator regression needs at least {NUM_FOLDS} episodes of the reference, "
            f"got {len(episodes)}; train on more tasks, raise values.num_samples, or set "
            "values.estimator to samples"
        )
    features = features_of_turns(
        reference,
        [training_samples(episode) for episode in episodes],
        make_reader,
        micro_batch_size=micro_batch_size,
    )
    numbers: dict[str, int] = {}
    for episode in episodes:
        numbers.setdefault(episode.task.task_id, len(numbers))
    regression = fit_values(
        torch.cat(features),
        [to_go for episode in episodes for to_go in returns_to_go(episode)],
        episodes=[number for number, each in enumerate(episodes) for _ in each.turns],
        tasks=[numbers[each.task.task_id] for each in episodes for _ in each.turns],
        beta=beta,
        held_out=held_out,
    )
    return regression, features


def features_of_turns(
    reference: LanguageModel,
    episodes: Sequence[Sequence[TrainingSample]],
    make_reader: MakeReader,
    *,
    micro_batch_size: int,
) -> list[Tensor]:
    """Those of each episode's turns, on the CPU: of many episodes they are large."""

    def read(token_ids_ML: Tensor, targets_ML: Tensor) -> tuple[Tensor]:
        return (turn_features(reference, token_ids_ML, targets_ML, make_reader),)

    found: dict[int, Tensor] = {}
    cost = pass_cost(reference.device, sharded=reference.shards is not None)
    for group in micro_batches(episodes, size=micro_batch_size, pass_cost=cost):
        of_group = [episodes[index] for index in group]
        together = [sample for samples in of_group for sample in samples]
        batch = collate(together, pad_id=reference.pad_id, device=reference.device)
        mask_ML = loss_mask_of(together, num_positions=batch.token_ids_RT.shape[1])
        with torch.no_grad():
            (features_NH,) = in_pieces(read, batch.token_ids_RT, mask_ML, max_rows=micro_batch_size)
        num_turns = iter(num_turns_of(mask_ML))
        sizes = [sum(next(num_turns) for _ in samples) for samples in of_group]
        parts = features_NH.cpu().split(sizes)
        found.update(zip(group, parts, strict=True))
    return [found[index] for index in range(len(episodes))]
