"""Whether a server and this process say the same about the same tokens.

    server samples a short conversation -> its log-probabilities against those of `token_logprobs`

Rounding in another number format moves single log-probabilities by tenths of a nat, other weights,
another temperature or other rotary positions move all of them. So the mean decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragen_apo.plural import counted
from ragen_apo.policy.inference_server.vllm import VllmServer, Wanted, read_completion
from ragen_apo.policy.inference_server.wire import RequestError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import token_logprobs

MAX_MEAN_GAP = 0.1
"""In nats; a larger mean is not rounding, in bfloat16 either (docs/metrics.md)."""
_MESSAGES = (
    "You are in a shop. What would you like to buy?",
    "There are ten of them, from 3 to 80 dollars. Which one?",
)
_TOKENS_PER_RESPONSE = 24


@dataclass(frozen=True)
class Agreement:
    """Differences between two log-probabilities of the same sampled tokens, in nats."""

    mean_gap: float
    max_gap: float
    mean_gap_unscaled: float
    """As if the server had reported them at temperature 1."""
    num_tokens: int

    def problem(self, temperature: float) -> str | None:
        """What is wrong, in words, if anything is."""
        if self.mean_gap <= MAX_MEAN_GAP:
            return None
        differs = (
            f"its log-probabilities of {counted(self.num_tokens, 'token')} that it sampled at "
            f"temperature {temperature:g} differ from the policy's by {self.mean_gap:.3g} nats "
            f"on average and {self.max_gap:.3g} at most, and {MAX_MEAN_GAP:g} on average is "
            "the limit"
        )
        if self.mean_gap_unscaled <= MAX_MEAN_GAP:
            return (
                f"{differs}; those of temperature 1 agree, so it reports log-probabilities before "
                "the temperature: start it with --logprobs-mode processed_logprobs"
            )
        return (
            f"{differs}; it computes another model: its folder has another configuration (rotary "
            "base, scaling), it quantises, or its weights were not replaced"
        )


def measure_agreement(
    server: VllmServer, model: LanguageModel, *, served_name: str, salt: str, temperature: float
) -> Agreement:
    """Has the server take part in a short conversation, and scores what it sampled.

    Raises RequestError.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    reported: list[float] = []
    for message in _MESSAGES:
        said = model.tokenizer.encode(message, add_special_tokens=False)
        token_ids, mask = [*token_ids, *said], [*mask, *[False] * len(said)]
        wanted = Wanted(
            model=served_name,
            context=tuple(token_ids),
            max_new_tokens=_TOKENS_PER_RESPONSE,
            temperature=temperature,
            rule=None,
            salt=salt,
        )
        size = model.vocabulary_size
        answer = server.completion(wanted).send()
        response = read_completion(answer, wanted, vocabulary_size=size)
        token_ids += response.token_ids
        mask += [True] * len(response.token_ids)
        reported += response.logprobs
    scored = _scored(model, token_ids, mask, temperature=temperature)
    gap_N = (scored - torch.tensor(reported)).abs()
    unscaled_N = (_scored(model, token_ids, mask, temperature=1.0) - torch.tensor(reported)).abs()
    return Agreement(
        mean_gap=gap_N.mean().item(),
        max_gap=gap_N.max().item(),
        mean_gap_unscaled=unscaled_N.mean().item(),
        num_tokens=len(reported),
    )


def require_agreement(
    server: VllmServer, model: LanguageModel, *, served_name: str, salt: str, temperature: float
) -> None:
    """Raises RequestError where the server computes something else than the policy."""
    found = measure_agreement(
        server, model, served_name=served_name, salt=salt, temperature=temperature
    )
    if problem := found.problem(temperature):
        raise RequestError(problem, advice="Start the server again as docs/server.md says")


@torch.no_grad()
def _scored(
    model: LanguageModel, token_ids: list[int], mask: list[bool], *, temperature: float
) -> torch.Tensor:
    """The policy's log-probabilities [N] of the sampled tokens."""
    token_ids_1T = torch.tensor([token_ids], device=model.device)
    mask_1T = torch.tensor([mask], device=model.device)
    logprobs_1T = token_logprobs(model, token_ids_1T, mask_1T, temperature=temperature)
    return logprobs_1T[mask_1T].float().cpu()
