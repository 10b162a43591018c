"""Adapters: what they change, what they leave alone, and what a saved model is without them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    Dots1Config,
    Dots1ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy import lora
from ragen_apo.policy.critic import Critic
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters, freeze_all_but_adapters, trained_tensors
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.seeding import generator
from ragen_apo.training.checkpoint import load_trained_tensors
from tests.factories import TINY_ARCHITECTURE
from tests.generating import respond

CPU = torch.device("cpu")
QWEN_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
IDS = torch.arange(8, 40)[None]


def adapted(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings):
    model = load_language_model(folder, device=CPU, dtype=dtype)
    add_adapters(model.model, LoraConfig(rank=4, alpha=8, **settings), seed=seed)
    return model


def trained(model: LanguageModel) -> LanguageModel:
    """As if adapters had been trained: none of them is zero any more."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in trained_tensors(model.model).values():
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=draws))
    return model


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.hidden_states(IDS)[0])


def test_new_adapters_change_nothing_and_nothing_else_is_trained(qwen_folder: Path) -> None:
    plain = load_language_model(qwen_folder, device=CPU)
    model = adapted(qwen_folder)
    assert torch.equal(logits(model), logits(plain))
    assert model.fingerprint() == plain.fingerprint()
    names = [name for name, p in model.model.named_parameters() if p.requires_grad]
    assert names == list(trained_tensors(model.model))
    # Two layers of seven linear ones each, and two matrices an adapter.
    assert len(names) == 2 * 7 * 2
    assert all(".lora_" in name for name in names)


def test_adapters_are_a_function_of_the_seed(qwen_folder: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        return next(iter(trained_tensors(adapted(qwen_folder, seed=seed).model).values()))

    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = first(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(6)
    assert torch.equal(first(1), one)
    assert not torch.equal(first(2), one)


def test_only_the_named_layers_get_adapters(qwen_folder: Path) -> None:
    model = adapted(qwen_folder, target_modules=["q_proj", "v_proj"])
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained_tensors(model.model)}
    assert layers == {"q_proj", "v_proj"}


@pytest.mark.parametrize("name", ["qproj", "lm_head", "embed_tokens"])
def test_an_unknown_layer_is_refused_with_the_names_there_are(qwen_folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"no linear layer named {name}; expected") as caught:
        adapted(qwen_folder, target_modules=["q_proj", name])
    assert all(layer in str(caught.value) for layer in QWEN_LAYERS)


SIZES = {**TINY_ARCHITECTURE, "vocab_size": 300}


def qwen_moe() -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES))


@pytest.mark.parametrize(
    ("build", "share"),
    [
        # A layer: attention 2 x 32 x 32 + 2 x 16 x 32 = 3072, experts 8 x 3 x 32 x 32 = 24576.
        (qwen_moe, "11%"),
        # The same attention, and experts of twice the width: 49152.
        (mixtral, "6%"),
    ],
)
def test_all_linear_layers_are_refused_where_experts_are_none_of_them(
    build: Callable[[], PreTrainedModel], share: str
) -> None:
    with pytest.raises(ConfigError, match=f"{share} of its weights would be adapted") as caught:
        add_adapters(build(), LoraConfig(), seed=0)
    assert "[k_proj, o_proj, q_proj, v_proj]" in str(caught.value)
    model = build()
    add_adapters(model, LoraConfig(target_modules=["q_proj", "v_proj"]), seed=0)
    assert trained_tensors(model)


def test_linear_layers_that_have_numbers_for_names_are_refused_with_those_that_have_others() -> (
    None
):
    """In CTRL's layers two of them stand in a sequence. The layers have numbers, too."""
    sizes = {"n_embd": 32, "dff": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = CTRLLMHeadModel(CTRLConfig(vocab_size=300, **sizes))
    with pytest.raises(ConfigError, match="named 0, 2, .* some of Wk, Wq, Wv, dense"):
        add_adapters(model, LoraConfig(), seed=0)


@pytest.mark.filterwarnings("ignore:The following (alpha|rank)_pattern keys")
@pytest.mark.parametrize("names", [["gate_proj"], ["gate_proj", "up_proj", "down_proj", "o_proj"]])
def test_layers_beside_the_experts_that_peft_takes_for_these_are_refused(names: list[str]) -> None:
    """Dots 1 has a dense layer and shared experts. Adapters of its experts could not be merged."""
    sizes = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}

    def add(names: list[str]) -> PreTrainedModel:
        model = Dots1ForCausalLM(Dots1Config(**SIZES, **sizes, **groups, head_dim=8))
        add_adapters(model, LoraConfig(target_modules=names), seed=0)
        return model

    with pytest.raises(ConfigError, match=r"the experts of Dots1ForCausalLM.* leave out gate_proj"):
        add(names)
    assert len(trained_tensors(add(["q_proj", "o_proj"]))) == 2 * 2 * 2


def test_without_peft_the_message_says_how_to_install_it(
    qwen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install peft"):
        adapted(qwen_folder)


def test_adapters_are_float32_over_rounded_weights(qwen_folder: Path) -> None:
    model = adapted(qwen_folder, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in trained_tensors(model.model).values()} == {torch.float32}
    assert model.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert torch.isfinite(logits(trained(model))).all()


def test_generation_and_scoring_see_the_adapters(qwen_folder: Path) -> None:
    model = trained(adapted(qwen_folder))
    engine = GenerationEngine(model, num_rows=1, capacity=80)
    response = respond(
        engine, [engine.open_row(generator(0))], [[10, 11, 12]], max_new_tokens=20, temperature=1.0
    )[0]
    token_ids = torch.tensor([[10, 11, 12, *response.token_ids]])
    mask = torch.arange(token_ids.shape[1])[None] >= 3
    sampled = torch.tensor(response.logprobs)
    scored, base = (
        score_tokens(each, token_ids, mask).logprobs_BT[mask]
        for each in (model, model.without_adapters())
    )
    torch.testing.assert_close(scored, sampled, atol=1e-5, rtol=0)
    assert (base - sampled).abs().max() > 0.1


def test_switched_off_adapters_leave_the_model_they_were_added_to(qwen_folder: Path) -> None:
    plain = load_language_model(qwen_folder, device=CPU)
    model = trained(adapted(qwen_folder))
    reference = model.without_adapters()
    before = logits(model)
    assert torch.equal(logits(reference), logits(plain))
    assert reference.fingerprint() == plain.fingerprint() != model.fingerprint()
    assert torch.equal(logits(model), before), "they act again"
    model.hidden_states(IDS).sum().backward()
    gradients = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
    assert list(gradients) == list(trained_tensors(model.model))


@pytest.mark.slow
def test_a_saved_model_has_plain_weights_that_are_the_sum(
    any_model: LanguageModel, tmp_path: Path
) -> None:
    any_model.save(tmp_path / "base")
    model = trained(adapted(tmp_path / "base"))
    model.save(tmp_path / "sum")
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "sum", output_loading_info=True)
    assert not any(info.values())
    with torch.inference_mode():
        torch.testing.assert_close(plain(IDS).logits[0], logits(model), atol=1e-4, rtol=1e-4)
    assert (logits(any_model) - logits(model)).abs().max() > 0.1
    loaded = load_language_model(tmp_path / "sum", device=CPU)
    assert loaded.fingerprint() == model.fingerprint()
    untouched = plain.get_input_embeddings().weight
    assert torch.equal(untouched, any_model.model.get_input_embeddings().weight)


def test_what_is_trained_goes_into_a_checkpoint_and_comes_back(qwen_folder: Path) -> None:
    model, other = trained(adapted(qwen_folder)), adapted(qwen_folder, seed=3)
    load_trained_tensors(other.model, trained_tensors(model.model))
    assert torch.equal(logits(other), logits(model))


def test_without_adapters_everything_is_trained_and_tied_weights_are_kept_once(
    qwen_folder: Path,
) -> None:
    model = load_language_model(qwen_folder, device=CPU).model
    freeze_all_but_adapters(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert set(trained_tensors(model)) == set(dict(model.named_parameters()))


def test_a_critic_has_adapters_of_its_own(qwen_folder: Path) -> None:
    model = adapted(qwen_folder)
    critic = Critic(model)
    names = set(trained_tensors(critic))
    assert names == {name for name, p in critic.named_parameters() if p.requires_grad}
    assert {name for name in names if ".lora_" not in name} == {"head.weight", "head.bias"}
    assert len(names) == 2 * 7 * 2 + 2
    own = {p.data_ptr() for p in critic.parameters()}
    assert not own & {p.data_ptr() for p in model.model.parameters()}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("with_adapters", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients_from_recomputed_layers(
    qwen_folder: Path, autocast: torch.dtype | None, with_adapters: bool
) -> None:
    gradients, num_calls = [], []
    for recompute in (False, True):
        model = load_language_model(
            qwen_folder, device=CPU, autocast=autocast, gradient_checkpointing=recompute
        )
        if with_adapters:
            add_adapters(model.model, LoraConfig(), seed=0)
            trained(model)
        calls: list[None] = []
        body: nn.Module = model.model.base_model
        mlp = body.get_submodule("layers.1.mlp")
        mlp.register_forward_pre_hook(lambda *_, c=calls: c.append(None))
        model.logits(model.hidden_states(IDS, use_cache=False)[0]).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.model.parameters() if p.grad is not None])
        num_calls.append(len(calls))
        assert not model.model.training
        with torch.no_grad():
            model.hidden_states(IDS)
        assert len(calls) == num_calls[-1] + 1, "without gradients nothing is computed twice"
    assert num_calls == [1, 2]
    assert len(gradients[0]) == len(gradients[1]) > 0
    for one, two in zip(*gradients, strict=True):
        assert one is not None and one.any() and torch.equal(one, two)
