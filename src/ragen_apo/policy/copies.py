"""A second model beside one that is trained, for another thread."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from ragen_apo.policy.language_model import LanguageModel


def copy_with(model: LanguageModel, tensors: Mapping[str, Tensor]) -> LanguageModel:
    """The model with these tensors instead of its own of the same names; neither knows the other.

    They are not copied, nor are the model's own that are not named, so what changes there changes
    here. All else is: layers, whose adapters can be switched off, and the tokenizer. The copy is
    for evaluation, not for training, and the weights are not in shares.
    """
    assert model.shards is None
    own = model.model.state_dict(keep_vars=True)
    memo: dict[int, object] = {id(tensor): tensor for tensor in own.values()}
    for name, tensor in tensors.items():
        is_weight = isinstance(own[name], nn.Parameter)
        memo[id(own[name])] = nn.Parameter(tensor, requires_grad=False) if is_weight else tensor
    made = copy.deepcopy(model, memo)
    made.model.eval()
    return made
