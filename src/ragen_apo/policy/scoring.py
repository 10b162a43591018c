"""Log-probabilities of recorded tokens under a model, with or without gradients.

`score_tokens` also has the entropy of each token's distribution, which takes as much memory as the
logits; what only needs log-probabilities, as of the reference, asks `token_logprobs`. Of many
tokens, logits are made in pieces (`LanguageModel.over_targets`), so their memory is bounded.

Further axis (`ragen_apo.types` has the others): N sampled tokens of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import read_nothing, to_device


@dataclass(frozen=True)
class TokenScores:
    """Log-probability and entropy at the sampled tokens of a batch; zero at all other positions.

    `score_tokens` gives one row a context [R, T]; the trainer joins them to one an episode [B, T].
    """

    logprobs_BT: Tensor
    """log pi(token) at the sampling temperature; differentiable if scored with gradients."""
    entropy_BT: Tensor | None
    """Entropy in nats of the distribution each token was drawn from; with gradients on request.
    The trainer has None in passes after a step's first, unless a loss differentiates it."""


def score_tokens(
    model: LanguageModel,
    token_ids_RT: Tensor,
    loss_mask_RT: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradients: bool = False,
) -> TokenScores:
    """Scores the tokens at which the mask is True; rows are padded on the right.

    `token_ids_RT` int64, `loss_mask_RT` bool; if that is on the CPU, the host does not wait for a
    GPU. The first position is never a sampled token. The vocabulary projection runs at the N masked
    positions only. `entropy_gradients` keeps a second tensor [N, V] of a piece for the backward
    pass, for an entropy bonus.
    """

    def read(hidden_NH: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_NV, chosen_N = _scored(model, hidden_NH, tokens_N, temperature=temperature)
        with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
            return chosen_N, -(logprobs_NV.exp() * logprobs_NV).sum(-1)

    logprobs_N, entropy_N = model.over_targets(token_ids_RT, loss_mask_RT, read)
    return TokenScores(
        logprobs_BT=_in_rows(logprobs_N, loss_mask_RT), entropy_BT=_in_rows(entropy_N, loss_mask_RT)
    )


def token_logprobs(
    model: LanguageModel, token_ids_RT: Tensor, loss_mask_RT: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """The log-probabilities [R, T] of `score_tokens` alone."""
    (logprobs_RT,) = token_logprobs_and(
        read_nothing, model, token_ids_RT, loss_mask_RT, temperature=temperature
    )
    return logprobs_RT


def token_logprobs_and(
    read_all: Callable[[Tensor], tuple[Tensor, ...]],
    model: LanguageModel,
    token_ids_RT: Tensor,
    loss_mask_RT: Tensor,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    """`token_logprobs`, then what `read_all` makes of all hidden states of the same pass."""

    def read(hidden_NH: Tensor, tokens_N: Tensor) -> tuple[Tensor]:
        return (_scored(model, hidden_NH, tokens_N, temperature=temperature)[1],)

    logprobs_N, *others = model.over_targets(token_ids_RT, loss_mask_RT, read, read_all)
    return _in_rows(logprobs_N, loss_mask_RT), *others


def _scored(
    model: LanguageModel, hidden_NH: Tensor, tokens_N: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """What each token was drawn from, as log pi [N, V], and log pi of the token itself."""
    logits_NV = model.logits(hidden_NH)
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    return logprobs_NV, logprobs_NV.gather(1, tokens_N[:, None])[:, 0]


def _in_rows(values_N: Tensor, loss_mask_RT: Tensor) -> Tensor:
    zeros_RT = torch.zeros(loss_mask_RT.shape, dtype=values_N.dtype, device=values_N.device)
    return zeros_RT.masked_scatter(to_device(loss_mask_RT, values_N.device), values_N)
