"""From logits to tokens: one token a row by the row's own draw, until its response is over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ragen_apo.errors import ModelError
from ragen_apo.policy.engine import Response
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import on_device
from ragen_apo.policy.tokenizer import CLOSE_ANSWER, text_of

_TAIL_TOKENS = 12
"""The number of last tokens that are searched for a closing tag of several tokens."""


class StopRule:
    """A response is over at an end token, or when its text ends with the closing tag.

    Without `stops_at_answer` the tag is text as any other: a call of a tool ends with its turn.
    """

    def __init__(self, model: LanguageModel, *, stops_at_answer: bool = True) -> None:
        self._tokenizer = model.tokenizer
        self.end_ids = set(model.end_ids)
        self._may_close: set[int] = set()
        tag_ids = model.tokenizer.encode(CLOSE_ANSWER, add_special_tokens=False)
        if stops_at_answer and len(tag_ids) == 1:
            self.end_ids.add(tag_ids[0])
        elif stops_at_answer:
            vocabulary = model.tokenizer.get_vocab()
            self._may_close = {index for text, index in vocabulary.items() if ">" in text}

    @property
    def reads_text(self) -> bool:
        """Whether the closing tag is several tokens, so that text decides as well."""
        return bool(self._may_close)

    def is_over(self, token_ids: Sequence[int]) -> bool:
        """Whether the response ends with its last token."""
        if token_ids[-1] in self.end_ids:
            return True
        if token_ids[-1] not in self._may_close:
            return False
        return CLOSE_ANSWER in text_of(self._tokenizer, token_ids[-_TAIL_TOKENS:])


class Sampling:
    """The response of one row while it is being sampled."""

    def __init__(self, draws: np.ndarray) -> None:
        self.draws = draws.tolist()
        """One uniform number for each token that the response may have."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def append(self, token: int, logprob: float, *, rule: StopRule) -> Response | None:
        """Adds a token and returns the response if it is over."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        stopped = rule.is_over(self.token_ids)
        if stopped or len(self.token_ids) == len(self.draws):
            return Response(tuple(self.token_ids), tuple(self.logprobs), stopped)
        return None


def sample(
    logits_RV: Tensor, draws: Sequence[float], *, temperature: float
) -> tuple[list[int], list[float]]:
    """One token a row with its log-probability, by the row's uniform draw.

    The host waits for a GPU once, for all rows: their tokens say which responses are over, and what
    comes next for these is up to their environments.
    """
    logprobs_RV = torch.log_softmax(logits_RV / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        if torch.are_deterministic_algorithms_enabled():
            logprobs_RV = logprobs_RV.cpu()  # a GPU has no deterministic cumulative sum
        uniform_R = on_device(draws, logprobs_RV.device, dtype=torch.float64)
        tokens_R = inverse_cdf(logprobs_RV, uniform_R)
    logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    tokens, logprobs = torch.stack([tokens_R.double(), logprobs_R.double()]).tolist()
    if not all(map(math.isfinite, logprobs)):
        raise ModelError(
            "the model's logits are not finite, so no token can be sampled; its weights have "
            "diverged. Go back to an earlier checkpoint with a lower learning rate"
        )
    return [int(token) for token in tokens], logprobs


def inverse_cdf(logprobs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token [R] whose interval of the cumulative distribution holds the uniform draw in [0, 1).

    The sum is in float64, and the draw is scaled by the total and kept below it, so that rounding
    never selects a token of probability zero. NaN gives the last token.
    """
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    total_R = cumulative_RV[:, -1]
    below_R = torch.nextafter(total_R, torch.zeros_like(total_R))
    target_R1 = torch.minimum(uniform_R * total_R, below_R)[:, None]
    found_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0]
    return found_R.clamp(max=logprobs_RV.shape[1] - 1)
