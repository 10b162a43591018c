"""Attention over whole rows in bfloat16 on a CPU: PyTorch's fused kernel against ours.

    python -m benchmarks.attention [--threads 1] [--suffix _amx]

Two rows of heads as wide as those of the small models, forwards as scoring does it and forwards and
backwards as training does. Times are processor seconds of the fastest of several repeats, so other
work on the machine matters little; errors are relative to the same formula in float64, largest of
output and gradients. The suffix names the page of another kind of processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from benchmarks.tables import write_page
from torch import Tensor

from ragen_apo.policy.attention import in_blocks

NOTES = """Queries and keys are float32 and values bfloat16, as rotary positions leave them under
autocast; the fused kernel gets all three in bfloat16, as transformers calls it then. Ratios above 1
are in favour of ours."""
SHAPES = [(length, heads, 192 // heads) for length in (512, 1024, 2048) for heads in (4, 6)]
ROWS = 2


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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--suffix", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
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
