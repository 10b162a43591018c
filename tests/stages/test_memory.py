"""The plan of a run's memory against what models, adapters and passes hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy import attention
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters, trained_tensors
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.stages import memory
from ragen_apo.stages.memory import MemoryPlan, Peak, plan_memory
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


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_lagged_policy_is_a_copy_of_adapters_or_of_all_weights(
    model: LanguageModel, has_adapters: bool
) -> None:
    """As `OaplAlgorithm` keeps it: with frozen embeddings, if there are no adapters."""
    frozen = ("--algorithm=oapl", "--policy.freeze_embeddings=true")
    if has_adapters:
        add_adapters(model.model, LoraConfig(rank=2), seed=0)
    alone = peak(model, "updates", *frozen)
    lagged = peak(model, "updates", *frozen, "--algorithm.lag=2")
    copied = sum(tensor.numel() * 4 for tensor in trained_tensors(model.model).values())
    assert lagged.models - alone.models == copied > 0


def test_frozen_embeddings_are_not_trained(model: LanguageModel) -> None:
    embeddings = model.model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor)
    whole, frozen = (
        peak(model, "updates", f"--policy.freeze_embeddings={value}").certain
        for value in ("false", "true")
    )
    assert whole - frozen == 3 * embeddings.numel() * 4


def peak(model: LanguageModel, name: str, *overrides: str, max_turns: int | None = None) -> Peak:
    peaks = plan(model, *overrides, max_turns=max_turns).peaks
    (found,) = [each for each in peaks if each.name == name]
    return found


def test_adapters_need_no_second_model_and_little_to_be_trained(model: LanguageModel) -> None:
    add_adapters(model.model, LoraConfig(rank=2), seed=0)
    adapters = sum(p.numel() * 4 for p in model.model.parameters() if p.requires_grad)
    first = ("--reference.refresh_every_steps=null",)
    assert peak(model, "updates", *first).certain == size(model) + 3 * adapters
    # A new reference is the policy with its adapters: a model of its own, without any.
    assert peak(model, "updates").certain == 2 * size(model) + 3 * adapters
    # None is made after the last step, the sixth.
    never = ("--reference.refresh_every_steps=6",)
    assert peak(model, "updates", *never) == peak(model, "updates", *first)


def test_to_be_saved_adapters_are_added_to_the_weights_below_them(model: LanguageModel) -> None:
    linear = sum(
        module.weight.numel() * 4
        for name, module in model.model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    add_adapters(model.model, LoraConfig(rank=2), seed=0)
    adapters = sum(p.numel() * 4 for p in model.model.parameters() if p.requires_grad)
    first = ("--reference.refresh_every_steps=null",)
    assert peak(model, "saving a model", *first).certain == size(model) + linear
    state = 2 * adapters  # of the optimizer that goes on afterwards
    assert peak(model, "saving a model").certain == size(model) + linear + state


def test_a_small_model_learns_its_embeddings_before_they_are_frozen(model: LanguageModel) -> None:
    frozen = "--policy.freeze_embeddings=true"
    assert peak(model, "warm start", frozen).certain == (1 + 3) * size(model)
    learned = peak(model, "updates", frozen).training_state
    keys = ("--policy.path=a/model", "--warm_start.copy.max_steps=0")
    pretrained = peak(model, "warm start", frozen, *keys)
    assert pretrained.certain == size(model) + learned < (1 + 3) * size(model)


def test_distillation_has_moments_of_its_own_beside_those_that_go_on(model: LanguageModel) -> None:
    distilled = ("--distillation.enabled=true", "--reference.refresh_every_steps=2")
    # Policy and the new reference; two moments of the trainer; gradients and moments.
    assert plan(model, *distilled).certain == (2 + 2 + 3) * size(model)
    never = ("--distillation.enabled=true", "--reference.refresh_every_steps=null")
    assert plan(model, *never).certain == (2 + 3) * size(model)
    # PPO goes on with a critic and its moments besides.
    assert plan(model, *distilled, "--algorithm=ppo").certain == (3 + 4 + 3) * size(model)


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
    whole, converted = (
        peak(replace(model, autocast=autocast), "rollouts") for autocast in (None, torch.bfloat16)
    )
    monkeypatch.setattr(memory, "num_packed_bytes", lambda module: packed[id(module)])
    assert peak(model, "rollouts").contexts == whole.contexts + 7_000
    # In mixed precision only the projection is kept in the format of the weights.
    mixed = peak(replace(model, autocast=torch.bfloat16), "rollouts")
    assert mixed.contexts == converted.contexts + 300


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_over_full_contexts_keeps_no_more_than_planned(
    checkpointing: bool,
    autocast: torch.dtype | None,
    qwen_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_matrix_units", lambda: False)
    loaded = load_language_model(
        qwen_folder, device=torch.device("cpu"), gradient_checkpointing=checkpointing
    )
    model = replace(loaded, autocast=autocast)
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
    limit = "--agent.max_response_tokens=64"
    planned = peak(model, "updates", limit, max_turns=1).contexts
    assert sum(kept.values()) <= planned
    if not checkpointing:
        assert sum(kept.values()) >= planned / 4


def test_attention_weights_are_planned_where_a_pass_keeps_them(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = replace(model, autocast=torch.bfloat16)
    monkeypatch.setattr(attention, "has_matrix_units", lambda: True)
    without = peak(mixed, "updates").contexts
    monkeypatch.setattr(attention, "has_matrix_units", lambda: False)
    shape = model.config
    heads = shape.num_hidden_layers * shape.num_attention_heads
    weights = 2 * heads * NUM_TOKENS * (NUM_TOKENS + attention.QUERIES_PER_BLOCK) // 2
    assert peak(mixed, "updates").contexts == without + 2 * weights


def test_on_a_cpu_a_small_cache_stays_while_the_model_is_trained(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: dict[str, list[int]] = {"updates": [], "rollouts": []}
    for limit in (0, 2**40):
        monkeypatch.setattr(memory, "MAX_SPARE_BYTES", limit)
        for name, found in contexts.items():
            found.append(peak(model, name).contexts)
    released, kept = contexts["updates"]
    assert contexts["rollouts"][0] == contexts["rollouts"][1] >= kept - released > 0


def test_logits_of_a_pass_are_planned_as_the_pieces_that_it_makes(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = model.vocabulary_size

    def planned(num_sampled: int) -> int:
        limit = f"--agent.max_response_tokens={num_sampled}"
        return peak(model, "updates", limit, max_turns=1).contexts

    assert planned(64) - planned(32) == 5 * 2 * 32 * width * 4  # two rows of float32
    monkeypatch.setattr(memory, "MAX_LOGITS", 2 * 48 * width)
    assert planned(64) - planned(32) == 5 * 2 * 16 * width * 4
    assert planned(128) == planned(64)
    monkeypatch.setattr(memory, "MAX_LOGITS", 1)
    assert planned(64) - planned(32) == 0, "a piece has one token at least"


def test_a_run_that_cannot_fit_is_refused_with_what_to_do(model: LanguageModel) -> None:
    made = plan(model)
    made.require(made.certain)
    with pytest.raises(ConfigError, match=r"GiB are free; train adapters"):
        made.require(made.certain - 1)


def test_the_sentence_names_the_highest_peak_and_all_its_parts() -> None:
    gib = 2**30
    peaks = (Peak("rollouts", 2 * gib, 2 * gib, gib // 2), Peak("updates", 2 * gib, 3 * gib))
    assert MemoryPlan(gib, peaks).sentence(2**34) == (
        "memory: tensors of at most 5.0 GiB, if all contexts were full (updates: models 2.0, "
        "gradients and moments 3.0); 16.0 are free"
    )
