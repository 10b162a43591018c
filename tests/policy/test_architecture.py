"""What a model's configuration tells: contexts that would be computed wrongly are refused."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Starcoder2Config,
)

from ragen_apo.errors import ConfigError, ModelError
from ragen_apo.policy.architecture import check_architecture
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.seeding import generator
from tests.factories import TINY_ARCHITECTURE
from tests.generating import respond
from tests.sweeps import quick_first

LENGTH = 48
"""Of every context that is computed here."""
SIZES: dict[str, Any] = {
    **TINY_ARCHITECTURE,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROTATION = {"rope_theta": 10_000.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def phi3(**changes: Any) -> PretrainedConfig:
    return Phi3Config(**{**SIZES, "sliding_window": None, **changes})


def longrope(**changes: Any) -> PretrainedConfig:
    parameters = {**LONGROPE, **ROTATION}
    return phi3(rope_parameters=parameters, original_max_position_embeddings=16, **changes)


def dynamic(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(
        **{**SIZES, "max_position_embeddings": 16, "rope_parameters": DYNAMIC, **changes}
    )


def windowed(window: int, **changes: Any) -> dict[str, PretrainedConfig]:
    """Architectures whose layers, some or all, see a window."""
    sizes = {**SIZES, "sliding_window": window, **changes}
    return {
        "phi3": Phi3Config(**sizes),
        "mistral": MistralConfig(**sizes),
        "starcoder2": Starcoder2Config(**sizes),
        "gemma3": Gemma3TextConfig(**sizes, head_dim=8),
        "qwen2": Qwen2Config(**sizes, use_sliding_window=True, max_window_layers=1),
    }


WINDOWED = list(windowed(LENGTH))


def build(config: PretrainedConfig, tokenizer: Any) -> LanguageModel:
    config.vocab_size = len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(AutoModelForCausalLM.from_config(config).eval(), tokenizer)


@torch.no_grad()
def logprobs(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Of the tokens sampled in two turns beside another row: by engine, scorer, transformers."""
    engine = GenerationEngine(model, num_rows=2, capacity=LENGTH)
    rows = [engine.open_row(generator(index)) for index in range(2)]
    token_ids: list[int] = []
    sampled: list[int] = []
    found: list[float] = []
    for prompts in ([[9, 10, 11], list(range(9, 19))], [list(range(20, 36)), [12, 13]]):
        (response, _) = respond(engine, rows, prompts, max_new_tokens=14, temperature=1.0)
        start = len(token_ids) + len(prompts[0])
        token_ids += [*prompts[0], *response.token_ids]
        sampled += range(start, len(token_ids))
        found += response.logprobs
    assert len(token_ids) >= LENGTH - 2
    tensor = torch.tensor([token_ids])
    mask = torch.zeros_like(tensor, dtype=torch.bool)
    mask[0, sampled] = True
    scored = score_tokens(model, tensor, mask).logprobs_BT[mask]
    plain_model = model.model
    plain_model.set_attn_implementation("eager")
    plain = torch.log_softmax(plain_model(input_ids=tensor, use_cache=False).logits[0], dim=-1)
    places = torch.tensor(sampled)
    return {
        "engine": torch.tensor(found),
        "scorer": scored,
        "transformers": plain[places - 1, tensor[0, places]],
    }


@pytest.mark.parametrize("name", quick_first(WINDOWED))
@pytest.mark.parametrize("window", quick_first([LENGTH, LENGTH + 100]))
def test_a_window_that_no_context_leaves_is_harmless(
    shop_tokenizer, name: str, window: int
) -> None:
    """Also where the context is exactly as long: transformers makes its masks itself."""
    config = windowed(window)[name]
    check_architecture(config, name, max_context_tokens=LENGTH)
    found = logprobs(build(config, shop_tokenizer))
    torch.testing.assert_close(found["engine"], found["scorer"], atol=1e-4, rtol=0)
    torch.testing.assert_close(found["transformers"], found["scorer"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", quick_first(WINDOWED))
def test_a_window_shorter_than_the_context_is_refused_with_both_numbers(
    shop_tokenizer, name: str
) -> None:
    config = windowed(16)[name]
    with pytest.raises(ConfigError, match="max_context_tokens is 48, .* the last 16 tokens"):
        check_architecture(config, name, max_context_tokens=LENGTH)
    found = logprobs(build(config, shop_tokenizer))
    assert (found["engine"] - found["transformers"]).abs().max() > 0.1, "the refusal has a reason"


def test_without_a_length_contexts_are_as_long_as_the_positions_go() -> None:
    check_architecture(MistralConfig(**SIZES, sliding_window=512), "model")
    with pytest.raises(ModelError, match="full attention only"):
        check_architecture(MistralConfig(**SIZES, sliding_window=511), "model")


def test_layers_of_other_kinds_are_refused_whatever_the_length() -> None:
    config = Qwen2Config(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match=r"layers of type \['linear_attention'\]"):
        check_architecture(config, "model", max_context_tokens=1)


@pytest.mark.parametrize(("make", "kind"), [(longrope, "longrope"), (dynamic, "dynamic")])
def test_rotary_positions_that_depend_on_the_pass_are_refused_beyond_their_limit(
    shop_tokenizer, make: Any, kind: str
) -> None:
    config = make()
    check_architecture(config, "model", max_context_tokens=16)
    with pytest.raises(ConfigError, match=f"type {kind}, .* beyond position 16. Lower it to 16"):
        check_architecture(config, "model", max_context_tokens=17)
    found = logprobs(build(config, shop_tokenizer))
    assert (found["engine"] - found["scorer"]).abs().max() > 0.1, "the refusal has a reason"


def test_within_their_limit_such_positions_are_computed_alike(shop_tokenizer) -> None:
    parameters = {**LONGROPE, **ROTATION, "original_max_position_embeddings": LENGTH}
    config = phi3(rope_parameters=parameters, original_max_position_embeddings=LENGTH)
    check_architecture(config, "model", max_context_tokens=LENGTH)
    found = logprobs(build(config, shop_tokenizer))
    torch.testing.assert_close(found["engine"], found["scorer"], atol=1e-4, rtol=0)


def test_a_model_of_text_and_images_is_refused_before_its_weights_are_read() -> None:
    text = {**SIZES, "vocab_size": 300, "head_dim": 8, "eos_token_id": 1}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision)
    with pytest.raises(ModelError, match="gemma3.* has several parts"):
        check_architecture(config, "model", max_context_tokens=LENGTH)


def test_padding_in_training_stays_within_limits_that_depend_on_the_pass() -> None:
    """Of 300 tokens it makes 304."""
    config = dynamic(max_position_embeddings=300)
    check_architecture(config, "model", max_context_tokens=288)
    with pytest.raises(ConfigError, match=r"is 290, .* to 304\)\. Lower it to 288"):
        check_architecture(config, "model", max_context_tokens=290)


def test_learned_positions_leave_room_for_padding_and_rotary_ones_need_none() -> None:
    learned = GPT2Config(n_positions=300)
    check_architecture(learned, "model", max_context_tokens=288)
    check_architecture(
        LlamaConfig(**{**SIZES, "max_position_embeddings": 300}), "model", max_context_tokens=300
    )
    with pytest.raises(
        ConfigError, match=r"is 300, .* pads such contexts to 304\); lower it to 288"
    ):
        check_architecture(learned, "model", max_context_tokens=300)


def test_positions_end_where_the_model_was_made_for() -> None:
    check_architecture(LlamaConfig(**SIZES), "model", max_context_tokens=512)
    with pytest.raises(ConfigError, match="is 513, and .* at most 512 tokens"):
        check_architecture(LlamaConfig(**SIZES), "model", max_context_tokens=513)
