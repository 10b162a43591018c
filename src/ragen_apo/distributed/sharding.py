"""Weights, gradients and moments in shares: FSDP2's `fully_shard`, and what it does not do.

Every parameter of a sharded module is a DTensor of which a rank holds a slice of the first axis,
and so are its gradient and its moments. A layer is whole on a rank only while it computes. So a
forward or a backward pass is an exchange with the other ranks: all of them have to make equally
many, in the same order.

    run      a forward pass, with gradients or without
    whole    the same module without shares, for what is none: playing, hashing, saving

Gradients are added up over the ranks, not averaged: losses are divided by the counts of all.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ragen_apo.errors import ConfigError

Result = TypeVar("Result")
"""Tensors, by themselves or in a tuple: where a backward pass begins FSDP hears of it by them."""


def require_fully_shard() -> None:
    """Raises ConfigError where this torch cannot add gradients up over shares."""
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(
            f"machine.sharding is full, which torch {torch.__version__} does not have all of; "
            "install torch 2.13 or a later one, or set machine.sharding to none"
        )


def shard(module: nn.Module, layers: Sequence[nn.Module], *, num_ranks: int) -> None:
    """Leaves this rank its share of all parameters of the module, in place.

    Each of the `layers`, from the inside to the outside, is gathered by itself, the rest together.
    From now on the module is called by its forward alone; optimizers are made afterwards.
    """
    gc.collect()  # sharded modules refer to themselves: an earlier reference would keep its memory
    device = next(module.parameters()).device
    mesh = init_device_mesh(device.type, (num_ranks,))
    for part in (*layers, module):
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


class _Root(nn.Module):
    """Calls parts of a module inside one forward pass of the whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class Shards:
    """The shares of a module whose parts are called one by one."""

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], *, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._module = module
        self._twin = _without_weights(module)
        self._no_weights = dict(self._twin.named_parameters(remove_duplicate=False))
        self._root = _Root(module)
        self._is_whole = False
        shard(self._root, layers, num_ranks=num_ranks)

    def run(self, compute: Callable[[], Result]) -> Result:
        """The tensors of `compute`, which calls parts of the module; gradients reach the shares."""
        return self._root(compute)

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Inside, a copy of the module has all weights, as on every other rank.

        It is a module like any other: no call of it is an exchange. Nothing that is done to its
        weights comes back.
        """
        if self._is_whole:
            yield self._twin
            return
        _place(self._twin, self._gathered())
        self._is_whole = True
        try:
            yield self._twin
        finally:
            _place(self._twin, self._no_weights)
            self._is_whole = False

    def _gathered(self) -> dict[str, nn.Parameter]:
        """All weights by name; tied ones are one parameter."""
        seen: dict[int, nn.Parameter] = {}
        found: dict[str, nn.Parameter] = {}
        for name, share in self._module.named_parameters(remove_duplicate=False):
            if id(share) not in seen:
                weights = whole_tensor(share.detach())
                seen[id(share)] = nn.Parameter(weights, requires_grad=share.requires_grad)
            found[name] = seen[id(share)]
        return found


def _without_weights(module: nn.Module) -> nn.Module:
    """A copy of the module with the same buffers, whose parameters take no memory."""
    others: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        others[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
    return copy.deepcopy(module, others)


def _place(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, own_name = name.rpartition(".")
        setattr(module.get_submodule(owner), own_name, parameter)


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that is in shares, which every rank has to ask for; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """All of each tensor, those in shares on the CPU; only where `keep`, else nothing.

    They are gathered one after another, so that a rank that keeps none needs memory for one.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor)
        if keep:
            found[name] = whole if whole is tensor else whole.cpu()
    return found


def assign(target: Tensor, whole: Tensor) -> None:
    """Overwrites a tensor, or this rank's share of it, with the values of a whole one."""
    if isinstance(target, DTensor):
        whole = distribute_tensor(
            whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(whole)


def share_bytes(tensor: Tensor) -> int:
    """What a tensor takes on this rank."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()
