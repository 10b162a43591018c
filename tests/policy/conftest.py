"""Small models of several architectures, untrained but with decided opinions."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen_apo.policy.language_model import LanguageModel, load_language_model
from tests.factories import TINY_ARCHITECTURE
from tests.pretrained import SMOLLM2
from tests.sweeps import quick_first

SIZES = {**TINY_ARCHITECTURE, "initializer_range": 0.3}
CAPACITY = 128

BUILDERS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": lambda size: LlamaForCausalLM(LlamaConfig(vocab_size=size, **SIZES)),
    "qwen2": lambda size: Qwen2ForCausalLM(Qwen2Config(vocab_size=size, **SIZES)),
    "qwen3": lambda size: Qwen3ForCausalLM(Qwen3Config(vocab_size=size, **SIZES, head_dim=8)),
    "mistral": lambda size: MistralForCausalLM(
        MistralConfig(vocab_size=size, **SIZES, sliding_window=None)
    ),
    # A table of learned positions, exactly as long as the cache of the tests.
    "gpt2": lambda size: GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=CAPACITY)
    ),
}


def build(architecture: str, tokenizer) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BUILDERS[architecture](len(tokenizer))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return LanguageModel(model.eval(), tokenizer)


@pytest.fixture(scope="session", params=quick_first(BUILDERS))
def any_model(request: pytest.FixtureRequest, shop_tokenizer) -> LanguageModel:
    """One model of each architecture; all but GPT-2 share keys and values between heads."""
    return build(request.param, shop_tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    """The real pretrained model in float32; for tests with `needs_smollm2`."""
    return load_language_model(SMOLLM2, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def llama(shop_tokenizer) -> LanguageModel:
    return build("llama", shop_tokenizer)
