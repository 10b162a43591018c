"""Log-probabilities of recorded tokens under a model, with or without gradients.

Axes: B rows, T positions, M sampled tokens of the batch, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.policy.language_model import LanguageModel


@dataclass(frozen=True)
class TokenScores:
    """What a model says about the sampled tokens of a batch; zero wherever the mask is False."""

    logprobs_BT: Tensor
    """log pi(token) at the sampling temperature; differentiable if scored with gradients."""
    entropy_BT: Tensor
    """Entropy in nats of the distribution each token was drawn from; with gradients on request."""


def score_tokens(
    model: LanguageModel,
    token_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradients: bool = False,
) -> TokenScores:
    """Scores exactly the tokens under the mask; rows are padded on the right.

    `token_ids_BT` [B, T] int64, `loss_mask_BT` [B, T] bool. The first position is never a sampled
    token. The vocabulary projection runs at the M masked positions only. `entropy_gradients` keeps
    a second tensor [M, V] for the backward pass, for an entropy bonus.
    """
    if bool(loss_mask_BT[:, 0].any()):
        raise ValueError("the first token of a row cannot be a sampled one: nothing predicts it")
    hidden_BTH = model.hidden_states(token_ids_BT, use_cache=False)
    predicts_BT = torch.zeros_like(loss_mask_BT)
    predicts_BT[:, :-1] = loss_mask_BT[:, 1:]
    logits_MV = model.logits(hidden_BTH[predicts_BT])
    logprobs_MV = torch.log_softmax(logits_MV / temperature, dim=-1)
    logprobs_M = logprobs_MV.gather(1, token_ids_BT[loss_mask_BT][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    zeros_BT = torch.zeros(loss_mask_BT.shape, dtype=logprobs_M.dtype, device=logprobs_M.device)
    return TokenScores(
        logprobs_BT=zeros_BT.masked_scatter(loss_mask_BT, logprobs_M),
        entropy_BT=zeros_BT.masked_scatter(loss_mask_BT, entropy_M),
    )
