"""Which architectures of transformers are supported, and why others are refused.

    python -m benchmarks.architectures [--only NAME ...]

Builds a tiny model with random weights of each architecture, saves it, loads it as a run would, and
has the conversation of `policy.conversation_probe` with it. Writes the tables of docs/models.md:
how far apart log-probabilities are between generation, scoring and transformers itself, or the
first sentence of the refusal.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from ragen_apo.errors import RagenApoError
from ragen_apo.policy.conversation_probe import measure_agreement, probe_conversation
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.policy.tokenizer import train_tokenizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- python -m benchmarks.architectures -->", "<!-- end of its tables -->"
CONTEXT = 256
"""agent.max_context_tokens."""
TOKENS_A_TURN = 12
TEXTS = ["<think>find blue mug 17</think><answer>buy 3</answer> Red or blue? And now?"] * 4
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 7,
}
WIDTH = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
ROPE = {"rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, **ROPE}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    **ROPE,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
    **ROPE,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.3}
ENDS = {"bos_token_id": None, "eos_token_id": 7, "pad_token_id": 0}
FULL = ["full_attention", "full_attention"]


@dataclass(frozen=True)
class Case:
    """A configuration of an architecture; `sizes` False for one that names its sizes otherwise."""

    configuration: str
    """Class in transformers, without `Config`."""
    changes: Mapping[str, Any]
    sizes: bool = True


def case(
    configuration: str, *groups: Mapping[str, Any], sizes: bool = True, **changes: Any
) -> Case:
    merged = {key: value for group in (*groups, changes) for key, value in group.items()}
    return Case(configuration, merged, sizes)


CASES = {
    "Qwen2, Qwen2.5": case("Qwen2"),
    "Qwen2 with YaRN": case("Qwen2", rope_parameters=YARN),
    "Qwen2-MoE": case("Qwen2Moe", EXPERTS, shared_expert_intermediate_size=32),
    "Qwen3": case("Qwen3", WIDTH),
    "Qwen3-MoE": case("Qwen3Moe", EXPERTS, WIDTH),
    "Llama 1 and 2": case("Llama"),
    "Llama 3 (its rotary positions)": case("Llama", rope_parameters=LLAMA_3),
    "SmolLM2 (Llama, tied embeddings)": case("Llama", tie_word_embeddings=True),
    "SmolLM3": case("SmolLM3"),
    "Gemma 1": case("Gemma", WIDTH),
    "Gemma 3, text, no windows": case("Gemma3Text", WIDTH, layer_types=FULL),
    "Gemma 3, text, windows of the longest context": case(
        "Gemma3Text", WIDTH, sliding_window=CONTEXT
    ),
    "Mistral without windows": case("Mistral", sliding_window=None),
    "Mistral, windows of the longest context": case("Mistral", sliding_window=CONTEXT),
    "Mixtral": case("Mixtral", num_local_experts=4),
    "Ministral 3": case("Ministral3", WIDTH),
    "Phi 1 and 2": case("Phi", num_key_value_heads=4),
    "Phi 3 without windows": case("Phi3", sliding_window=None),
    "Phi 3, windows of the longest context": case("Phi3", sliding_window=CONTEXT),
    "OLMo 2": case("Olmo2"),
    "OLMoE": case("Olmoe", num_experts=4, num_experts_per_tok=2),
    "Granite with scales of 1": case("Granite"),
    "GLM": case("Glm", WIDTH),
    "GLM 4": case("Glm4", WIDTH),
    "Starcoder 2": case("Starcoder2", sliding_window=None),
    "GPT-2": case("GPT2", GPT, ENDS, sizes=False),
    "GPT-NeoX": case("GPTNeoX"),
    "DeepSeek-V3": case("DeepseekV3", ROUTED, LATENT),
    "Dots 1": case(
        "Dots1", ROUTED, WIDTH, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1
    ),
    "Seed-OSS": case("SeedOss", WIDTH),
    "Ernie 4.5": case("Ernie4_5", WIDTH),
    "Hunyuan": case("HunYuanDenseV1", WIDTH),
    "Arcee": case("Arcee"),
    "Helium": case("Helium", WIDTH),
    "Mistral, windows shorter than the context": case("Mistral", sliding_window=64),
    "Gemma 3, text, windows shorter than the context": case("Gemma3Text", WIDTH, sliding_window=64),
    "Gemma 3, text and images": case(
        "Gemma3",
        sizes=False,
        text_config={**SIZES, **WIDTH},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "Phi 3 with longrope": case(
        "Phi3",
        sliding_window=None,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=64,
    ),
    "Qwen3-Next": case("Qwen3Next", EXPERTS, WIDTH, shared_expert_intermediate_size=32),
    "LFM2": case("Lfm2", layer_types=["conv", "full_attention"]),
    "Jamba": case("Jamba", num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "Gemma 2": case("Gemma2", WIDTH),
    "GPT-OSS": case("GptOss", WIDTH, num_local_experts=4),
    "Mamba": case("Mamba", sizes=False, hidden_size=32, num_hidden_layers=2),
    "Cohere": case("Cohere"),
    "Granite with scales": case("Granite", logits_scaling=8.0),
    "StableLM": case("StableLm"),
    "Falcon": case(
        "Falcon", sizes=False, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "GPT-Neo": case(
        "GPTNeo",
        sizes=False,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
    ),
    "OPT": case(
        "OPT",
        sizes=False,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "BLOOM": case("Bloom", sizes=False, hidden_size=32, n_layer=2, n_head=4),
}


def configuration(chosen: Case, *, vocab_size: int) -> PretrainedConfig:
    """The configuration of a tiny model, as transformers has it."""
    values = {"vocab_size": vocab_size, **(SIZES if chosen.sizes else {}), **chosen.changes}
    if "text_config" in values:
        values["text_config"] = {**values["text_config"], "vocab_size": vocab_size}
    return getattr(transformers, f"{chosen.configuration}Config")(**values)


def outcome(name: str, chosen: Case, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The two differences in nats, or the first sentence of the refusal."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(chosen, vocab_size=len(tokenizer)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            loaded = load_language_model(
                folder, device=torch.device("cpu"), max_context_tokens=CONTEXT
            )
            probe_conversation(loaded)
        except RagenApoError as error:
            return (first_sentence(str(error).replace(str(folder), name)),)
        found = measure_agreement(loaded, tokens_a_turn=TOKENS_A_TURN)
    return f"{found.engine_to_scoring:.0e}", f"{found.scoring_to_transformers:.0e}"


def first_sentence(message: str) -> str:
    return re.split(r"(?<=[.;]) (?=[A-Z(])", message, maxsplit=1)[0].rstrip(".;")


def tables(outcomes: Mapping[str, Sequence[str]]) -> str:
    """Both tables of the page."""
    supported = {name: found for name, found in outcomes.items() if len(found) > 1}
    refused = {name: found for name, found in outcomes.items() if len(found) == 1}
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}; mean differences of "
        "the log-probabilities of",
        "sampled tokens in nats, float32, tiny models with random weights.",
        "",
        "| supported | generation against scoring | scoring against transformers |",
        "|---|---:|---:|",
        *(f"| {name} | {' | '.join(found)} |" for name, found in supported.items()),
        "",
        "| refused | the refusal begins |",
        "|---|---|",
        *(f"| {name} | {found[0].replace('|', ' ')} |" for name, found in refused.items()),
    ]
    return "\n".join(lines)


def with_tables(page: str, written: str) -> str:
    """The page with these tables in place of those it had."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{written}\n\n{END}{after}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), help="print these and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    outcomes: dict[str, tuple[str, ...]] = {}
    for name in arguments.only or CASES:
        outcomes[name] = outcome(name, CASES[name], tokenizer)
        print(name, *outcomes[name], flush=True)
    if not arguments.only:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_tables(page, tables(outcomes)), encoding="utf-8")


if __name__ == "__main__":
    main()
