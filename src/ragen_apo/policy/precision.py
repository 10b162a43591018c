"""Which format matrix products have: `machine.mixed_precision: auto` asks the machine."""

from __future__ import annotations

import torch

BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16")
"""Features of a processor that multiplies bfloat16; others convert every number, which is slower
than float32."""
AMPERE = 8
"""The first major compute capability of GPUs whose tensor cores multiply bfloat16."""


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones there."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= AMPERE
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # older torch cannot say
    return any(capabilities.get(unit, False) for unit in BFLOAT16_UNITS)


def chosen_precision(configured: str, device: torch.device, *, begun_with: str | None) -> str:
    """`none` or `bfloat16`: what is configured; for `auto` what the run began with, if it has."""
    if configured != "auto":
        return configured
    return begun_with or ("bfloat16" if multiplies_bfloat16(device) else "none")
