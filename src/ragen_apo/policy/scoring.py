"""Log-probabilities of recorded tokens under a model, with or without gradients.

Further axis (`ragen_apo.types` has the others): N sampled tokens of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.policy.language_model import LanguageModel


@dataclass(frozen=True)
class TokenScores:
    """Log-probability and entropy at the sampled tokens of a batch; zero at all other positions.

    `score_tokens` gives one row a context [R, T]; the trainer joins them to one an episode [B, T].
    """

    logprobs_BT: Tensor
    """log pi(token) at the sampling temperature; differentiable if scored with gradients."""
    entropy_BT: Tensor
    """Entropy in nats of the distribution each token was drawn from; with gradients on request."""


def score_tokens(
    model: LanguageModel,
    token_ids_RT: Tensor,
    loss_mask_RT: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradients: bool = False,
) -> TokenScores:
    """Scores the tokens at which the mask is True; rows are padded on the right.

    `token_ids_RT` int64, `loss_mask_RT` bool. The first position is never a sampled token. The
    vocabulary projection runs at the N masked positions only. `entropy_gradients` keeps a second
    tensor [N, V] for the backward pass, for an entropy bonus.
    """
    if bool(loss_mask_RT[:, 0].any()):
        raise ValueError("the first token of a row cannot be a sampled one: nothing predicts it")
    logits_NV = model.target_logits(token_ids_RT, loss_mask_RT)
    logprobs_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
    logprobs_N = logprobs_NV.gather(1, token_ids_RT[loss_mask_RT][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    zeros_RT = torch.zeros(loss_mask_RT.shape, dtype=logprobs_N.dtype, device=logprobs_N.device)
    return TokenScores(
        logprobs_BT=zeros_RT.masked_scatter(loss_mask_RT, logprobs_N),
        entropy_BT=zeros_RT.masked_scatter(loss_mask_RT, entropy_N),
    )
