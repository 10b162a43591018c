"""Whether a server and this process say the same about the same tokens.

    server samples a short conversation -> its log-probabilities against those of `token_logprobs`

Rounding in another number format moves single log-probabilities by tenths of a nat, other weights,
another temperature or other rotary positions move all of them. So the mean decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_apo.plural import counted
from ragen_apo.policy.inference_server.vllm import VllmServer, Wanted, read_completion
from ragen_apo.policy.inference_server.wire import RequestError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import token_logprobs

MAX_MEAN_GAP = 0.1
"""In nats; a larger mean is not rounding, in bfloat16 either (docs/metrics.md)."""
MAX_SHARE_OF_1 = 0.1
"""Where the gap at temperature 1 is a smaller share than this, the server's are of temperature 1.
Rounding is alike at both, and so are the gaps."""
_MESSAGES = (
    "You are in a shop. What would you like to buy?",
    "There are ten of them, from 3 to 80 dollars. Which one?",
)
_TOKENS_PER_RESPONSE = 24


@torch.no_grad()
def require_agreement(
    server: VllmServer, model: LanguageModel, *, served_name: str, salt: str, temperature: float
) -> None:
    """Raises RequestError where the server computes something else than the policy.

    The server takes part in a short conversation, and what it sampled is scored here.
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
        answer = server.completion(wanted).send()
        response = read_completion(answer, wanted, vocabulary_size=model.vocabulary_size)
        token_ids += response.token_ids
        mask += [True] * len(response.token_ids)
        reported += response.logprobs
    token_ids_1T = torch.tensor([token_ids], device=model.device)
    mask_1T = torch.tensor([mask], device=model.device)

    def gaps(at_temperature: float) -> Tensor:
        logprobs_1T = token_logprobs(model, token_ids_1T, mask_1T, temperature=at_temperature)
        return (logprobs_1T[mask_1T].float().cpu() - torch.tensor(reported)).abs()

    gap_N = gaps(temperature)
    gap_of_1 = (gap_N if temperature == 1 else gaps(1.0)).mean()
    # Those of a flat distribution hardly depend on the temperature: the nearer one tells.
    is_of_1 = temperature != 1 and gap_of_1 < MAX_SHARE_OF_1 * gap_N.mean()
    if gap_N.mean() <= MAX_MEAN_GAP and not is_of_1:
        return
    if gap_of_1 <= MAX_MEAN_GAP:
        cause = (
            "those of temperature 1 agree, so it reports log-probabilities before the "
            "temperature: start it with --logprobs-mode processed_logprobs"
        )
    else:
        cause = (
            "it computes another model: its folder has another configuration (rotary base, "
            "scaling), it quantises, or its weights were not replaced"
        )
    is_above = gap_N.mean() > MAX_MEAN_GAP
    limit = f", and {MAX_MEAN_GAP:g} on average is the limit" if is_above else ""
    raise RequestError(
        f"its log-probabilities of {counted(len(reported), 'token')} that it sampled at "
        f"temperature {temperature:g} differ from the policy's by {gap_N.mean():.3g} nats on "
        f"average and {gap_N.max():.3g} at most{limit}; {cause}",
        advice="Start the server again as docs/server.md says",
        is_final=True,
    )
