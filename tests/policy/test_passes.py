from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache

from ragen_apo.policy.passes import body_output


class _OldBody(nn.Module):
    def forward(self, input_ids: Tensor, past_key_values: Cache, use_cache: bool) -> Any:
        assert use_cache
        return SimpleNamespace(last_hidden_state=past_key_values)


class _NewBody(nn.Module):
    def forward(self, input_ids: Tensor, cache: Cache, use_cache: bool) -> Any:
        assert use_cache
        return SimpleNamespace(last_hidden_state=cache)


@pytest.mark.parametrize("body", [_OldBody(), _NewBody()])
def test_the_cache_goes_by_the_name_that_the_model_has_for_it(body: nn.Module) -> None:
    """transformers 5.24 renamed `past_key_values`, warns of the old name and will drop it."""
    cache = Cache(layers=[])
    tokens = torch.zeros(1, 1, dtype=torch.long)
    given = body_output(body, tokens, autocast=None, gradient_checkpointing=False, cache=cache)
    assert given is cache
