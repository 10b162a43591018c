"""The plan of a run's memory against what models, adapters and passes hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.stages import memory
from ragen_apo.stages.memory import MemoryPlan, plan_memory
from tests import factories

NUM_TOKENS = 256
FULL = ("--agent.max_context_tokens=256", "--training.micro_batch_size=2")


@pytest.fixture
def model(qwen_folder: Path) -> LanguageModel:
    return load_language_model(qwen_folder, device=torch.device("cpu"))


def plan(model: LanguageModel, *overrides: str, **options: Any) -> MemoryPlan:
    return plan_memory(factories.config(*FULL, *overrides), model, **{"max_turns": None, **options})


def size(model: LanguageModel) -> int:
    return sum(p.numel() * 4 for p in model.model.parameters())


def test_all_weights_need_themselves_a_reference_and_three_times_as_much_to_be_trained(
    model: LanguageModel,
) -> None:
    assert plan(model).certain == (1 + 1 + 3) * size(model)


def test_a_critic_is_trained_like_the_policy(model: LanguageModel) -> None:
    assert plan(model, "--algorithm=ppo").certain == (1 + 2 + 6) * size(model)


def test_a_lagged_policy_is_a_copy_of_what_is_trained(model: LanguageModel) -> None:
    frozen = ("--algorithm=oapl", "--policy.freeze_embeddings=true")
    learned = (plan(model, *frozen).certain - 2 * size(model)) // 3
    copied = plan(model, *frozen, "--algorithm.lag=2").certain - plan(model, *frozen).certain
    assert copied == learned


def test_frozen_embeddings_are_not_trained(model: LanguageModel) -> None:
    embeddings = model.model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor)
    spared = plan(model).certain - plan(model, "--policy.freeze_embeddings=true").certain
    assert spared == 3 * embeddings.numel() * 4


def test_adapters_need_no_second_model_and_little_to_be_trained(model: LanguageModel) -> None:
    add_adapters(model.model, LoraConfig(rank=2), seed=0)
    adapters = sum(p.numel() * 4 for p in model.model.parameters() if p.requires_grad)
    assert plan(model).certain == size(model) + 3 * adapters


def test_a_rank_has_its_share_and_all_weights_once_while_it_plays(model: LanguageModel) -> None:
    shares = plan(model, "--machine.sharding=full", num_ranks=4)
    assert shares.certain == (1 + 1 + 2) * size(model) // 4 + size(model), "no gradients meanwhile"
    assert shares.loaded == plan(model).loaded == size(model)
    alone = plan(model, "--machine.sharding=full")
    assert alone == plan(model), "one process has nobody to share with"


def test_a_rollout_holds_the_packed_weights(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    projection = model.model.get_output_embeddings()
    packed = {id(model.model): 7_000, id(projection): 300}
    monkeypatch.setattr(memory, "num_packed_bytes", lambda module: 0)
    whole, converted = plan(model), plan(replace(model, autocast=torch.bfloat16))
    monkeypatch.setattr(memory, "num_packed_bytes", lambda module: packed[id(module)])
    assert plan(model).rollout == whole.rollout + 7_000
    # In mixed precision only the projection is kept in the format of the weights.
    assert plan(replace(model, autocast=torch.bfloat16)).rollout == converted.rollout + 300


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_over_full_contexts_keeps_no_more_than_planned(
    checkpointing: bool, qwen_folder: Path
) -> None:
    model = load_language_model(
        qwen_folder, device=torch.device("cpu"), gradient_checkpointing=checkpointing
    )
    token_ids_RT = torch.randint(0, 50, (2, NUM_TOKENS), generator=torch.manual_seed(0))
    mask_RT = torch.zeros(2, NUM_TOKENS, dtype=torch.bool)
    mask_RT[:, -64:] = True
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = score_tokens(model, token_ids_RT, mask_RT).logprobs_BT.sum()
    loss.backward()
    planned = plan(model, "--agent.max_response_tokens=64", max_turns=1).training_pass
    assert sum(kept.values()) <= planned
    if not checkpointing:
        assert sum(kept.values()) >= planned / 4


def test_a_run_that_cannot_fit_is_refused_with_what_to_do(model: LanguageModel) -> None:
    made = plan(model)
    made.require(made.certain)
    with pytest.raises(ConfigError, match=r"GiB are free; train adapters"):
        made.require(made.certain - 1)


def test_the_sentence_names_all_parts(model: LanguageModel) -> None:
    sentence = plan(model).sentence(2**34)
    assert sentence.startswith("memory: tensors of at most 0.")
    assert "16.0 are free" in sentence
    assert "gradients and moments" in sentence
