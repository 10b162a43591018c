"""The conversation that a model has when it is loaded."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from ragen_apo.errors import ModelError
from ragen_apo.policy import language_model
from ragen_apo.policy.conversation_probe import TOLERANCES, measure_agreement, probe_conversation
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session
from tests.policy.test_architecture import build, longrope
from tests.pretrained import needs_smollm2
from tests.sweeps import quick_first


def test_every_supported_architecture_computes_a_conversation_alike(
    any_model: LanguageModel,
) -> None:
    found = measure_agreement(any_model)
    assert found.engine_to_scoring < 1e-4
    assert found.scoring_to_transformers < 1e-4
    probe_conversation(any_model)


@pytest.mark.parametrize("weights", quick_first([torch.float32, torch.bfloat16]))
def test_rounding_to_bfloat16_is_within_its_tolerance(
    any_model: LanguageModel, weights: torch.dtype
) -> None:
    autocast = torch.bfloat16 if weights == torch.float32 else None
    model = replace(any_model, model=copy.deepcopy(any_model.model).to(weights), autocast=autocast)
    found = measure_agreement(model)
    assert max(found.engine_to_scoring, found.scoring_to_transformers) < TOLERANCES[torch.bfloat16]
    if autocast:  # with weights in bfloat16 a processor may round all three alike
        assert max(found.engine_to_scoring, found.scoring_to_transformers) > 1e-4
    probe_conversation(model)


def test_the_probe_leaves_the_model_as_it_was(any_model: LanguageModel) -> None:
    state = torch.get_rng_state()
    before = any_model.fingerprint()
    attention = any_model.config._attn_implementation
    probe_conversation(any_model)
    assert any_model.fingerprint() == before
    assert any_model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)


def test_positions_that_depend_on_the_pass_are_found_out(shop_tokenizer) -> None:
    model = build(longrope(), shop_tokenizer)
    with pytest.raises(ModelError, match="sampling and training here compute different"):
        probe_conversation(model)


def test_an_attention_that_differs_from_transformers_is_found_out(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a layer scaled its scores by what only its own implementation is told."""
    model = LanguageModel(copy.deepcopy(llama.model), llama.tokenizer)
    for layer in model.model.model.layers:
        layer.self_attn.scaling *= 3
    plain = model.model.set_attn_implementation

    def switched(name: str) -> None:
        for layer in model.model.model.layers:
            layer.self_attn.scaling *= 3 if name == "sdpa" else 1 / 3
        plain(name)

    monkeypatch.setattr(model.model, "set_attn_implementation", switched)
    with pytest.raises(ModelError, match="training here and transformers compute different"):
        probe_conversation(model)


def test_a_model_that_cannot_be_called_in_our_way_is_refused_without_a_traceback(
    shop_tokenizer,
) -> None:
    config = OPTConfig(
        vocab_size=len(shop_tokenizer),
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    with pytest.raises(ModelError, match="OPTForCausalLM cannot be computed"):
        LanguageModel(OPTForCausalLM(config).eval(), shop_tokenizer)


def test_a_session_probes_what_comes_from_elsewhere_and_not_its_own_references(
    session: Session, shop_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "check_architecture", lambda *_, **__: None)
    model = build(longrope(), shop_tokenizer)
    elsewhere, own = session.run.path.parent / "elsewhere", session.run.reference(7)
    for folder in (elsewhere, own):
        model.save(folder)
    with pytest.raises(ModelError, match="sampling and training here compute different"):
        session.load_model(elsewhere)
    assert session.load_model(own).config.model_type == "phi3"


@needs_smollm2
@pytest.mark.slow
def test_a_real_pretrained_model_computes_a_conversation_alike(smollm2: LanguageModel) -> None:
    before = smollm2.fingerprint()
    found = measure_agreement(smollm2)
    assert found.engine_to_scoring < 1e-4
    assert found.scoring_to_transformers < 1e-4
    assert smollm2.fingerprint() == before
