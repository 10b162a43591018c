"""Model folders whose vocabulary projection has weights of its own, equal to the embeddings.

    python -m ragen_apo.policy.inference_server.untied SOURCE TARGET

Many models project to the vocabulary by their token embeddings ("tied"). vLLM's build for CPUs
packs that projection when it starts. `reload_weights` later replaces the embeddings but not the
packed copy. The server then computes with two versions of them (seen with 0.32). In an untied
folder the projection is a tensor like any other, and is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from ragen_apo.errors import RagenApoError
from ragen_apo.files import directory_written_atomically
from ragen_apo.policy.inference_server.vllm import ServerFacts
from ragen_apo.policy.inference_server.wire import RequestError
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.printable import exception_in_words

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def is_tied(model: LanguageModel) -> bool:
    """Whether the vocabulary projection is the table of embeddings."""
    projection = model.model.get_output_embeddings()
    return projection is not None and projection.weight is _embeddings(model)


def _embeddings(model: LanguageModel) -> Tensor:
    embeddings = model.model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    return embeddings


def save_untied(model: LanguageModel, folder: Path) -> None:
    """Writes a model folder as `LanguageModel.save` does, with a projection of its own."""
    untied = model.copy_with({})
    projection = untied.model.get_output_embeddings()
    assert projection is not None
    projection.weight = nn.Parameter(projection.weight.detach().clone())
    untied.model.config.tie_word_embeddings = False
    untied.save(folder)


def require_same_projection(model: LanguageModel, facts: ServerFacts) -> None:
    """Refuses a tied model on a server for CPUs, unless its projection is what it started with.

    Raises RequestError.
    """
    folder = Path(facts.folder)
    try:
        config: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if not config.get("tie_word_embeddings", True) or _has_embeddings_of(model, folder):
            return
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise RequestError(
            "vLLM's build for CPUs keeps the vocabulary projection that it was started with where "
            "it is tied to the embeddings, and whether these are the policy's cannot be told: "
            f"{facts.folder}, which the server was started with, cannot be read from {Path.cwd()} "
            f"({exception_in_words(error)})",
            advice="Start the server with --model and the absolute path of a folder that this "
            "machine has as well",
            is_final=True,
        ) from error
    raise RequestError(
        f"vLLM's build for CPUs keeps the vocabulary projection that it was started with where it "
        f"is tied to the embeddings, and the policy's embeddings are not those of {facts.folder}",
        advice=f"Make a copy with `python -m {__spec__.name} {facts.folder} COPY` and start the "
        "server with --model COPY; or train with policy.lora or policy.freeze_embeddings from the "
        "model that the server was started with",
        is_final=True,
    )


def _has_embeddings_of(model: LanguageModel, folder: Path) -> bool:
    """Whether the embeddings are those in a folder's one file, in the policy's number format."""
    own = _embeddings(model)
    with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as stored:
        names = [n for n in stored.keys() if n.endswith("embed_tokens.weight")]  # noqa: SIM118
        if len(names) != 1:
            return False
        return torch.equal(stored.get_tensor(names[0]).to(own.dtype), own.detach().cpu())


def main(arguments: list[str]) -> int:
    """Writes an untied copy of a model folder."""
    if len(arguments) != 2:
        sys.stderr.write(f"usage: python -m {__spec__.name} SOURCE TARGET\n")
        return 2
    source, target = arguments
    try:
        config = json.loads((Path(source) / _CONFIG).read_text(encoding="utf-8"))
        dtype = getattr(torch, config.get("dtype", "float32"))
        model = load_language_model(source, device=torch.device("cpu"), dtype=dtype)
        with directory_written_atomically(Path(target)) as partial:
            save_untied(model, partial)
    except (OSError, ValueError, RagenApoError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
