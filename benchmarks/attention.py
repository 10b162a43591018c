"""Attention over whole rows in bfloat16 on a CPU: PyTorch's fused kernel against ours.

    python -m benchmarks.attention [--passes | --gradients] [--threads 1] [--suffix _amx]

Two rows of heads as wide as those of the small models, forwards as scoring does it and forwards and
backwards as training does. `--passes` measures scoring and training passes of the small model of
configs/webshop_small.yaml in place of attention alone. `--gradients`, for processors with AMX,
compares the fused kernel's gradients in bfloat16 with those in float32 on short rows. Times are
processor seconds of the fastest of several repeats, so other work on the machine matters little;
errors are relative to the same formula in float64, largest of output and gradients. The suffix
names the page of another kind of processor.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from benchmarks.tables import write_page
from torch import Tensor

from ragen_apo.config import load_config
from ragen_apo.policy import attention
from ragen_apo.policy.attention import in_blocks
from ragen_apo.policy.language_model import LanguageModel, build_small_model
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.policy.tokenizer import train_tokenizer

NOTES = """Queries and keys are float32 and values are bfloat16, as rotary positions leave them
under autocast. The fused kernel gets all three in bfloat16, as transformers calls it then. Ratios
above 1 are in favour of ours."""
SHAPES = [(length, heads, 192 // heads) for length in (512, 1024, 2048) for heads in (4, 6)]
ROWS = 2
SHORT_SHAPES = [
    (length, heads, width)
    for heads, width in ((4, 32), (9, 64), (4, 128))
    for length in (64, 96, 128, 192, 256, 384, 512, 1024)
]
TOKENS = 3_072
"""Of all rows in a pass over short ones."""
PASSES = ((8, 512), (4, 1024), (2, 1800), (2, 2700))
"""Rows and tokens."""


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [B, T, H, D] by blocks."""
    return in_blocks(query, key, value, scaling=query.shape[-1] ** -0.5)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention [B, T, H, D] by PyTorch."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.to(value.dtype), key.to(value.dtype), value, is_causal=True
    )
    return attended.transpose(1, 2)


def both_ways(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], weight: Tensor
) -> list[Tensor]:
    """The output and the gradients of its weighted sum."""
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight.to(output.dtype))]


def seconds(work: Callable[[], object], *, repeats: int) -> float:
    """Processor seconds of the fastest repeat, after one that is not counted."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def row(length: int, heads: int, width: int, *, repeats: int) -> list[object]:
    """One line of the table."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(ROWS, heads, length, width) for _ in range(3))
    weight = torch.randn(ROWS, length, heads, width)
    inputs = [query, key, value.to(torch.bfloat16)]
    for tensor in inputs:
        tensor.requires_grad_()
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = both_ways(fused, doubles, weight)
    forward: dict[str, float] = {}
    training: dict[str, float] = {}
    error: dict[str, float] = {}
    for name, function in {"fused": fused, "ours": ours}.items():
        with torch.no_grad():
            forward[name] = seconds(lambda f=function: f(*inputs), repeats=repeats)
        training[name] = seconds(lambda f=function: both_ways(f, inputs, weight), repeats=repeats)
        found = zip(both_ways(function, inputs, weight), exact, strict=True)
        error[name] = max(((a.double() - b).norm() / b.norm()).item() for a, b in found)
    return [
        f"{length} tokens, {heads} heads of {width}",
        *(f"{1000 * time[name] / ROWS:.1f}" for time in (forward, training) for name in time),
        f"{forward['fused'] / forward['ours']:.2f}",
        f"{training['fused'] / training['ours']:.2f}",
        *(f"{error[name]:.4f}" for name in error),
    ]


def gradients_row(length: int, heads: int, width: int, *, repeats: int) -> list[object]:
    """One line of the table of short rows: forwards and backwards."""
    torch.manual_seed(0)
    rows = TOKENS // length
    inputs = [torch.randn(rows, heads, length, width).bfloat16().requires_grad_() for _ in range(3)]
    weight = torch.randn(rows, length, heads, width)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = both_ways(fused, doubles, weight)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention.exact_backwards(query, key, value, scaling=None).transpose(1, 2)

    times: list[float] = []
    errors: list[float] = []
    for function in (fused, ours):
        times.append(seconds(lambda f=function: both_ways(f, inputs, weight), repeats=repeats))
        found = zip(both_ways(function, inputs, weight), exact, strict=True)
        errors.append(max(((a.double() - b).norm() / b.norm()).item() for a, b in found))
    is_short = length * width <= attention.NUMBERS_OF_SHORT_HEADS
    return [
        f"{rows} rows of {length} tokens, {heads} heads of {width}",
        *(f"{1000 * time:.1f}" for time in times),
        f"{times[0] / times[1]:.2f}",
        *(f"{error:.4f}" for error in errors),
        "float32" if is_short else "bfloat16",
    ]


def gradients(*, repeats: int, suffix: str) -> None:
    """The table of short rows."""
    write_page(
        "attention",
        title="Gradients of attention on short rows, in bfloat16 and in float32",
        notes="PyTorch's fused kernel for CPUs, forwards in bfloat16, backwards in one format or "
        "the other, casts included. A ratio above 1 is in favour of float32. The last column is "
        "what training takes where the processor has AMX.",
        header=[
            "shape",
            *("ms: bfloat16", "float32", "ratio"),
            *("error: bfloat16", "float32", "taken"),
        ],
        rows=[gradients_row(*shape, repeats=repeats) for shape in SHORT_SHAPES],
        suffix=f"_gradients{suffix}",
    )


def passes_row(model: LanguageModel, rows: int, length: int, *, repeats: int) -> list[object]:
    """One line of the table of passes; blocks and fused kernel take turns."""
    draws = torch.Generator().manual_seed(0)
    ids_RT = torch.randint(0, len(model.tokenizer), (rows, length), generator=draws)
    mask_RT = torch.zeros(rows, length, dtype=torch.bool)
    mask_RT[:, length // 8 :: 8] = True

    def scoring() -> None:
        with torch.no_grad():
            score_tokens(model, ids_RT, mask_RT)

    def training() -> None:
        score_tokens(model, ids_RT, mask_RT).logprobs_BT.sum().backward()
        model.model.zero_grad()

    best: dict[tuple[bool, Callable[[], None]], float] = {}
    for _ in range(repeats):
        for fused_kernel in (False, True):
            # The fused kernel is what processors with matrix units get.
            with mock.patch.object(attention, "has_matrix_units", lambda f=fused_kernel: f):
                for work in (scoring, training):
                    key = fused_kernel, work
                    best[key] = min(best.get(key, math.inf), seconds(work, repeats=1))
    ratios = [best[True, work] / best[False, work] for work in (scoring, training)]
    both = sum(best[True, w] for w in (scoring, training)) / sum(
        best[False, w] for w in (scoring, training)
    )
    return [f"{rows} rows of {length} tokens", *(f"{ratio:.2f}" for ratio in (*ratios, both))]


def passes(*, repeats: int, suffix: str) -> None:
    """The table of passes."""
    small = load_config(Path("configs/webshop_small.yaml")).policy.small
    text = " ".join(f"w{i} word{i * 7 % 1000} thing{i % 89}" for i in range(4000))
    model = build_small_model(train_tokenizer([text], vocab_size=small.vocab_size), small, seed=0)
    model = replace(model, autocast=torch.bfloat16)
    write_page(
        "attention",
        title="Scoring and training passes in bfloat16 on a CPU",
        notes="A cell is the time with the fused kernel over the time with blocks. Above 1 the "
        "blocks are faster.",
        header=["shape", "scoring", "training", "both, as a step of A*-PO has them"],
        rows=[passes_row(model, *shape, repeats=repeats) for shape in PASSES],
        suffix=f"_passes{suffix}",
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--suffix", default="")
    pages = parser.add_mutually_exclusive_group()
    pages.add_argument("--passes", action="store_true")
    pages.add_argument("--gradients", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.passes:
        passes(repeats=arguments.repeats, suffix=arguments.suffix)
        return
    if arguments.gradients:
        gradients(repeats=arguments.repeats, suffix=arguments.suffix)
        return
    write_page(
        "attention",
        title="Attention over whole rows in bfloat16 on a CPU",
        notes=NOTES,
        header=[
            "shape",
            *("forward, ms a row: fused", "ours", "and backward: fused", "ours"),
            *("ratio forward", "ratio both", "error fused", "error ours"),
        ],
        rows=[row(*shape, repeats=arguments.repeats) for shape in SHAPES],
        suffix=arguments.suffix,
    )


if __name__ == "__main__":
    main()
