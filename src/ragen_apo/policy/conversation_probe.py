"""A short conversation that a model has when it is loaded: is it computed the same everywhere?

Two rows of different length play two turns in the model's own chat template. The generation engine
samples them. Then the scorer scores whole rows, as training does, and then transformers computes
them alone. All three use the number format in which the model will run. A probe of three tokens
cannot see what shows here: positions, caches, masks, turns that continue a context, and rows beside
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.errors import ModelError
from ragen_apo.policy.attention import ATTENTION
from ragen_apo.policy.chat_template import Tools, read_chat_template
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.model_checks import refusing_failures
from ragen_apo.policy.scoring import token_logprobs
from ragen_apo.seeding import generator

SAID = ("Red or blue?", "And now?")
"""What the user says, turn by turn; few words, as a model may be large and a processor slow."""
NUM_TURNS = len(SAID)
TOKENS_A_TURN = 2
TOKENS_A_TURN_ON_GPU = 3
"""The third comes from a recorded pass (`RecordedPasses`)."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float64: 1e-3}
"""The largest mean difference of a log-probability in nats, by the format of the products.

Those of SmolLM2-135M are 5e-6 in float32, 0.04 with mixed precision and 0.10 with bfloat16 weights;
a wrong architecture's are several nats.
"""
TF32_TOLERANCE = 0.02
"""With products in TF32 (machine.tf32): rounding their factors so on a CPU moves those of
SmolLM2-135M by 0.0022."""


@dataclass(frozen=True)
class Agreement:
    """Mean differences of the log-probabilities of the sampled tokens, in nats."""

    engine_to_scoring: float
    scoring_to_transformers: float


@dataclass
class _Row:
    """One conversation: all its tokens, and which were sampled with which log-probability."""

    token_ids: list[int]
    sampled: dict[int, float]
    """By position."""


def probe_conversation(model: LanguageModel, *, tools: Tools = ()) -> None:
    """Raises ModelError if sampling, training and transformers disagree about a conversation.

    It shows these tools, as an episode does.
    """
    on_gpu = model.device.type == "cuda"
    num_tokens = TOKENS_A_TURN_ON_GPU if on_gpu else TOKENS_A_TURN
    with refusing_failures(model.model):
        found = measure_agreement(model, tokens_a_turn=num_tokens, tools=tools)
    tolerance = TOLERANCES[model.compute_dtype]
    if on_gpu and torch.backends.cuda.matmul.allow_tf32:
        tolerance = max(tolerance, TF32_TOLERANCE)
    pairs = {
        "sampling and training here": found.engine_to_scoring,
        "training here and transformers": found.scoring_to_transformers,
    }
    for pair, difference in pairs.items():
        if not difference <= tolerance:
            raise ModelError(
                f"{pair} compute different log-probabilities with this "
                f"{type(model.model).__name__}: {difference:.3g} nats apart on average in a "
                f"conversation of two turns, expected at most {tolerance:g}. Its architecture is "
                "not supported; use another one, such as Qwen or Llama (docs/models.md)"
            )


@torch.no_grad()
def measure_agreement(
    model: LanguageModel, *, tokens_a_turn: int = TOKENS_A_TURN, tools: Tools = ()
) -> Agreement:
    """Plays, scores and computes again; changes nothing of the model."""
    with model.constant_weights():
        rows = _play(model, _prompts(model, tools), tokens_a_turn=tokens_a_turn)
        scored, plain = _score(model, rows), _compute_plainly(model, rows)
    sampled = torch.tensor([logprob for row in rows for logprob in row.sampled.values()])
    return Agreement(
        engine_to_scoring=float((sampled - scored).abs().mean()),
        scoring_to_transformers=float((scored - plain).abs().mean()),
    )


def _play(
    model: LanguageModel, prompts: Sequence[Sequence[Sequence[int]]], *, tokens_a_turn: int
) -> list[_Row]:
    """The rows side by side, each turn continuing its context."""
    longest = max(sum(len(prompt) + tokens_a_turn for prompt in turns) for turns in prompts)
    engine = GenerationEngine(model, num_rows=len(prompts), capacity=longest)
    rows = [_Row([], {}) for _ in prompts]
    with engine.rollout():
        opened = {engine.open_row(generator(index, "probe")): index for index in range(len(rows))}
        for turn in range(NUM_TURNS):
            for slot, index in opened.items():
                rows[index].token_ids += prompts[index][turn]
                engine.submit(slot, prompts[index][turn], max_new_tokens=tokens_a_turn)
            num_writing = len(opened)
            while num_writing:
                for slot, response in engine.step(temperature=1.0):
                    row = rows[opened[slot]]
                    row.sampled |= dict(enumerate(response.logprobs, len(row.token_ids)))
                    row.token_ids += response.token_ids
                    num_writing -= 1
    return rows


def _prompts(model: LanguageModel, tools: Tools) -> list[list[list[int]]]:
    """The tokens of each row, turn by turn: a conversation, and a shorter one without its start."""
    template = read_chat_template(model.tokenizer, tools=tools)
    first = template.render([{"role": "user", "content": SAID[0]}])
    following = [template.between_responses(said) for said in SAID]
    texts = [[first, following[1]], following]
    return [
        [model.tokenizer.encode(text, add_special_tokens=False) for text in turns]
        for turns in texts
    ]


def _score(model: LanguageModel, rows: Sequence[_Row]) -> Tensor:
    """As training does: all rows in one pass, padded on the right."""
    length = max(len(row.token_ids) for row in rows)
    token_ids_RT = torch.full((len(rows), length), model.pad_id)
    mask_RT = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        token_ids_RT[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        mask_RT[index, list(row.sampled)] = True
    device = model.device
    logprobs_RT = token_logprobs(model, token_ids_RT.to(device), mask_RT.to(device)).cpu()
    return logprobs_RT[mask_RT]


def _compute_plainly(model: LanguageModel, rows: Sequence[_Row]) -> Tensor:
    """As transformers does with its own attention: each row alone, the whole model at once."""
    found: list[Tensor] = []
    device, autocast = model.device, model.autocast
    model.model.set_attn_implementation("sdpa")
    try:
        for row in rows:
            token_ids_1T = torch.tensor([row.token_ids], device=device)
            positions = torch.tensor(list(row.sampled), device=device)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits_TV = model.model(input_ids=token_ids_1T, use_cache=False).logits[0]
            logprobs_NV = torch.log_softmax(logits_TV[positions - 1].float(), dim=-1)
            found.append(logprobs_NV.gather(1, token_ids_1T[0, positions][:, None])[:, 0].cpu())
    finally:
        model.model.set_attn_implementation(ATTENTION)
    return torch.cat(found)
