"""Loading, saving and identifying a model; what is refused."""

import copy
import datetime
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from ragen_apo.agent.context import ContextManager
from ragen_apo.config.policy import LoraConfig, SmallModelConfig
from ragen_apo.errors import ConfigError, ModelError
from ragen_apo.policy import language_model
from ragen_apo.policy.conversation_probe import probe_conversation
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import (
    LanguageModel,
    build_small_model,
    check_model,
    load_language_model,
    load_tokenizer,
)
from ragen_apo.policy.lora import add_adapters, save_adapters
from ragen_apo.policy.tokenizer import printed_tokens
from ragen_apo.seeding import generator
from ragen_apo.warm_start.batches import copyable_token_ids
from tests.chat_templates import SMOLLM_3, with_template
from tests.factories import NO_LIMITS, TINY_ARCHITECTURE
from tests.fixtures import CHATML
from tests.generating import respond

CPU = torch.device("cpu")


def lively(model: LanguageModel) -> LanguageModel:
    """A copy with larger random weights: its greedy text differs from prompt to prompt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        changed = copy.deepcopy(model.model)
        for parameter in changed.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return LanguageModel(changed, model.tokenizer)


@pytest.fixture
def folder(tiny_model: LanguageModel, tmp_path: Path) -> Path:
    tiny_model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_a_saved_model_writes_the_same_text_in_plain_transformers(
    tiny_model: LanguageModel, tmp_path: Path
) -> None:
    ours = lively(tiny_model)
    ours.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    context = ContextManager(ours.tokenizer, system_prompt=None, limits=NO_LIMITS)
    observations = ["TASK: User wants to buy blue mug.", "Found 0 results.", "Find red shoe."]
    prompts = [context.first_prompt(observation) for observation in observations]
    engine = GenerationEngine(ours, num_rows=3, capacity=100)
    rows = [engine.open_row(generator(index)) for index in range(3)]
    responses = respond(engine, rows, prompts, max_new_tokens=24, temperature=0.0)
    assert len({response.token_ids for response in responses}) == 3
    for prompt, response in zip(prompts, responses, strict=True):
        written = plain.generate(torch.tensor([prompt]), max_new_tokens=24)[0, len(prompt) :]
        assert tokenizer.decode(written) == context.decode(response.token_ids)


def test_the_end_token_of_a_saved_model_is_the_closing_tag(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([plain.generation_config.eos_token_id]) == "</answer>"


def test_the_weights_are_a_function_of_the_seed(shop_tokenizer) -> None:
    def fingerprint(seed: int) -> str:
        sizes = SmallModelConfig(
            hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_position=64
        )
        return build_small_model(shop_tokenizer, sizes, seed=seed).fingerprint()

    torch.manual_seed(5)
    first, state = fingerprint(0), torch.get_rng_state()
    torch.manual_seed(6)
    assert fingerprint(0) == first != fingerprint(1)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


def test_all_heads_but_one_start_out_looking_at_previous_tokens(tiny_model: LanguageModel) -> None:
    eager = copy.deepcopy(tiny_model.model)
    eager.set_attn_implementation("eager")
    token_ids = torch.arange(8, 40)[None]
    weights = eager(token_ids, output_attentions=True).attentions[0][0]
    num_heads = tiny_model.config.num_attention_heads
    assert len(weights) == num_heads
    for head in range(max(num_heads - 1, 1)):
        assert weights[head].diagonal(-1 - head).min() > 0.5, f"head {head}"


def test_the_fingerprint_survives_saving_and_loading(
    tiny_model: LanguageModel, folder: Path
) -> None:
    loaded = load_language_model(folder, device=CPU)
    assert loaded.fingerprint() == tiny_model.fingerprint()


def change_a_weight(model: LanguageModel) -> None:
    parameter = next(model.model.parameters())
    parameter.data[3, 2] = torch.nextafter(parameter.data[3, 2], torch.tensor(1.0))


def change_the_rotary_base(model: LanguageModel) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 9_999.0}


def change_the_template(model: LanguageModel) -> None:
    model.tokenizer.chat_template += " "


def change_the_end_token(model: LanguageModel) -> None:
    assert model.model.generation_config is not None
    model.model.generation_config.eos_token_id = 17


def change_the_vocabulary(model: LanguageModel) -> None:
    model.tokenizer.add_tokens(["sneaker-123"])


def change_the_normaliser(model: LanguageModel) -> None:
    model.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def change_the_merges(model: LanguageModel) -> None:
    contents = json.loads(model.tokenizer.backend_tokenizer.to_str())
    merges = contents["model"]["merges"]
    merges[-2:] = merges[:-3:-1]
    changed = Tokenizer.from_str(json.dumps(contents))
    model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=changed,
        pad_token=model.tokenizer.pad_token,
        eos_token=model.tokenizer.eos_token,
        chat_template=model.tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.mark.parametrize(
    "change",
    [
        change_a_weight,
        change_the_rotary_base,
        change_the_template,
        change_the_end_token,
        change_the_vocabulary,
        change_the_normaliser,
        change_the_merges,
    ],
)
def test_the_fingerprint_changes_with_whatever_decides_the_text(
    tiny_model: LanguageModel, change: Callable[[LanguageModel], None]
) -> None:
    model = copy.deepcopy(tiny_model)
    assert model.fingerprint() == tiny_model.fingerprint()
    change(model)
    assert model.fingerprint() != tiny_model.fingerprint()


def test_a_constant_model_is_hashed_once(
    tiny_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny_model)
    model.is_constant = True
    before = model.fingerprint()
    hashed = list[object]()
    monkeypatch.setattr(language_model, "update_digest", lambda *given: hashed.append(given))
    assert [model.fingerprint(), model.fingerprint()] == [before, before]
    assert not hashed
    assert model.copy_with({}).fingerprint() != before, "what is put into it may change"
    assert model.without_adapters().fingerprint() != before
    assert len(hashed) == 2


def test_the_fingerprint_stays_when_texts_are_tokenised(tiny_model: LanguageModel) -> None:
    """A call with padding or a longest length leaves both in the tokenizer."""
    before = tiny_model.fingerprint()
    texts = ["red mug", "blue mug 17"]
    tokenizer = copy.deepcopy(tiny_model.tokenizer)
    tokenizer(texts, padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation
    assert LanguageModel(tiny_model.model, tokenizer).fingerprint() == before


def test_the_date_that_a_template_prints_is_part_of_the_fingerprint(
    tiny_model: LanguageModel, chatml_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, dated = (
        LanguageModel(tiny_model.model, with_template(chatml_tokenizer, template))
        for template in (CHATML, SMOLLM_3)
    )
    before = [plain.fingerprint(), dated.fingerprint()]
    monkeypatch.setattr(language_model, "TEMPLATE_DATE", datetime.date(2025, 1, 1))
    assert plain.fingerprint() == before[0]
    assert dated.fingerprint() != before[1]


def test_the_special_tokens_that_a_template_prints_are_part_of_the_fingerprint(
    tiny_model: LanguageModel, chatml_tokenizer
) -> None:
    def fingerprint(template: str, bos_token: str | None) -> str:
        tokenizer = with_template(chatml_tokenizer, template)
        tokenizer.bos_token = bos_token
        return LanguageModel(tiny_model.model, tokenizer).fingerprint()

    starts = [None, "<|im_start|>", "<|im_end|>"]
    printed = "{{ bos_token or '' }}" + CHATML
    assert len({fingerprint(printed, start) for start in starts}) == 3
    assert len({fingerprint(CHATML, start) for start in starts}) == 1
    # One that the model's configuration names is in the fingerprint of earlier versions already.
    model = copy.deepcopy(tiny_model.model)
    tokenizer = with_template(chatml_tokenizer, printed)
    tokenizer.bos_token = starts[1]
    model.config.bos_token_id = tokenizer.bos_token_id
    assert not printed_tokens(tokenizer, model.config)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no causal language model could be loaded"):
        load_language_model(tmp_path / "nothing", device=CPU)


def test_a_hub_name_without_network_says_what_to_do() -> None:
    name = "Qwen/Qwen2.5-1.5B-Instruct"
    for load in (
        lambda: load_language_model(name, device=CPU),
        lambda: check_model(name, max_context_tokens=8, trust_remote_code=False),
    ):
        with pytest.raises(ModelError, match=f"hf download {name} --local-dir FOLDER"):
            load()


def test_a_path_that_reads_like_a_hub_name_is_first_called_a_missing_folder() -> None:
    with pytest.raises(ModelError, match="from 'models/nothere': there is no such folder; check"):
        check_model("models/nothere", max_context_tokens=8, trust_remote_code=False)


@pytest.mark.parametrize(("length", "fits"), [(1024, True), (1025, False)])
def test_an_episode_may_be_as_long_as_the_models_positions_go(
    folder: Path, length: int, fits: bool
) -> None:
    if fits:
        check_model(folder, max_context_tokens=length, trust_remote_code=False)
    else:
        with pytest.raises(ConfigError, match="is 1025, and .* at most 1024 tokens"):
            check_model(folder, max_context_tokens=length, trust_remote_code=False)


def test_a_folder_with_adapters_beside_the_weights_is_refused(folder: Path) -> None:
    """transformers would put them in and freeze the weights, and nothing would learn."""
    model = load_language_model(folder, device=CPU)
    add_adapters(model.model, LoraConfig(rank=2), seed=0)
    save_adapters(model.model, folder)
    for load in (
        lambda: load_language_model(folder, device=CPU),
        lambda: check_model(folder, max_context_tokens=8, trust_remote_code=False),
        lambda: load_tokenizer(folder, trust_remote_code=False),
    ):
        with pytest.raises(ModelError, match=r"holds adapters \(adapter_config\.json\); expected"):
            load()


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_language_model(folder, device=CPU)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.99])
def test_weights_that_were_cut_off_are_refused(folder: Path, share: float) -> None:
    weights = folder / "model.safetensors"
    contents = weights.read_bytes()
    weights.write_bytes(contents[: int(share * len(contents))])
    with pytest.raises(ModelError, match="safetensors"):
        load_language_model(folder, device=CPU)


def test_pickled_weights_are_refused(tiny_model: LanguageModel, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_language_model(folder, device=CPU)


def test_a_tokenizer_without_chat_template_is_refused(
    tiny_model: LanguageModel, folder: Path
) -> None:
    tokenizer = copy.deepcopy(tiny_model.tokenizer)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="chat template"):
        load_language_model(folder, device=CPU)


def mistral(vocab_size: int, **changes) -> MistralConfig:
    return MistralConfig(vocab_size=vocab_size, **TINY_ARCHITECTURE, **changes)


def qwen(vocab_size: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab_size,
        **TINY_ARCHITECTURE,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
    )


def save_model(model: PreTrainedModel, tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "architecture"),
    [(lambda size: mistral(size, sliding_window=16), MistralForCausalLM), (qwen, Qwen2ForCausalLM)],
    ids=["mistral", "qwen2"],
)
def test_attention_to_a_window_is_refused(
    shop_tokenizer,
    tmp_path: Path,
    config: Callable[[int], PretrainedConfig],
    architecture: Callable[[PretrainedConfig], PreTrainedModel],
) -> None:
    model = architecture(config(len(shop_tokenizer)))
    save_model(model, shop_tokenizer, tmp_path)
    with pytest.raises(ModelError, match="full attention only"):
        load_language_model(tmp_path, device=CPU)


def test_a_mistral_that_reads_the_whole_context_is_accepted(shop_tokenizer, tmp_path: Path) -> None:
    model = MistralForCausalLM(mistral(len(shop_tokenizer), sliding_window=None))
    save_model(model, shop_tokenizer, tmp_path)
    assert load_language_model(tmp_path, device=CPU).config.model_type == "mistral"


def test_an_architecture_without_masked_sdpa_is_refused(shop_tokenizer, tmp_path: Path) -> None:
    config = GPTNeoConfig(
        vocab_size=len(shop_tokenizer),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global"], 2]],
    )
    save_model(GPTNeoForCausalLM(config), shop_tokenizer, tmp_path)
    with pytest.raises(ModelError, match="scaled_dot_product_attention"):
        load_language_model(tmp_path, device=CPU)


def test_logits_that_are_scaled_after_the_projection_are_refused(
    shop_tokenizer, tmp_path: Path
) -> None:
    config = GraniteConfig(
        vocab_size=len(shop_tokenizer),
        **TINY_ARCHITECTURE,
        logits_scaling=8.0,
        initializer_range=1.0,
    )
    save_model(GraniteForCausalLM(config), shop_tokenizer, tmp_path)
    with pytest.raises(ModelError, match="after the vocabulary projection"):
        load_language_model(tmp_path, device=CPU)


def test_logits_that_are_capped_after_the_projection_are_refused_however_small_they_are(
    tiny_model: LanguageModel,
) -> None:
    capped = copy.deepcopy(tiny_model.model)
    plain = capped.forward

    def forward(**kwargs: Any) -> Any:
        output = plain(**kwargs)
        output.logits = 30.0 * torch.tanh(output.logits / 30.0)
        return output

    token_ids = torch.arange(8, 40)[None]
    assert capped(input_ids=token_ids).logits.abs().max() < 3.0
    capped.forward = forward
    with pytest.raises(ModelError, match="after the vocabulary projection"):
        LanguageModel(capped, tiny_model.tokenizer)


def test_hidden_states_that_are_scaled_before_the_projection_are_refused(
    tiny_model: LanguageModel,
) -> None:
    scaled = copy.deepcopy(tiny_model.model)
    scaled.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 4.0,))
    with pytest.raises(ModelError, match="before or after the vocabulary projection"):
        LanguageModel(scaled, tiny_model.tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_model_with_logits_as_large_as_a_pretrained_ones_is_accepted_in_every_precision(
    shop_tokenizer, tmp_path: Path, dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    """Rounding grows with the logits: SmolLM2's reach 33 and differ by 1.3 under autocast."""
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(shop_tokenizer), **TINY_ARCHITECTURE))
    with torch.no_grad():
        model.lm_head.weight *= 400.0
    save_model(model, shop_tokenizer, tmp_path)
    loaded = load_language_model(tmp_path, device=CPU, dtype=dtype, autocast=autocast)
    token_ids = torch.arange(8, 40)[None]
    with torch.inference_mode():
        logits = loaded.logits(loaded.hidden_states(token_ids)[0])
    assert logits.abs().max() > 30.0


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def without_a_tensor(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if "layers.0.mlp.up" not in name}


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers", "blocks"): tensor for name, tensor in weights.items()}


def narrower(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"model.norm.weight": weights["model.norm.weight"][:16].clone()}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (without_a_tensor, ["model.layers.0.mlp.up_proj.weight is missing", "1 such tensors"]),
        (renamed, ["is missing", "that it does not use", "model.blocks.0"]),
        (narrower, ["model.norm.weight has shape (16,), expected (32,)"]),
    ],
)
def test_weights_that_are_missing_or_renamed_are_refused_and_not_made_up(
    folder: Path, change: Change, parts: list[str]
) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        load_language_model(folder, device=CPU)
    assert all(part in str(error.value) for part in [*parts, "save_pretrained"])


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [
        ("model.layers.0.mlp.up_proj.bias", True),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", True),
        ("model.layers.2.mlp.up_proj.weight", True),
        ("lm_head.bias", True),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", False),
        ("v_head.summary.weight", False),
    ],
)
def test_weights_that_the_configuration_has_no_place_for_are_refused_if_they_would_act(
    folder: Path, name: str, is_lost: bool
) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(32)}, path, metadata={"format": "pt"})
    if is_lost:
        with pytest.raises(ModelError, match=f"no place for {name} .1 such tensors"):
            load_language_model(folder, device=CPU)
    else:
        with pytest.warns(UserWarning, match=f"does not use: 1, such as {name}"):
            load_language_model(folder, device=CPU)


def test_a_projection_that_is_stored_beside_the_embeddings_it_is_tied_to_is_accepted(
    folder: Path,
) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    tied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(tied, path, metadata={"format": "pt"})
    loaded = load_language_model(folder, device=CPU).model
    assert torch.equal(loaded.lm_head.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("quant_method", ["fp8", "gptq", "awq", "bitsandbytes", "mxfp4"])
def test_quantised_weights_are_refused_before_and_while_they_are_loaded(
    folder: Path, quant_method: str
) -> None:
    """As in Qwen3-0.6B-FP8. Saved again, float8 weights would be read without their scales."""
    path = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": quant_method}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    with pytest.raises(ModelError, match=f"quantised weights .*{quant_method}.* without an ending"):
        check_model(folder, max_context_tokens=64, trust_remote_code=False)
    with pytest.raises(ModelError, match="quantised weights"):
        load_language_model(folder, device=CPU)


def test_weights_that_are_no_numbers_are_called_so(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite numbers"):
        load_language_model(folder, device=CPU)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "abc"}, "hidden_size"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_a_configuration_that_no_model_can_be_made_of_is_one_message(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=reason) as error:
        load_language_model(folder, device=CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ 1 / 0 }}"])
def test_a_chat_template_that_fails_is_refused(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="chat template of .* fails on a conversation"):
        load_language_model(folder, device=CPU)


def test_special_tokens_beyond_the_embeddings_are_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"<\|turn\|>.*embeddings for 0 to"):
        load_language_model(folder, device=CPU)


def test_a_vocabulary_beyond_the_embeddings_is_refused_also_where_the_probe_needs_none_of_it(
    folder: Path,
) -> None:
    """The conversation that is probed has the first ids only; an observation may have any."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longest = max(
        (text for text in tokenizer.get_vocab() if text not in tokenizer.get_added_vocab()),
        key=tokenizer.get_vocab().__getitem__,
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(tokenizer.get_vocab()[longest])  # one too few
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match=re.escape(f"({longest!r}) of texts, and the model has")):
        load_language_model(folder, device=CPU)


def test_added_tokens_without_embeddings_that_no_conversation_has_are_accepted(
    folder: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    assert load_language_model(folder, device=CPU).vocabulary_size == len(tokenizer) - 1


def test_a_pad_token_that_was_added_without_an_embedding_pads_nothing(folder: Path) -> None:
    """As in many folders of Llama 2: rows of several lengths are padded with another token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    model = load_language_model(folder, device=CPU)
    assert tokenizer.pad_token_id == model.vocabulary_size
    assert model.pad_id == 0
    assert max(copyable_token_ids(model)) == model.vocabulary_size - 1
    probe_conversation(model)


@pytest.mark.parametrize("name", ["./nothere", "../nothere/model", "/nothere"])
def test_a_path_is_not_advised_to_be_downloaded(name: str) -> None:
    with pytest.raises(ModelError, match="Expected a folder") as error:
        check_model(name, max_context_tokens=64, trust_remote_code=False)
    assert "there is no such folder" in str(error.value)
    assert not any(word in str(error.value) for word in ("hf download", "Repo id"))


def stablelm(vocab_size: int) -> PreTrainedModel:
    return StableLmForCausalLM(StableLmConfig(vocab_size=vocab_size, **TINY_ARCHITECTURE))


def falcon(vocab_size: int) -> PreTrainedModel:
    sizes = {
        key: TINY_ARCHITECTURE[key]
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    return FalconForCausalLM(FalconConfig(vocab_size=vocab_size, **sizes))


@pytest.mark.parametrize("build", [stablelm, falcon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_architecture_that_loses_arguments_of_attention_is_refused(
    shop_tokenizer, tmp_path: Path, build: Callable[[int], PreTrainedModel], dtype: torch.dtype
) -> None:
    save_model(build(len(shop_tokenizer)), shop_tokenizer, tmp_path)
    with pytest.raises(ModelError, match="would see each other"):
        load_language_model(tmp_path, device=CPU, dtype=dtype)


def test_mixed_precision_computes_nearly_the_same_and_is_another_reference(
    tiny_model: LanguageModel,
) -> None:
    mixed = replace(tiny_model, autocast=torch.bfloat16)
    token_ids = torch.arange(8, 40)[None]
    with torch.inference_mode():
        exact = tiny_model.logits(tiny_model.hidden_states(token_ids)).log_softmax(-1)
        rounded = mixed.logits(mixed.hidden_states(token_ids)).log_softmax(-1)
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.1
    assert mixed.fingerprint() != tiny_model.fingerprint()


def test_gradients_in_mixed_precision_have_the_format_of_the_weights(
    tiny_model: LanguageModel,
) -> None:
    model = copy.deepcopy(replace(tiny_model, autocast=torch.bfloat16))
    model.logits(model.hidden_states(torch.arange(8, 40)[None])).logsumexp(-1).sum().backward()
    gradients = [parameter.grad for parameter in model.model.parameters()]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
