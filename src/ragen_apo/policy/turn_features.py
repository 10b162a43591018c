"""What a model makes of the state in which each turn is written.

Of each turn two hidden states of the last layer, one after the other: the one that predicts the
response's first token, and the mean over what is new in the context since the response before it
began: that response, and what was read then.

Axes: M samples, L token positions, N turns of all samples, K turns of a sample, H numbers of a
hidden state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import read_nothing, to_device


def turn_features(model: LanguageModel, token_ids_ML: Tensor, targets_ML: Tensor) -> Tensor:
    """The features [N, 2 H] of all turns, float32, by sample and then by turn; no gradients.

    `targets_ML`, on the CPU, is True at the sampled tokens, and False at the first position and
    between two turns.
    """
    read_all = features_reader(targets_ML, token_ids_ML.device)
    with torch.no_grad():
        return model.over_targets(token_ids_ML, targets_ML, read_nothing, read_all)[0]


def features_reader(
    targets_ML: Tensor, device: torch.device
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What makes the features of all hidden states [M, L, H]; see `turn_features`."""
    news_MKL = _news(targets_ML)
    is_turn_MK = news_MKL.any(dim=2)
    sample_N, turn_N = (to_device(index, device) for index in is_turn_MK.nonzero(as_tuple=True))
    mean_MKL = to_device(news_MKL / news_MKL.sum(dim=2, keepdim=True).clamp(min=1), device)
    last_MK = to_device(news_MKL.long().cumsum(2).argmax(2), device)

    def read(hidden_MLH: Tensor) -> tuple[Tensor, ...]:
        hidden_MLH = hidden_MLH.float()
        news_NH = (mean_MKL @ hidden_MLH)[sample_N, turn_N]
        last_NH = hidden_MLH[sample_N, last_MK[sample_N, turn_N]]
        return (torch.cat([last_NH, news_NH], dim=1),)

    return read


def at_turns(values_N: Tensor, targets_ML: Tensor) -> Tensor:
    """A number of each turn at all of its sampled tokens [M, L]; 0 elsewhere."""
    turn_ML = _starts(targets_ML).flatten().cumsum(0).reshape(targets_ML.shape) - 1
    index_ML = to_device(turn_ML.clamp(min=0), values_N.device)
    return torch.where(to_device(targets_ML, values_N.device), values_N[index_ML], 0.0)


def _starts(targets_ML: Tensor) -> Tensor:
    """Where a turn's first token is."""
    return targets_ML & ~torch.nn.functional.pad(targets_ML, (1, 0))[:, :-1]


def _news(targets_ML: Tensor) -> Tensor:
    """What is new to each turn of a sample [M, K, L]; nothing where a sample has fewer turns."""
    num_begun_ML = _starts(targets_ML).cumsum(dim=1)
    number_K1 = torch.arange(int(num_begun_ML.max()))[:, None]
    # What follows the last turn's first token, as padding does, is new to no turn.
    return (num_begun_ML[:, None] == number_K1) & (number_K1 < num_begun_ML[:, -1, None, None])
