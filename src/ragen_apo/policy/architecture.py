"""What the configuration of a model tells about it, before its weights are loaded.

`check_architecture` consumes a model's configuration and the longest context. It refuses models for
which the generation engine, the scorer and transformers would compute different things. Examples
are layers that do not see all of the context, and positions that depend on the rest of a pass. It
also refuses quantised weights: saved and loaded again, they would be others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ragen_apo.errors import ConfigError, ModelError
from ragen_apo.policy.passes import longest_within, padded_length

_SEES_ALL = "full_attention"
_SEES_A_WINDOW = "sliding_attention"
_OTHER_MODEL = (
    "Or use a model whose layers all read the whole context (full attention only), with positions "
    "that do not depend on the rest of it, such as Qwen2.5 or Llama"
)


def check_architecture(
    config: Any, path: str | Path, *, max_context_tokens: int | None = None
) -> None:
    """Refuses a model that this package would compute wrongly in contexts of this length.

    None stands for contexts as long as the model's positions go. Raises ConfigError where a shorter
    `agent.max_context_tokens` would do, ModelError for everything else.
    """
    if getattr(config, "text_config", None) is not None:
        raise ModelError(
            f"'{path}' ({config.model_type}) has several parts, for text and for images or sound, "
            "and only models of text are supported. Take one, such as Qwen2.5-1.5B-Instruct, or "
            "save the part that reads text (text_config) as a model of its own, with the tokenizer"
        )
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ModelError(
            f"'{path}' has quantised weights (quantization_config in its config.json: {method}), "
            "which are neither trained nor saved rightly here; expected weights in bfloat16, "
            "float16 or float32. Take the model that it was made from, which mostly has the same "
            "name without an ending such as -FP8, -GPTQ or -AWQ"
        )
    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) else None
    num_tokens = max_context_tokens or longest or math.inf
    padded = padded_length(max_context_tokens) if max_context_tokens else num_tokens
    limits = [(num_tokens, limit, limit, reason) for reason, limit in _attention_limits(config)]
    limits += [
        (padded, limit, longest_within(limit), reason) for reason, limit in _rotary_limits(config)
    ]
    for length, limit, advised, reason in limits:
        if length <= limit:
            continue
        if limit == 0:
            raise ModelError(f"'{path}' {reason}, which is not supported. {_OTHER_MODEL}")
        if max_context_tokens is None:
            raise ModelError(
                f"'{path}' {reason}; only contexts of up to {limit} tokens are computed rightly. "
                f"Set agent.max_context_tokens to {limit}. {_OTHER_MODEL}"
            )
        raise ConfigError(
            f"agent.max_context_tokens is {max_context_tokens}, and '{path}' {reason}"
            f"{_padding(max_context_tokens, length)}. Lower it to {advised}. {_OTHER_MODEL}"
        )
    if max_context_tokens is None or longest is None:
        return
    is_rotary = isinstance(getattr(config, "rope_parameters", None), Mapping)
    needed = max_context_tokens if is_rotary else padded  # others have an embedding a position
    if needed > longest:
        raise ConfigError(
            f"agent.max_context_tokens is {max_context_tokens}, and '{path}' was made for at most "
            f"{longest} tokens (max_position_embeddings){_padding(max_context_tokens, needed)}; "
            f"lower it to {longest if is_rotary else longest_within(longest)}, or take another "
            "model"
        )


def _padding(max_context_tokens: int, length: float) -> str:
    return "" if length == max_context_tokens else f" (training pads such contexts to {length})"


def _attention_limits(config: Any) -> Iterator[tuple[str, int]]:
    """Why long contexts would be computed wrongly, and from which length in tokens.

    A window that no context leaves hides nothing.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or [])
    if not layer_types:
        layer_types = {_SEES_ALL if window is None else _SEES_A_WINDOW}
    if others := sorted(layer_types - {_SEES_ALL, _SEES_A_WINDOW}):
        yield f"has layers of type {others}", 0
    if _SEES_A_WINDOW in layer_types:
        size = window if isinstance(window, int) else 0
        yield f"has layers ({_SEES_A_WINDOW}) that see the last {size} tokens only", size


def _rotary_limits(config: Any) -> Iterator[tuple[str, int]]:
    """The same of rotary positions whose frequencies change with the longest position of a pass.

    A pass has rows of any length, and generation reads an early token in another pass than scoring.
    So the token would be rotated in one way when it is sampled and in another way when it is
    scored.
    """
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return
    nested = [each for each in given.values() if isinstance(each, Mapping)]
    for parameters in nested or [given]:
        kind = str(parameters.get("rope_type", parameters.get("type", "")))
        if kind == "longrope":
            limit = parameters.get("original_max_position_embeddings")
        elif "dynamic" in kind:
            limit = getattr(config, "max_position_embeddings", None)
        else:
            continue
        limit = limit if isinstance(limit, int) else 0
        yield (
            f"has rotary positions of type {kind}, whose frequencies change for all tokens of a "
            f"pass once one of them is beyond position {limit}",
            limit,
        )
