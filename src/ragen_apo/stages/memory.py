"""How much memory a run may need at most, known before anything is computed.

    when                  what is held                               what a pass needs besides
    warm start            policy, gradients, moments                 a training pass
    Stage 1               reference                                  a rollout
    distillation          policy, reference, gradients, moments      a training pass
    rollouts              policy, reference, others, moments         a rollout
    updates               the same, and gradients                    a training pass
    distillation at a     the same as for rollouts, and gradients    a training pass
      new reference       and moments of its own
    saving a model        policy, others, moments; on a CPU the sums of weights and adapters

`others` is what an algorithm trains or keeps besides the policy: a critic with its own gradients
and moments, a lagged policy. There is one reference at a time, and with adapters the first one is
the policy's own weights. Checkpoints are written from where the tensors are.

Where weights are in shares, a rank has its part of what is held, and all weights besides while it
plays or saves. What is held is certain. Passes count every context as full, which few are, so the
sum is an upper bound for the tensors. On a CPU a small cache of a rollout stays for the next one.
The process needs memory besides: 0.5 GiB for its libraries, what kernels prepare for each shape,
and holes between tensors. What a run needed is `peak_memory_bytes` in run.json. Sizes are in bytes.

Axes of the sizes below: H hidden, K keys (of all key-value heads), I intermediate, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from ragen_apo.config import RunConfig
from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.policy import PolicyConfig
from ragen_apo.config.training import TrainingConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy.attention import QUERIES_PER_BLOCK, keeps_attention_weights
from ragen_apo.policy.language_model import MAX_LOGITS, LanguageModel
from ragen_apo.policy.lora import has_adapters, merged_bytes
from ragen_apo.policy.packed_weights import num_packed_bytes
from ragen_apo.policy.passes import decoder_layers
from ragen_apo.policy.ragged_cache import MAX_SPARE_BYTES
from ragen_apo.stages.disk import Sizes
from ragen_apo.stages.memory_limits import memory_left

_GIB = 2**30
_LOGIT_TENSORS = 5
"""Log-softmax, the entropy's probabilities, and their gradients and products, all [N, V]."""


@dataclass(frozen=True)
class Peak:
    """Bytes at most at one time of a run, by what holds them."""

    name: str
    models: int
    """Weights."""
    training_state: int = 0
    """Gradients, where there are any, and Adam's two moments."""
    contexts: int = 0
    """Of a rollout: keys and values of all episodes side by side, and the weights as products want
    them. Of a training pass: what one micro-batch keeps for the backward pass, and its logits."""

    @property
    def certain(self) -> int:
        """What is needed in any case."""
        return self.models + self.training_state

    @property
    def total(self) -> int:
        """With all contexts full."""
        return self.certain + self.contexts


@dataclass(frozen=True)
class MemoryPlan:
    """The times of a run that may need the most."""

    loaded: int
    """What the policy takes before it is sharded."""
    peaks: tuple[Peak, ...]

    @property
    def certain(self) -> int:
        """The most that is needed in any case."""
        return max(peak.certain for peak in self.peaks)

    @property
    def total(self) -> int:
        """The most at any one time."""
        return self._fullest.total

    @property
    def _fullest(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.total)

    def sentence(self, available: int) -> str:
        most = self._fullest
        parts = {
            "models": most.models,
            "gradients and moments": most.training_state,
            "contexts": most.contexts,
        }
        told = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items() if size)
        return (
            f"memory: tensors of at most {self.total / _GIB:.1f} GiB, if all contexts were full "
            f"({most.name}: {told}); {available / _GIB:.1f} are free"
        )

    def require(self, available: int) -> None:
        """Raises ConfigError where not even the models and what trains them fit."""
        if self.certain > available:
            raise ConfigError(
                f"models, gradients and moments need {self.certain / _GIB:.1f} GiB, and "
                f"{available / _GIB:.1f} GiB are free; train adapters (policy.lora), freeze the "
                "embeddings (policy.freeze_embeddings), take a smaller model, free memory, or give "
                "more processes a share each (machine.sharding)"
            )


def plan_memory(
    config: RunConfig, policy: LanguageModel, *, max_turns: int | None, num_ranks: int = 1
) -> MemoryPlan:
    """The plan of a rank with this policy, whose adapters are in place if it has any.

    `max_turns` is the environment's longest episode; None if unknown. The policy is not sharded
    yet, where that is configured.
    """
    model, algorithm = policy.model, config.algorithm
    num_shares = num_ranks if config.machine.sharding == "full" else 1
    whole = _num_bytes(model)
    weights, gathered = whole // num_shares, whole if num_shares > 1 else 0
    learned = _learned_bytes(model, frozen=config.policy.freeze_embeddings) // num_shares
    num_trained = 2 if algorithm.traits.has_critic else 1
    copied = learned if has_adapters(model) else weights
    own = weights * num_trained + (copied if algorithm.keeps_a_copy else 0)
    adam = 2 * learned * num_trained
    first_reference = 0 if has_adapters(model) else weights
    rules, max_steps = config.reference, config.training.max_steps
    is_refreshed = rules.num_after_steps(max_steps) > 0 or rules.refresh_max_kl is not None
    held = own + (weights if is_refreshed else first_reference)
    cache = _cache(policy, config.training, config.agent)
    rollout = cache + _constant_weights(policy)
    activations, logits = _training_pass(policy, config.training, config.agent, max_turns=max_turns)
    if num_shares > 1:
        activations += _gathered_in_a_pass(policy)
    spare = cache if policy.device.type == "cpu" and cache <= MAX_SPARE_BYTES else 0
    supervised, update = activations + logits, num_trained * activations + logits + spare
    peaks = [
        Peak("rollouts", held + gathered, adam, rollout),
        Peak("updates", held, adam + learned * num_trained, update),
    ]
    if config.warm_start.enabled:
        # Embeddings of a model that is built here have to be learned first.
        frozen = config.policy.freeze_embeddings and config.policy.path is not None
        state = 3 * _learned_bytes(model, frozen=frozen) // num_shares
        peaks.append(Peak("warm start", weights, state, supervised))
    if config.has_stage_one:
        peaks.append(Peak("stage 1", whole, 0, rollout))
    if config.distillation.enabled:
        models = weights + first_reference
        peaks.append(Peak("distillation", models, 3 * learned, supervised + spare))
        if is_refreshed:
            name = "distillation at a new reference"
            peaks.append(Peak(name, held, adam + 3 * learned, supervised + spare))
    if has_adapters(model) and policy.device.type == "cpu":
        kept, state = (own, adam) if is_refreshed else (weights, 0)
        peaks.append(Peak("saving a model", kept + gathered + merged_bytes(model), state))
    return MemoryPlan(loaded=whole, peaks=tuple(peaks))


def saved_sizes(config: PolicyConfig, model: PreTrainedModel) -> Sizes:
    """What the model takes on the disk; its adapters are in place if it has any."""
    # Embeddings of a model that is built here are learned in the warm start, frozen or not.
    frozen = config.freeze_embeddings and config.path is not None
    learned, weights = _learned_bytes(model, frozen=frozen), _num_bytes(model)
    if has_adapters(model):
        return Sizes(weights - learned, kept=learned, learned=learned)
    return Sizes(weights, kept=weights, learned=learned)


def _learned_bytes(model: PreTrainedModel, *, frozen: bool) -> int:
    """What is trained: all that requires gradients, without embeddings that are `frozen`."""
    embeddings = model.get_input_embeddings() if frozen else None
    still = {id(p) for p in embeddings.parameters()} if embeddings is not None else set[int]()
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in still]
    return sum(p.numel() * p.element_size() for p in trained)


def _gathered_in_a_pass(policy: LanguageModel) -> int:
    """Weights and gradients of a layer, of the next one, and of all that is in none."""
    layers = [_num_bytes(layer) for layer in decoder_layers(policy.model)]
    outside = _num_bytes(policy.model) - sum(layers)
    return 2 * (outside + 2 * max(layers, default=0))


def _converted(policy: LanguageModel) -> int:
    """The weights in the format of mixed precision."""
    if policy.autocast is None:
        return 0
    return policy.autocast.itemsize * sum(p.numel() for p in policy.model.parameters())


def _constant_weights(policy: LanguageModel) -> int:
    """What `LanguageModel.constant_weights` keeps of weights in another format or order."""
    if policy.autocast is None:
        return num_packed_bytes(policy.model)
    return _converted(policy) + num_packed_bytes(policy.model.get_output_embeddings())


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still get on its device, within a container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available, left = psutil.virtual_memory().available, memory_left()
    return available if left is None else min(available, left)


def _cache(policy: LanguageModel, training: TrainingConfig, agent: AgentConfig) -> int:
    """Keys and values of all episodes that are played side by side."""
    positions = training.num_rows * agent.max_context_tokens
    numbers = 2 * policy.config.num_hidden_layers * _num_key_features(policy.config) * positions
    return numbers * policy.compute_dtype.itemsize


def _training_pass(
    policy: LanguageModel, training: TrainingConfig, agent: AgentConfig, *, max_turns: int | None
) -> tuple[int, int]:
    """What a model keeps of one micro-batch for the backward pass, and the policy's logits.

    What autocast has converted stays until then.
    """
    shape, size = policy.config, policy.model.dtype.itemsize
    num_tokens = training.micro_batch_size * agent.max_context_tokens
    hidden, keys = shape.hidden_size, _num_key_features(shape)
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    # A decoder layer of Llama: two norms with their inputs, projections, attention, the gated MLP.
    layer = 10 * hidden + 4 * keys + 4 * inner
    num_layers = shape.num_hidden_layers
    kept = num_layers * hidden + layer if policy.gradient_checkpointing else num_layers * layer
    sampled = agent.max_context_tokens
    if max_turns is not None:
        sampled = min(sampled, max_turns * agent.max_response_tokens)
    kept_bytes = num_tokens * kept * size
    if keeps_attention_weights(policy.device, policy.autocast):
        weights = num_tokens * (agent.max_context_tokens + QUERIES_PER_BLOCK) // 2
        kept_layers = 1 if policy.gradient_checkpointing else num_layers
        kept_bytes += weights * kept_layers * shape.num_attention_heads * torch.bfloat16.itemsize
    logits = training.micro_batch_size * sampled * shape.vocab_size
    logits = min(logits, max(MAX_LOGITS, shape.vocab_size)) * _LOGIT_TENSORS
    return kept_bytes + _converted(policy), logits * torch.float32.itemsize


def _num_key_features(shape: Any) -> int:
    """K: the width of all keys of a token in one layer."""
    num_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return num_heads * head
