"""Attention for generation, scoring and training, on every device.

`attend` chooses one of four ways:

- prompts of several rows, read in one pass: a `PromptSlice` each, by PyTorch's kernel; on a GPU
  all of them as one batch (`PaddedPrompts`);
- one new token a row, on a CPU: two matrix products (`_of_one_token`);
- whole rows in mixed precision, on a CPU: by blocks of queries (`in_blocks`);
- everything else, and everything on CPUs with matrix units for bfloat16 (AMX), where PyTorch's
  kernel is faster: PyTorch's kernel. There, short rows that are trained on get its gradients in
  float32 (`exact_backwards`).

Further axes (`ragen_apo.types` has the others): A attention heads, D width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ragen_apo.policy.passes import at_least_float32, on_device
from ragen_apo.policy.precision import processor_has

ATTENTION = "ragen_apo"
"""The name by which transformers knows `attend`."""
QUERIES_PER_BLOCK = 128
NUMBERS_OF_SHORT_HEADS = 2**14
"""Tokens times numbers of a head, up to which float32 gradients are the faster ones."""


def whole_rows(device: torch.device) -> dict[str, Any]:
    """Arguments of a pass over whole rows, to which attention is causal as without them.

    transformers takes a mask of four axes as it is. Without a mask it would look whether positions
    start anew within a row, for which the host waits for a GPU.
    """
    return {"attention_mask": torch.zeros(1, 1, 1, 1, device=device), "whole_rows": True}


def mask_of_later(positions: Tensor, num_positions: int, *, dtype: torch.dtype) -> Tensor:
    """Added to the scores of queries at `positions` [...], it hides later ones [..., L]."""
    is_later = torch.arange(num_positions, device=positions.device) > positions[..., None]
    mask = torch.zeros(is_later.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(is_later, float("-inf"))


@dataclass(frozen=True)
class PromptSlice:
    """The new tokens of one row, in a pass that reads the prompts of several rows."""

    slot: int
    """The row's index in the KV cache."""
    tokens: slice
    """The positions of its new tokens in the pass."""
    length: int
    """The number of tokens of its context, the new ones included."""
    mask: Tensor | None = None
    """Added to the scores [1, 1, T, length]; None for a single token and for a whole context."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    @property
    def start(self) -> int:
        """The position of its first new token."""
        return self.length - self.num_tokens

    def with_mask(self, *, dtype: torch.dtype, device: torch.device) -> PromptSlice:
        """With the mask that attention needs."""
        if self.start == 0 or self.num_tokens == 1:
            return self
        positions_T = torch.arange(self.start, self.length, device=device)
        return replace(self, mask=mask_of_later(positions_T, self.length, dtype=dtype)[None, None])


@dataclass(frozen=True)
class PaddedPrompts:
    """The slices of a pass as one batch, for a GPU: a few kernels a layer in place of some a row.

    L is the longest context of the batch, and N the tokens of the pass.
    """

    slots_R: Tensor
    tokens_RT: Tensor
    """Each row's new tokens, as positions in the pass; padding repeats some token of it."""
    unpadded_N: Tensor
    """Where the tokens of the pass are in the batch [R * T]."""
    mask_R1TL: Tensor
    """Added to the scores."""

    @classmethod
    def of(
        cls, slices: Sequence[PromptSlice], *, dtype: torch.dtype, device: torch.device
    ) -> PaddedPrompts:
        """The batch of these slices, which follow each other in the pass."""
        longest = max(each.num_tokens for each in slices)
        num_positions = max(each.length for each in slices)
        numbers = [[each.slot, each.tokens.start, each.start] for each in slices]
        slots_R, first_R, start_R = on_device(numbers, device).unbind(1)
        unpadded = [
            row * longest + index
            for row, each in enumerate(slices)
            for index in range(each.num_tokens)
        ]
        offset_T = torch.arange(longest, device=device)
        mask_RTL = mask_of_later(start_R[:, None] + offset_T, num_positions, dtype=dtype)
        return cls(
            slots_R=slots_R,
            tokens_RT=(first_R[:, None] + offset_T).clamp(max=len(unpadded) - 1),
            unpadded_N=on_device(unpadded, device),
            mask_R1TL=mask_RTL[:, None],
        )

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        """As `attend` below: [1, A, N, D] to [1, N, A, D]."""
        num_positions = self.mask_R1TL.shape[-1]
        attended_RTAD, _ = sdpa_attention_forward(
            module,
            query[0, :, self.tokens_RT].transpose(0, 1),
            key[self.slots_R, :, :num_positions],
            value[self.slots_R, :, :num_positions],
            self.mask_R1TL,
            **kwargs,
        )
        return attended_RTAD.flatten(0, 1)[self.unpadded_N][None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, for transformers: [R, A, T, D] to [R, T, A, D].

    With `prompt_slices`, the query is [1, A, T, D], keys and values are those of all slots, and
    each slice attends to its own.
    """
    if kwargs.pop("whole_rows", False):
        attention_mask = None
    prompt_slices: Sequence[PromptSlice] | PaddedPrompts | None = kwargs.pop("prompt_slices", None)
    if isinstance(prompt_slices, PaddedPrompts):
        attended = prompt_slices.attend(
            module, query, key, value, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended, None
    if prompt_slices is not None:
        parts = [
            sdpa_attention_forward(
                module,
                query[:, :, each.tokens],
                key[each.slot, None, :, : each.length],
                value[each.slot, None, :, : each.length],
                each.mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )[0]
            for each in prompt_slices
        ]
        return torch.cat(parts, dim=1), None
    changed = {"softcap", "position_bias"} & {n for n, given in kwargs.items() if given is not None}
    is_plain = not changed and dropout == 0
    if query.device.type == "cpu" and is_plain and not has_matrix_units():
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        if attention_mask is None:
            is_whole_row = query.shape[2] == key.shape[2]
            formats = query.dtype, key.dtype, value.dtype
            if is_whole_row and formats == (torch.float32, torch.float32, torch.bfloat16):
                return in_blocks(query, key, value, scaling=factor), None
        elif query.shape[2] == 1 and attention_mask.is_floating_point():
            return _of_one_token(query, key, value, attention_mask, scaling=factor), None
    own = getattr(module, "is_causal", True)
    is_causal = attention_mask is None and kwargs.get("is_causal", own) is not False
    if is_plain and is_causal and is_slow_backwards(query, key, value):
        repeats = query.shape[1] // key.shape[1]
        attended = exact_backwards(
            query, repeat_kv(key, repeats), repeat_kv(value, repeats), scaling=scaling
        )
        return attended.transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def is_slow_backwards(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the fused kernel's gradients in bfloat16 take longer than in float32 on this CPU.

    They do for short rows where there are matrix units: 3 to 4 times for 64 to 128 tokens of 32
    numbers a head. `benchmarks/results/attention_gradients.md` has the times behind the limit.
    """
    return (
        torch.is_grad_enabled()
        and query.device.type == "cpu"
        and has_matrix_units()
        and value.dtype == torch.bfloat16
        and query.shape[2] == key.shape[2]
        and query.shape[3] == value.shape[3]  # the kernel has one width
        and query.shape[2] * query.shape[3] <= NUMBERS_OF_SHORT_HEADS
    )


def exact_backwards(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
    """Causal attention [R, A, T, D] on a CPU in the format of the values; gradients in float32."""
    attended: Tensor = _GradientsInFloat32.apply(
        query.to(value.dtype), key.to(value.dtype), value, scaling
    )
    return attended


class _GradientsInFloat32(torch.autograd.Function):
    """PyTorch's kernel for CPUs, once forwards and once backwards."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Any:
        attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scaling
        )
        ctx.save_for_backward(query, key, value, attended, log_sums)
        ctx.scaling = scaling
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *numbers, log_sums = ctx.saved_tensors
        exact = [each.float() for each in (*gradients, *numbers)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *exact, log_sums, 0.0, True, scale=ctx.scaling
        )
        return *(each.to(numbers[0].dtype) for each in found), None


def keeps_attention_weights(device: torch.device, autocast: torch.dtype | None) -> bool:
    """Whether a training pass is by blocks, which keep T^2 / 2 numbers a row and head."""
    return device.type == "cpu" and autocast == torch.bfloat16 and not has_matrix_units()


@functools.cache
def has_matrix_units() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware (Intel's AMX)."""
    return processor_has("amx_bf16")


def _of_one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float
) -> Tensor:
    """Two matrix products, in half the time of PyTorch's kernel; `mask` is added to the scores."""
    batch, num_heads, _, head_dim = query.shape
    # Heads that share keys and values are the rows of one product.
    grouped = query.to(key.dtype).reshape(batch, key.shape[1], -1, head_dim)
    scores = at_least_float32(torch.matmul(grouped, key.transpose(2, 3)))
    scores *= scaling
    scores += mask
    attended = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    return attended.reshape(batch, 1, num_heads, -1)


def in_blocks(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
    """Causal attention over whole rows [R, A, T, D], in blocks of queries.

    With PyTorch's kernel, scoring and training passes of the small WebShop model take 8 to 24%
    longer on an AMD EPYC (benchmarks/results/attention_passes.md). A forward pass alone is hardly
    faster by blocks; it uses them as well, since policy and reference have to be rounded alike.
    """
    batch, num_heads, length, _ = query.shape
    groups = num_heads // key.shape[1]
    # Autocast would round the float32 product as well.
    with torch.autocast("cpu", enabled=False):
        attended_NTD: Tensor = _BlockwiseAttention.apply(  # pyright: ignore[reportAssignmentType]
            (query * scaling).flatten(0, 1),
            repeat_kv(key, groups).flatten(0, 1),
            repeat_kv(value, groups).flatten(0, 1),
        )
    return attended_NTD.view(batch, num_heads, length, -1).transpose(1, 2)


class _BlockwiseAttention(torch.autograd.Function):
    """Causal attention of scaled float32 queries, one block of them at a time; N = R A.

    Each block reads the keys up to its own end, so about half of all pairs is never computed.
    Scores are float32 up to the softmax; the products with its weights, forwards and backwards,
    are in the format of the values. The weights are kept for the backward pass: T^2 / 2 numbers a
    row and head.
    """

    @staticmethod
    def forward(ctx: Any, query_NTD: Tensor, key_NTD: Tensor, value_NTD: Tensor) -> Tensor:
        keys_NDT = key_NTD.transpose(1, 2)
        later = torch.full((QUERIES_PER_BLOCK, QUERIES_PER_BLOCK), float("-inf")).triu(1)
        weights: list[Tensor] = []
        attended: list[Tensor] = []
        for start, queries in _blocks(query_NTD):
            size = queries.shape[1]
            scores = torch.bmm(queries, keys_NDT[:, :, : start + size])
            scores[:, :, start:] += later[:size, :size]
            weights.append(scores.softmax(-1).to(value_NTD.dtype))
            attended.append(torch.bmm(weights[-1], value_NTD[:, : start + size]))
        ctx.save_for_backward(query_NTD, key_NTD, value_NTD, *weights)
        return torch.cat(attended, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_NTD, key_NTD, value_NTD, *weights = ctx.saved_tensors
        dtype = value_NTD.dtype
        keys, queries = key_NTD.to(dtype), query_NTD.to(dtype)
        values_NDT = value_NTD.transpose(1, 2)
        to_queries: list[Tensor] = []
        # Sums over the blocks, so not rounded after each.
        to_keys = torch.zeros(key_NTD.shape)
        to_values = torch.zeros(value_NTD.shape)
        for (start, outer), inner in zip(_blocks(gradients[0]), weights, strict=True):
            end = start + outer.shape[1]
            to_weights = torch.bmm(outer, values_NDT[:, :, :end])
            to_scores = torch.ops.aten._softmax_backward_data(to_weights, inner, -1, dtype)
            to_queries.append(torch.bmm(to_scores, keys[:, :end]))
            to_keys[:, :end] += torch.bmm(to_scores.transpose(1, 2), queries[:, start:end])
            to_values[:, :end] += torch.bmm(inner.transpose(1, 2), outer)
        return torch.cat(to_queries, dim=1).float(), to_keys, to_values.to(dtype)


def _blocks(rows_NTD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The first position of each block, and the block."""
    for start in range(0, rows_NTD.shape[1], QUERIES_PER_BLOCK):
        yield start, rows_NTD[:, start : start + QUERIES_PER_BLOCK]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
