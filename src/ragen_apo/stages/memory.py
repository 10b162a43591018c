"""How much memory a run may need at most, known before anything is computed.

    weights + second model + gradients and moments + the larger of (a rollout, a training pass)

Where weights are in shares, a rank has its part of these, and all weights besides while it plays.
The first three are certain. The others count every context as full, which few are, so the sum is an
upper bound for the tensors. On a CPU the process needs about 0.5 GiB besides, for its libraries.
What a run needed is `peak_memory_bytes` in run.json. Sizes are in bytes.

Axes of the sizes below: H hidden, K keys (of all key-value heads), I intermediate, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from ragen_apo.config import RunConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.lora import has_adapters
from ragen_apo.policy.packed_weights import num_packed_bytes
from ragen_apo.policy.passes import decoder_layers

_GIB = 2**30
_LOGIT_TENSORS = 4
"""Logits, their log-softmax, its gradient, and the products of the entropy, all [N, V]."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at most, by what holds them."""

    weights: int
    """Of the policy."""
    other_models: int
    """Of the reference, where it is a model of its own, of a critic, and of a lagged policy."""
    training_state: int
    """Gradients and Adam's two moments."""
    rollout: int
    """Keys and values of all episodes side by side, and the weights as products want them."""
    training_pass: int
    """What one micro-batch keeps for the backward pass, and its logits."""
    gathered: int = 0
    """All weights, where `weights` is a share of them, while they play or are saved."""

    @property
    def loaded(self) -> int:
        """What the policy takes before it is sharded."""
        return max(self.weights, self.gathered)

    @property
    def certain(self) -> int:
        """What is needed in any case."""
        return max(self._training, self._playing)

    @property
    def total(self) -> int:
        """The most at any one time."""
        return max(self._training + self.training_pass, self._playing + self.rollout)

    @property
    def _training(self) -> int:
        return self.weights + self.other_models + self.training_state

    @property
    def _playing(self) -> int:
        """Gathered weights may take the place of the gradients, which are there at updates only."""
        gradients = self.training_state // 3
        return self._training + max(self.gathered - gradients, 0)

    def sentence(self, available: int) -> str:
        """One line for people."""
        parts = {
            "models": self.weights + self.other_models,
            "gradients and moments": self.training_state,
            "a rollout": self.gathered + self.rollout,
            "a training pass": self.training_pass,
        }
        told = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
        return (
            f"memory: tensors of at most {self.total / _GIB:.1f} GiB, if all contexts were full "
            f"({told}); {available / _GIB:.1f} are free"
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
    model = policy.model
    num_shares = num_ranks if config.machine.sharding == "full" else 1
    weights = _num_bytes(model)
    frozen = model.get_input_embeddings() if config.policy.freeze_embeddings else None
    still = {id(p) for p in frozen.parameters()} if frozen is not None else set[int]()
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in still]
    learned = sum(p.numel() * p.element_size() for p in trained)
    state = 3 * learned
    others = 0 if has_adapters(model) else weights
    others += learned if config.algorithm.keeps_a_copy else 0
    if config.algorithm.traits.has_critic:
        others, state = others + weights, 2 * state
    training_pass = _training_pass(config, policy, max_turns=max_turns)
    if num_shares > 1:
        num_models = 2 if config.algorithm.traits.has_critic else 1
        training_pass += num_models * _gathered_in_a_pass(policy)
    return MemoryPlan(
        weights=weights // num_shares,
        other_models=others // num_shares,
        training_state=state // num_shares,
        rollout=_rollout(config, policy),
        training_pass=training_pass,
        gathered=weights if num_shares > 1 else 0,
    )


def _gathered_in_a_pass(policy: LanguageModel) -> int:
    """Weights and gradients of a layer, of the next one, and of all that is in none.

    What autocast has converted stays until the backward pass.
    """
    layers = [_num_bytes(layer) for layer in decoder_layers(policy.model)]
    outside = _num_bytes(policy.model) - sum(layers)
    return 2 * (outside + 2 * max(layers, default=0)) + _converted(policy)


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
    """Bytes that this process can still get on its device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _rollout(config: RunConfig, policy: LanguageModel) -> int:
    size = policy.compute_dtype.itemsize
    positions = config.training.num_rows * config.agent.max_context_tokens
    cache = 2 * policy.config.num_hidden_layers * _num_key_features(policy.config) * positions
    return cache * size + _constant_weights(policy)


def _training_pass(config: RunConfig, policy: LanguageModel, *, max_turns: int | None) -> int:
    shape, size = policy.config, policy.model.dtype.itemsize
    num_tokens = config.training.micro_batch_size * config.agent.max_context_tokens
    hidden, keys = shape.hidden_size, _num_key_features(shape)
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    # A decoder layer of Llama: two norms with their inputs, projections, attention, the gated MLP.
    layer = 10 * hidden + 4 * keys + 4 * inner
    num_layers = shape.num_hidden_layers
    kept = num_layers * hidden + layer if policy.gradient_checkpointing else num_layers * layer
    sampled = config.agent.max_context_tokens
    if max_turns is not None:
        sampled = min(sampled, max_turns * config.agent.max_response_tokens)
    logits = config.training.micro_batch_size * sampled * shape.vocab_size * _LOGIT_TENSORS
    return num_tokens * kept * size + logits * torch.float32.itemsize


def _num_key_features(shape: Any) -> int:
    """K: the width of all keys of a token in one layer."""
    num_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return num_heads * head
