"""Real pretrained weights: SmolLM2-135M-Instruct as pip brings it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ragen_apo.errors import ModelError
from ragen_apo.policy.gguf import convert_gguf
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from tests.factories import TINY_ARCHITECTURE
from tests.pretrained import SMOLLM2, needs_smollm2

CPU = torch.device("cpu")


@needs_smollm2
@pytest.mark.slow
def test_the_converted_model_answers_as_a_trained_one(smollm2: LanguageModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = AutoModelForCausalLM.from_pretrained(SMOLLM2)
    answer = plain.generate(prompt["input_ids"], max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(answer[0])


@needs_smollm2
@pytest.mark.slow
def test_a_real_model_is_not_refused(smollm2: LanguageModel) -> None:
    in_bfloat16 = load_language_model(SMOLLM2, device=CPU, autocast=torch.bfloat16)
    for loaded in (smollm2, in_bfloat16):
        assert sum(weight.numel() for weight in loaded.model.parameters()) == 134_515_008


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="`make models/smollm2-135m` installs it")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"model\.gguf could not be read as GGUF"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists already"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf is no file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "_proj": "",
}
Change = Callable[[Any], None]


def as_stored(name: str, weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, transformers halves: rows of queries and keys change places."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, tokenizer: PreTrainedTokenizerFast, change: Change) -> LlamaForCausalLM:
    """Writes a tiny Llama as llama.cpp does, and what `change` adds to the file."""
    gguf = pytest.importorskip("gguf", reason="`make models/smollm2-135m` installs it")
    sizes = TINY_ARCHITECTURE | {"num_key_value_heads": 4, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), eos_token_id=7))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(7)
    change(writer)
    for name, weight in model.state_dict().items():
        stored = name
        for theirs, its in NAMES.items():
            stored = stored.replace(theirs, its)
        writer.add_tensor(stored, as_stored(name, weight, 4).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_file_is_converted_with_all_of_its_weights(shop_tokenizer, tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "out"
    written = write_gguf(file, shop_tokenizer, lambda writer: None)
    convert_gguf(file, folder)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for name, weight in written.state_dict().items():
        assert torch.equal(read[name], weight.bfloat16()), name


def with_scaling(writer: Any) -> None:
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_rope_scaling_factor(4.0)


def with_frequencies(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", torch.full((4,), 8.0).numpy())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (with_scaling, r"llama\.rope\.scaling\.type = linear, .*factor = 4\.0"),
        (with_frequencies, r"rope_freqs\.weight"),
    ],
)
def test_scaled_rotary_positions_which_would_be_lost_are_refused(
    shop_tokenizer, tmp_path: Path, change: Change, found: str
) -> None:
    write_gguf(tmp_path / "model.gguf", shop_tokenizer, change)
    with pytest.raises(ModelError, match=rf"are scaled \({found}\).* the safetensors folder"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
