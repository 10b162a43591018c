"""The critic of PPO: a copy of a language model's body with a linear value head.

Where the model has adapters, the copy has its own, and only they and the head are trained.

Consumes padded token ids, produces one value per sampled token: that of the text before the token.
Starts from value 0 everywhere. It is in shares where the model is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ragen_apo.distributed.sharding import shard
from ragen_apo.policy.attention import whole_rows
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.lora import freeze_all_but_adapters
from ragen_apo.policy.passes import body_output, decoder_layers


class Critic(nn.Module):
    """Values of texts; its weights are its own from the start."""

    def __init__(self, model: LanguageModel, *, freeze_embeddings: bool = False) -> None:
        super().__init__()
        with model.whole():
            body: Any = copy.deepcopy(model.model.base_model)
        body.requires_grad_(True)
        freeze_all_but_adapters(body)
        if freeze_embeddings:
            body.get_input_embeddings().requires_grad_(False)
        self.body = body
        self.head = nn.Linear(model.config.hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.autocast = model.autocast
        self.gradient_checkpointing = model.gradient_checkpointing
        self.eval()
        if model.shards is not None:
            # The head's number format may be another than that of the rest.
            layers = [*decoder_layers(body)[::-1], self.head]
            shard(self, layers, num_ranks=model.shards.num_ranks)

    def forward(self, token_ids_RT: Tensor, loss_mask_RT: Tensor) -> Tensor:
        """V of the text before each sampled token [R, T] in float32; 0 where the mask is False."""
        hidden_RTH = body_output(
            self.body,
            token_ids_RT,
            autocast=self.autocast,
            gradient_checkpointing=self.gradient_checkpointing,
            use_cache=False,
            **whole_rows(token_ids_RT.device),
        )
        after_RT = self.head(hidden_RTH.to(self.head.weight.dtype))[:, :, 0]
        before_RT = torch.cat([torch.zeros_like(after_RT[:, :1]), after_RT[:, :-1]], dim=1)
        return torch.where(loss_mask_RT, before_RT, torch.zeros_like(before_RT))
