"""Linear layers with packed weights, for a CPU and for as long as no weight changes.

    with packed_weights(model):   each weight is packed at its first product
        model(...)                oneDNN multiplies what is packed
                                  afterwards the layers are as they were

oneDNN reads a weight in an order of its own. PyTorch brings a bfloat16 weight into that order anew
for every product. For float32 it asks MKL, which reaches 0.4 of oneDNN's rate on AMD's processors
(docs/log.md; a rollout's gain is in benchmarks/results/packed_weights.md). The results are rounded
otherwise in float32, and were the same bits in bfloat16 where that was looked at.

The two operators are those with which PyTorch's own compiler multiplies frozen weights
(torch/_inductor/fx_passes/mkldnn_fusion.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ragen_apo.policy.precision import multiplies_bfloat16, processor_has

_FEATURE = "avx512_f"
"""Of processors on which packing was measured; others multiply as PyTorch does."""
_FORMATS = (torch.float32, torch.bfloat16)
MAX_BYTES = 2 * 2**30
"""Of weights that are packed: a second copy of more is worth less than the memory that it takes."""


@contextlib.contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Inside, no weight may change. Products that need a gradient are computed as ever.

    Layers that are packed already stay so. Until the end, each takes the memory of its weight once
    more, in the format of its products; a model of more than `MAX_BYTES` is left as it is.
    """
    layers = _packable_layers(model)
    try:
        for layer in layers:
            layer.forward = _packed_forward(layer)  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        for layer in layers:
            # The instance's: that of its class is seen again. Ctrl-C may have come before the last.
            vars(layer).pop("forward", None)


def num_packed_bytes(model: nn.Module | None) -> int:
    """What the packed weights take in the format of the weights; 0 for None."""
    return 0 if model is None else _num_bytes(_packable_layers(model))


def _packable_layers(model: nn.Module) -> list[nn.Linear]:
    layers = [each for each in model.modules() if _can_be_packed(each)]
    return layers if _num_bytes(layers) <= MAX_BYTES else []


def _num_bytes(layers: Sequence[nn.Linear]) -> int:
    return sum(each.weight.numel() * each.weight.element_size() for each in layers)


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _FORMATS
        and "forward" not in vars(module)
        and processor_has(_FEATURE)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The layer's product with what it packs at the first one, in each format that is asked for."""
    as_ever, packed = layer.forward, dict[torch.dtype, tuple[Tensor, Tensor | None] | None]()

    def forward(inputs: Tensor) -> Tensor:
        dtype = inputs.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        elif dtype != layer.weight.dtype:
            return as_ever(inputs)
        if inputs.requires_grad and torch.is_grad_enabled():
            return as_ever(inputs)
        if dtype not in packed:
            packed[dtype] = _pack(layer, dtype) if _is_fast(dtype) else None
        parts = packed[dtype]
        if parts is None:
            return as_ever(inputs)
        weight, bias = parts
        return torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), weight, bias, "none", [], "")

    return forward


def _pack(layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and bias for products of this format."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype), None)
    return weight, None if layer.bias is None else layer.bias.detach().to(dtype)


def _is_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast products of this format here."""
    if dtype is torch.bfloat16:
        return multiplies_bfloat16(torch.device("cpu"))
    return dtype is torch.float32
