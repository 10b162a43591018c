"""How a model's body is run: number format, memory, and draws that are a function of a seed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 where its format holds less."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the CPU there, which waits for nothing that is queued there.

    From memory that may be paged out, a GPU cannot copy by itself.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def on_device(numbers: Sequence[Any], device: torch.device, **kwargs: Any) -> Tensor:
    """`torch.tensor` of the host's numbers there, which waits for nothing that is queued there."""
    return to_device(torch.tensor(numbers, **kwargs), device)


def indices_of(mask: Tensor, device: torch.device) -> Tensor:
    """Where a mask is True, flattened, int64 on the device; of one on the CPU without waiting."""
    return to_device(mask.flatten().nonzero()[:, 0], device)


def return_freed_memory() -> None:
    """Returns to the system what glibc keeps of main memory that was freed in small pieces.

    After a training pass that is much, in holes between what is still used.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def seeded_torch(seed: int, *, device: torch.device) -> Iterator[None]:
    """Inside, torch draws from this seed; afterwards its global generators are as before."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def decoder_layers(body: nn.Module) -> list[nn.Module]:
    """The layers of a model of transformers that are computed one after another."""
    return [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def recomputed_layers(body: nn.Module) -> Iterator[None]:
    """Gradient checkpointing: inside, a layer keeps its input for the backward pass and no more.

    The rest is computed again when the gradient gets there. The switch of transformers acts in
    training mode only, and training mode is dropout; so the layers are wrapped here.
    """
    layers = decoder_layers(body)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@functools.cache
def _cache_keyword(body: type[nn.Module]) -> str:
    """What the body calls its cache: transformers renamed it in 5.24 and drops the old name."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def body_output(
    body: nn.Module,
    token_ids_RT: Tensor,
    *,
    autocast: torch.dtype | None,
    gradient_checkpointing: bool,
    cache: Cache | None = None,
    **kwargs: Any,
) -> Tensor:
    """The last hidden states [R, T, H]; `autocast` None computes in the format of the weights."""
    if cache is not None:
        kwargs |= {_cache_keyword(type(body)): cache, "use_cache": True}
    recompute = gradient_checkpointing and torch.is_grad_enabled()
    with (
        torch.autocast(token_ids_RT.device.type, dtype=autocast, enabled=autocast is not None),
        recomputed_layers(body) if recompute else contextlib.nullcontext(),
    ):
        return body(input_ids=token_ids_RT, **kwargs).last_hidden_state


def padded_length(length: int) -> int:
    """The next of 16 lengths per octave: at most one sixteenth more.

    Kernels for CPU keep what they prepared for every shape they have met: with lengths of all kinds
    a process grew by 8 GB in half an hour (docs/log.md).
    """
    unit = _padding_unit(length)
    return -(-length // unit) * unit


def longest_within(limit: int) -> int:
    """The largest length that does not become longer than the limit when it is padded."""
    return limit - limit % _padding_unit(limit)


def _padding_unit(length: int) -> int:
    return 1 << max(length.bit_length() - 5, 0)


def read_nothing(*_: Tensor) -> tuple[Tensor, ...]:
    """Makes nothing of a pass."""
    return ()


def in_pieces(
    compute: Callable[..., tuple[Tensor, ...]], *rows: Tensor, max_rows: int
) -> tuple[Tensor, ...]:
    """What `compute` makes of tensors [N, ...], in calls with at most `max_rows` rows of each.

    Its results [n, ...] are joined. Of several pieces only the inputs are kept for the backward
    pass, in which they are computed again one after another; a single one is computed as ever.
    """
    pieces = list(zip(*(each.split(max_rows) for each in rows), strict=True))
    if len(pieces) == 1:
        return compute(*rows)
    found = [
        # Nothing in a piece is drawn at random.
        checkpoint(compute, *piece, use_reentrant=False, preserve_rng_state=False)
        for piece in pieces
    ]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
