"""What a model makes of the state in which each turn is written, and of what is written there.

Of a state two hidden states of the last layer, one after the other: the one that predicts the
response's first token, and the mean over what is new in the context since the response before it
began: that response, and what was read then. Of a move, which is a response in its state, three:
the one that predicts its first token, the one at its last token, and the mean over it.

Axes: M samples, L token positions, N turns of all samples, K turns of a sample, H numbers of a
hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import read_nothing, to_device

FeaturesReader = Callable[[Tensor], tuple[Tensor, ...]]
"""Makes the features of all turns [N, ...], by sample and then by turn, of all hidden states
[M, L, H]."""
MakeReader = Callable[[Tensor, torch.device], FeaturesReader]
"""`state_reader` or `move_reader`. The targets [M, L], on the CPU, are True at the sampled tokens,
and False at the first position and between two turns."""


def turn_features(
    model: LanguageModel, token_ids_ML: Tensor, targets_ML: Tensor, make_reader: MakeReader
) -> Tensor:
    """The features of all turns, float32; no gradients."""
    read_all = make_reader(targets_ML, token_ids_ML.device)
    with torch.no_grad():
        return model.over_targets(token_ids_ML, targets_ML, read_nothing, read_all)[0]


def state_reader(targets_ML: Tensor, device: torch.device) -> FeaturesReader:
    """Reads the features of states [N, 2 H]."""
    news_MKL = _news(targets_ML)
    return _reader([_last(news_MKL)], news_MKL, device)


def move_reader(targets_ML: Tensor, device: torch.device) -> FeaturesReader:
    """Reads the features of moves [N, 3 H]."""
    said_MKL = _of_turns(targets_ML) & targets_ML[:, None]
    before_MK = said_MKL.long().argmax(2) - 1
    return _reader([before_MK, _last(said_MKL)], said_MKL, device)


def _reader(
    positions_MK: Sequence[Tensor], parts_MKL: Tensor, device: torch.device
) -> FeaturesReader:
    """Reads of each turn that has a part the hidden states at positions, and the part's mean."""
    is_turn_MK = parts_MKL.any(dim=2)
    sample_N, turn_N = (to_device(index, device) for index in is_turn_MK.nonzero(as_tuple=True))
    mean_MKL = to_device(parts_MKL / parts_MKL.sum(dim=2, keepdim=True).clamp(min=1), device)
    at_N = [to_device(each[is_turn_MK], device) for each in positions_MK]

    def read(hidden_MLH: Tensor) -> tuple[Tensor, ...]:
        hidden_MLH = hidden_MLH.float()
        means_NH = (mean_MKL @ hidden_MLH)[sample_N, turn_N]
        return (torch.cat([*(hidden_MLH[sample_N, each] for each in at_N), means_NH], dim=1),)

    return read


def at_turns(values_N: Tensor, targets_ML: Tensor) -> Tensor:
    """A number of each turn at all of its sampled tokens [M, L]; 0 elsewhere."""
    turn_ML = _starts(targets_ML).flatten().cumsum(0).reshape(targets_ML.shape) - 1
    index_ML = to_device(turn_ML.clamp(min=0), values_N.device)
    return torch.where(to_device(targets_ML, values_N.device), values_N[index_ML], 0.0)


def num_turns_of(targets_ML: Tensor) -> list[int]:
    """The number of turns of each sample."""
    return _starts(targets_ML).sum(dim=1).tolist()


def _starts(targets_ML: Tensor) -> Tensor:
    """Where a turn's first token is."""
    return targets_ML & ~torch.nn.functional.pad(targets_ML, (1, 0))[:, :-1]


def _of_turns(targets_ML: Tensor) -> Tensor:
    """The positions [M, K, L] from each turn's first token up to the next one's."""
    num_begun_ML = _starts(targets_ML).cumsum(dim=1)
    number_K1 = 1 + torch.arange(int(num_begun_ML.max()))[:, None]
    return num_begun_ML[:, None] == number_K1


def _news(targets_ML: Tensor) -> Tensor:
    """What is new to each turn of a sample [M, K, L]; nothing where a sample has fewer turns."""
    num_begun_ML = _starts(targets_ML).cumsum(dim=1)
    number_K1 = torch.arange(int(num_begun_ML.max()))[:, None]
    # What follows the last turn's first token, as padding does, is new to no turn.
    return (num_begun_ML[:, None] == number_K1) & (number_K1 < num_begun_ML[:, -1, None, None])


def _last(parts_MKL: Tensor) -> Tensor:
    """The last position of each part [M, K]."""
    return parts_MKL.long().cumsum(2).argmax(2)
