"""A pretend GPU that computes on the CPU, for tests of the code that runs on CUDA.

    with PretendGpu() as gpu:
        torch.nn.Module.to(model, "cuda")   # its tensors say that they are on cuda:0
        ...
    gpu.waits                               # how often the host would have waited for the device

Every operator runs on CPU tensors, so its numbers are those of the CPU. What CUDA refuses is an
error: an operator that gets a tensor of the GPU and one of the CPU raises `WrongDeviceError`. A
copy may, a number without axes may be anywhere, and an index on the CPU is brought to the GPU.
`.numpy()` is an error too, as of any tensor that is not on the CPU.

A CUDA graph repeats the operators that it has recorded, on the same tensors; to read a number while
recording is an error.

Inside torch these tensors are of the device `meta:1`, with which autograd needs no driver, and each
request for `cuda` becomes one for it. Left out: autocast, how CUDA's kernels round, which it lacks
and which wait of themselves, streams, several GPUs, generators (the CPU's draws).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

GPU = torch.device("cuda", 0)
_INSIDE = torch.device("meta", 1)
"""What torch takes the GPU for; the other `meta` has no index."""

_COPIES = ("copy_", "_to_copy")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
_WAITS = {"_local_scalar_dense": "item", "is_nonzero": "item", "equal": "equal"}
_WAITS |= dict.fromkeys(("nonzero", "masked_select", "_unique2", "unique_dim"), "size")


class WrongDeviceError(Exception):
    """CUDA would refuse it: tensors of two devices in one operator."""


class OnGpu(Tensor):
    """A tensor of the pretend GPU; `within` [the same shape] is on the CPU and has its numbers."""

    within: Tensor
    device = GPU  # pyright: ignore[reportAssignmentType]
    is_cuda, is_meta = True, False  # pyright: ignore[reportAssignmentType]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, within: Tensor) -> OnGpu:
        assert within.device.type == "cpu" and not isinstance(within, OnGpu)
        made = Tensor._make_wrapper_subclass(
            cls, within.shape, strides=within.stride(), dtype=within.dtype, device=_INSIDE
        )
        made.within = within
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.within})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} got a tensor of a pretend GPU outside of it")


class PretendGpu(contextlib.ExitStack):
    """Inside, there is a GPU; `waits` counts how often the host waits for it, by kind.

    `item`: a number is read. `equal`. `size`: that of the result depends on numbers (`nonzero`,
    `unique`, `masked_select`). `mask`: likewise, of a boolean index. `to cpu`, `to gpu`: copies,
    but for those from pinned memory that need not be waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    @property
    def num_operators(self) -> int:
        """How many the host has asked the device for, one by one."""
        return self._dispatch.num_operators

    def __enter__(self) -> PretendGpu:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
        self._dispatch = _Dispatch(self.waits)
        graphs = {"CUDAGraph": functools.partial(Graph, self._dispatch)}
        for name, pretended in (_CUDA | graphs).items():
            self.enter_context(patch.object(torch.cuda, name, pretended))
        # AdamW asks it for its stream; where torch is built for CUDA, that looks for a driver.
        self.enter_context(patch.object(torch.accelerator, "current_accelerator", lambda **_: None))
        self.enter_context(self._dispatch)
        self.enter_context(_Functions())
        return self


_CUDA: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda *_: None,  # the CPU's generator draws
    "mem_get_info": lambda *_: (2**36, 2**36),
    "max_memory_allocated": lambda *_: 2**20,
    "Stream": MagicMock,
    "current_stream": MagicMock,
    "stream": contextlib.nullcontext,
}


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self, dispatch: _Dispatch) -> None:
        self._dispatch = dispatch
        self._operators: list[_Operator] = []

    def capture_begin(self, **_: Any) -> None:
        self._dispatch.recording = self._operators

    def capture_end(self) -> None:
        self._dispatch.recording = None

    def replay(self) -> None:
        assert self._operators and self._dispatch.recording is None
        for operator in self._operators:
            operator.repeat()

    @property
    def output(self) -> Tensor:
        """What the last operator gives, on the CPU."""
        return self._operators[-1].result


class _Functions(TorchFunctionMode):
    """Asks for `meta:1` where `cuda` is asked for, and does what torch would not do for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_as_inside, (args, kwargs or {}))
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            return func(*args, **kwargs | {"device": None}).to(device)
        if func is Tensor.pin_memory and not isinstance(args[0], OnGpu):
            pinned = args[0].clone()
            pinned.is_pretended_pinned = True  # pyright: ignore[reportAttributeAccessIssue]
            return pinned
        if args and isinstance(args[0], OnGpu):
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                args = (args[0], tuple(map(_index_on_gpu, index)), *args[2:])
            if func is Tensor.pin_memory:
                raise RuntimeError("only memory of the CPU can be pinned")
            if func is Tensor.tolist:
                return args[0].cpu().tolist()
            if func in (Tensor.untyped_storage, Tensor.data_ptr):
                return func(args[0].within)
            if func is torch.nn.functional.scaled_dot_product_attention:
                return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _as_inside(given: Any) -> Any:
    if isinstance(given, torch.device):
        return _INSIDE if given.type == "cuda" else given
    return _INSIDE if isinstance(given, str) and given.partition(":")[0] == "cuda" else given


def _index_on_gpu(index: Any) -> Any:
    """CUDA brings a list, or a CPU tensor, to the device and waits for it."""
    if isinstance(index, list):
        index = torch.tensor(index)
    is_elsewhere = isinstance(index, Tensor) and not isinstance(index, OnGpu)
    return index.to(_INSIDE) if is_elsewhere else index


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """By the kernel that a CPU has."""
    dropout, causal = options.pop("dropout_p", 0.0), options.pop("is_causal", False)
    options.pop("enable_gqa", None)  # that kernel always shares keys among heads
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, attn_mask=attn_mask, **options
    )[0]


@dataclass(frozen=True)
class _Operator:
    """One that was recorded, on the tensors within."""

    func: Any
    args: Any
    kwargs: Any
    result: Any

    def repeat(self) -> None:
        """Computes it again, into what it has given before."""
        again = self.func(*self.args, **self.kwargs)
        for old, new in zip(tree_leaves(self.result), tree_leaves(again), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)


class _Dispatch(TorchDispatchMode):
    """Runs each operator on the tensors within."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits
        self.num_operators = 0
        self.recording: list[_Operator] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        kwargs.pop("pin_memory", None)  # this build cannot pin memory
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_on_gpu = any(isinstance(each, OnGpu) for each in tensors)
        asked = kwargs.get("device")
        gives_gpu = is_on_gpu if asked is None else asked == _INSIDE
        others = [each for each in tensors if not isinstance(each, OnGpu) and each.ndim > 0]
        if is_on_gpu and others and name not in _COPIES:
            shapes = [(str(each.device), tuple(each.shape)) for each in tensors]
            raise WrongDeviceError(f"{func} got tensors of two devices: {shapes}")
        if torch.is_inference_mode_enabled():  # operators come before torch has taken them apart
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if is_on_gpu or gives_gpu:
            before = self.waits.total()
            if not (kwargs.get("non_blocking") and getattr(args[0], "is_pretended_pinned", False)):
                self._count(name, args, gives_gpu=gives_gpu)
            if self.recording is not None and self.waits.total() > before:
                raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        if gives_gpu and asked is not None:
            kwargs["device"] = torch.device("cpu")
        args_within, kwargs_within = tree_map_only(OnGpu, lambda each: each.within, (args, kwargs))
        result = func(*args_within, **kwargs_within)
        if is_on_gpu or gives_gpu:
            self.num_operators += 1
            if self.recording is not None:
                self.recording.append(_Operator(func, args_within, kwargs_within, result))
        if func._schema.is_mutable and isinstance(result, Tensor):
            return args[0]
        return tree_map_only(Tensor, OnGpu, result) if gives_gpu else result

    def _count(self, name: str, args: Any, *, gives_gpu: bool) -> None:
        if name in _COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = isinstance(args[0], OnGpu) if name == "copy_" else gives_gpu
            if isinstance(source, OnGpu) != target and source.ndim + (not target) > 0:
                self.waits["to gpu" if target else "to cpu"] += 1
        elif name in _INDEXED:
            masks = [each for each in args[1] if each is not None and each.dtype is torch.bool]
            is_filled = name != "index" and args[2].ndim == 0 and not isinstance(args[2], OnGpu)
            if masks and not is_filled:
                self.waits["mask"] += len(masks)
        elif name in _WAITS:
            self.waits[_WAITS[name]] += 1
