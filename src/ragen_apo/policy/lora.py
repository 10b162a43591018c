"""Low-rank adapters: a layer computes W x + (alpha / rank) B A x, and only A and B are trained.

Source: Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models". peft puts them into
the linear layers of a model's body, where generation and scoring pass through them without knowing.
B starts at zero and W never changes: new adapters change no output, and switching adapters off
gives the original model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ragen_apo.config.policy import ADAPTER_SETTINGS, ALL_LINEAR, LoraConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy.passes import seeded_torch

_ADAPTER = "default"
_MARK = ".lora_"
"""Occurs in the name of every tensor of an adapter, and `_BASE` in those of the layer below it."""
_BASE = ".base_layer"


def require_peft() -> None:
    """Raises ConfigError if the package that makes adapters is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(
            "policy.lora needs the package peft, which is not installed: pip install peft, or set "
            "policy.lora to null to train all weights"
        )


def add_adapters(model: PreTrainedModel, settings: LoraConfig, *, seed: int) -> None:
    """Puts new adapters into the model and freezes everything else; they are float32.

    Their weights are a function of seed and device. Raises ConfigError where `require_peft` does,
    for target modules that the body of the model does not have or that are not linear layers alone,
    and for `all-linear` where most of the model could get none.
    """
    require_peft()
    import peft

    linear = _linear_layers(model)
    wanted = settings.target_modules
    if wanted == [ALL_LINEAR]:
        _refuse_fused_layers(model)
        wanted = list(linear)
    unknown = sorted(set(wanted) - set(linear))
    if unknown:
        raise ConfigError(
            f"policy.lora.target_modules: {type(model).__name__} has no linear layer named "
            f"{', '.join(unknown)}; expected {ALL_LINEAR} alone or some of "
            f"{', '.join(sorted(linear))}"
        )
    others = {
        name.rpartition(".")[2]
        for name, module in model.base_model.named_modules()
        if not isinstance(module, nn.Linear | Conv1D)
    }
    if ambiguous := sorted(set(wanted) & others):
        raise ConfigError(
            f"policy.lora.target_modules: in {type(model).__name__} not only linear layers are "
            f"named {', '.join(ambiguous)}, and layers are found by their names; expected some of "
            f"{', '.join(sorted(set(linear) - others))}"
        )
    wishes = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(wanted),
        fan_in_fan_out=any(isinstance(linear[name], Conv1D) for name in wanted),
    )
    try:
        with seeded_torch(seed, device=model.device):
            peft.inject_adapter_in_model(wishes, model.base_model, adapter_name=_ADAPTER)
        reached = {name.rpartition(".")[2] for name, _ in _adapted_layers(model)}
    except ValueError:  # it misses others that it takes for parts of the same experts
        reached = set()
    if not reached.issuperset(wanted):
        raise ConfigError(
            f"policy.lora.target_modules is [{', '.join(wanted)}], and peft takes some of these "
            f"names for the experts of {type(model).__name__}, which are no linear layers; leave "
            "out gate_proj, up_proj and down_proj, or train all weights (policy.lora: null)"
        )
    for name, parameter in model.named_parameters():
        if _MARK in name:
            parameter.data = parameter.data.float()
    freeze_all_but_adapters(model)


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of the body, one of each name, such as `q_proj`."""
    return {
        name.rpartition(".")[2]: module
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def _refuse_fused_layers(model: PreTrainedModel) -> None:
    """Refuses a mixture of experts whose experts are one tensor, with no layer to adapt."""
    layers = [m for m in model.base_model.modules() if isinstance(m, nn.Linear | Conv1D)]
    num_adapted = sum(layer.weight.numel() for layer in layers)
    fused = {
        name: parameter.numel()
        for name, parameter in model.base_model.named_parameters()
        if parameter.ndim == 3  # one matrix for each expert
    }
    if fused:
        share = num_adapted / (num_adapted + sum(fused.values()))
        names = sorted({name.rpartition(".")[2] for name in fused})
        kinds = sorted(_linear_layers(model))
        raise ConfigError(
            f"policy.lora.target_modules is {ALL_LINEAR}, and the experts of "
            f"{type(model).__name__} ({', '.join(names)}) are no linear layers but one tensor a "
            f"layer, which adapters do not reach: {share:.0%} of its weights would be adapted. If "
            f"that is meant, name the layers: [{', '.join(kinds)}]; else train all weights "
            "(policy.lora: null), or take a model without experts"
        )


def has_adapters(model: nn.Module) -> bool:
    """Whether there are adapters in the model."""
    return any(_MARK in name for name, _ in model.named_parameters())


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Leaves gradients to the adapters alone; changes nothing where there are none."""
    if has_adapters(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_MARK in name)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training may change, each once, or this rank's shares of them.

    With adapters those that require gradients, without them all, buffers and frozen ones included.
    """
    if has_adapters(model):
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    return {name: state[name].detach().contiguous() for name in names.values()}


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the adapters have no effect."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def plain_weights(model: nn.Module, *, adapters: bool) -> dict[str, Tensor]:
    """The state of the model under the names that it has without adapters.

    With `adapters`, these are added to the weights in float32. The sum is rounded to the weights'
    format and kept in main memory, because a GPU may have no room for a second copy of the model.
    """
    weights = {
        name.replace(_BASE, ""): tensor
        for name, tensor in model.state_dict().items()
        if _MARK not in name
    }
    if adapters and has_adapters(model):
        for name, layer in _adapted_layers(model):
            weight = weights[f"{name}.weight"]
            merged = weight.float() + layer.get_delta_weight(_ADAPTER).float()
            weights[f"{name}.weight"] = merged.to(weight.dtype).cpu()
    return weights


def merged_bytes(model: nn.Module) -> int:
    """What `plain_weights` takes in main memory for the sums of weights and adapters."""
    weights = [layer.get_base_layer().weight for _, layer in _adapted_layers(model)]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def update_digest(digest: hashlib._Hash, tensors: Mapping[str, Tensor]) -> None:
    """Adds names, shapes, formats and all bits of the tensors to a hash, whatever their order."""
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().tobytes())


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the adapters under the names that peft gives them in its files."""
    return {
        f"base_model.model.{name.replace(f'.{_ADAPTER}', '')}": tensor.detach()
        for name, tensor in model.state_dict().items()
        if _MARK in name
    }


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """What the file `adapter_config.json` of peft says of the adapters."""
    layers = dict(_adapted_layers(model))
    first = next(iter(layers.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": first.r[_ADAPTER],
        "lora_alpha": first.lora_alpha[_ADAPTER],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": bool(getattr(first, "fan_in_fan_out", False)),
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "inference_mode": True,
    }


def save_adapters(
    model: nn.Module, folder: Path, *, base: str | None = None, revision: str | None = None
) -> None:
    """Writes the adapters to a folder as peft does: settings and safetensors.

    `base` is the folder, or name at a hub and there its `revision`, of the model that they were
    added to, for `AutoPeftModelForCausalLM`, which loads both.
    """
    tensors = {name: tensor.contiguous() for name, tensor in adapter_tensors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = adapter_settings(model) | {"base_model_name_or_path": base, "revision": revision}
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module
