"""What the machine multiplies fast, and what `machine.mixed_precision: auto` makes of it."""

from __future__ import annotations

import torch

BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16")
"""Features of a processor that multiplies bfloat16; others convert every number, which is slower
than float32."""
AMPERE = 8
"""The first major compute capability of GPUs whose tensor cores multiply bfloat16."""


def processor_has(*features: str) -> bool:
    """Whether the processor has one of them, by torch's names.

    False where this version of PyTorch cannot tell.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(feature, False) for feature in features)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones there."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= AMPERE
    # oneDNN multiplies them. Some builds of PyTorch lack it, and ONEDNN_MAX_CPU_ISA can forbid it.
    return (
        processor_has(*BFLOAT16_UNITS)
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def chosen_precision(configured: str, device: torch.device, *, begun_with: str | None) -> str:
    """`none` or `bfloat16`: what is configured; for `auto` what the run began with, if it has."""
    if configured != "auto":
        return configured
    return begun_with or ("bfloat16" if multiplies_bfloat16(device) else "none")
