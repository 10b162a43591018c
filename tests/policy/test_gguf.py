"""Real pretrained weights: SmolLM2-135M-Instruct as pip brings it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_apo.errors import ModelError
from ragen_apo.policy.gguf import convert_gguf
from ragen_apo.policy.language_model import LanguageModel, load_language_model
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
