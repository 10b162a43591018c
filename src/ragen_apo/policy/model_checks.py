"""Checks that sampling and training here compute the same as the model in transformers.

Every check raises ModelError with the reason and a way out. `probe_model` compares in the format of
the weights. With autocast, rounding alone would cause larger differences than those that it looks
for, above all in models with large logits.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragen_apo.errors import ModelError, RagenApoError
from ragen_apo.policy.attention import PromptSlice
from ragen_apo.policy.chat_template import CONVERSATION, ChatTemplate
from ragen_apo.policy.passes import body_output

PROBE = (0, 1, 2)
LARGE_LOGIT = 100.0
"""The probe's logits are scaled to this maximum: soft-capping hardly changes small ones."""
TOLERANCE = 0.01
"""Relative to the largest entry; both sides are computed in one format, so they hardly differ."""
_TABLES = re.compile(r"rotary_emb\.|inv_freq$|(attn|attention)\.(masked_)?bias$")
"""Tensors in older files that are no weights: rotary frequencies and causal masks."""


def refuse_foreign_weights(
    path: str | Path, model: PreTrainedModel, loading: Mapping[str, Any]
) -> None:
    """Refuses weights that are not those of the model, as transformers' report `loading` says.

    It replaces missing ones by random numbers, and leaves out those that config.json has no place
    for. Of the latter, heads and towers beside the model are no loss; a warning names them.
    """
    missing, unused = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    problems = [f"{name} is missing" for name in missing]
    problems += [
        f"{name} has shape {tuple(found)}, expected {tuple(expected)}"
        for name, found, expected in sorted(loading["mismatched_keys"])
    ]
    others = f"Tensors that it does not use: {len(unused)}, such as {unused[0]}" if unused else ""
    if problems:
        raise ModelError(
            f"the weights in '{path}' are not those of its config.json: {'; '.join(problems[:2])} "
            f"({len(problems)} such tensors in all, which would be random numbers)."
            f"{others and f' {others}.'} Copy the folder again, or write it with save_pretrained"
        )
    parts = {name for part in (model, model.base_model) for name, _ in part.named_children()}
    lost = [
        name
        for name in unused
        if name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in parts
        and not _TABLES.search(name)
    ]
    if lost:
        raise ModelError(
            f"the weights in '{path}' are not those of its config.json, which has no place for "
            f"{', '.join(lost[:3])} ({len(lost)} such tensors in all, which would be left out). "
            "Take the config.json that belongs to them (its num_hidden_layers, attention_bias and "
            "the like), or remove these tensors if the model was made to run without them"
        )
    if unused:
        warnings.warn(f"'{path}': {others}", stacklevel=2)


def check_embeddings(
    path: str | Path, template: ChatTemplate, *, end_ids: Sequence[int], num_tokens: int
) -> None:
    """Refuses a tokenizer with tokens that the model has no embedding for.

    Of the tokens that were added to a vocabulary, only those of conversations matter. Gemma 3, for
    example, has a token for images. Its text-only models have no embedding for it, but no text ever
    contains it.
    """
    tokenizer, text = template.tokenizer, template.render(CONVERSATION)
    needed = {*tokenizer.encode(text, add_special_tokens=False), *end_ids}
    needed |= set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
    if max(needed) >= num_tokens:
        token = tokenizer.convert_ids_to_tokens(max(needed))
        raise ModelError(
            f"the tokenizer of '{path}' makes token {max(needed)} ({token!r}) of texts, and the "
            f"model has embeddings for 0 to {num_tokens - 1}; take the tokenizer that belongs to "
            "the model, or call model.resize_token_embeddings and save it again"
        )


def probe_model(model: PreTrainedModel) -> None:
    """Refuses a model that this package would compute differently from transformers.

    Call it in inference mode. The model's attention is `attend` already.
    """
    with refusing_failures(model):
        _refuse_changed_logits(model)
        _refuse_lost_slices(model)


@contextlib.contextmanager
def refusing_failures(model: PreTrainedModel) -> Iterator[None]:
    """Turns what a model raises when it is called as this package does into a ModelError."""
    try:
        yield
    except RagenApoError:
        raise
    except Exception as error:
        # Architectures differ in what they need, and fail in any way.
        raise ModelError(
            f"{type(model).__name__} cannot be computed as this package computes models "
            f"({type(error).__name__}: {error}). Use another architecture, such as Qwen or Llama."
        ) from error


def _refuse_changed_logits(model: PreTrainedModel) -> None:
    """Refuses a model whose logits are not the vocabulary projection of its hidden states."""
    name, seen = type(model).__name__, {}
    probe = torch.tensor([PROBE], device=model.device)

    def note(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        largest = logits.abs().max().clamp(min=torch.finfo(logits.dtype).tiny)
        seen["hidden"], seen["logits"] = inputs[0], logits * (LARGE_LOGIT / largest)
        return seen["logits"]

    projection = model.get_output_embeddings()
    assert projection is not None
    hook = projection.register_forward_hook(note)
    try:
        logits = model(input_ids=probe).logits
    finally:
        hook.remove()
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"the logits of this {name} are not finite numbers; its weights are damaged, or too "
            "large for their number format (machine.dtype)"
        )
    hidden = body_output(model.base_model, probe, autocast=None, gradient_checkpointing=False)
    if not seen or not (_equal(seen["hidden"], hidden) and _equal(seen["logits"], logits)):
        raise ModelError(
            f"{name} changes its logits before or after the vocabulary projection (soft-capping or "
            "scaling), which sampling and training here would leave out. Use an architecture "
            "without it, such as Qwen or Llama."
        )


def _refuse_lost_slices(model: PreTrainedModel) -> None:
    """Refuses a model that does not hand the argument `prompt_slices` on to `attend`.

    Its attention would see the whole pass: the mask that comes with the slices hides nothing.
    """
    probe = torch.tensor([PROBE], device=model.device)
    # Without autocast, so that both take the same kernel and are rounded alike.
    read = functools.partial(
        body_output, model.base_model, probe, autocast=None, gradient_checkpointing=False
    )
    of_slices = read(
        attention_mask=torch.zeros(1, 1, 1, 1, device=model.device),
        prompt_slices=[PromptSlice(slot=0, tokens=slice(0, len(PROBE)), length=len(PROBE))],
    )
    if not _equal(read(), of_slices):
        raise ModelError(
            f"{type(model).__name__} does not hand its arguments on to attention as "
            "transformers' attention interface asks for, so episodes that are read in one "
            "pass would see each other. Use another architecture, such as Qwen or Llama."
        )


def _equal(expected: Tensor, got: Tensor) -> bool:
    """Whether two results of the same shape differ by rounding at most."""
    expected, got = expected.float(), got.float()
    return bool((expected - got).abs().max() <= TOLERANCE * expected.abs().max())
