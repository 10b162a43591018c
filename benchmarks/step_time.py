"""A model of the seconds of a Stage 2 step, held against recorded runs, and machines on paper.

    python -m benchmarks.step_time RUN [RUN ...] --threads 1

Counts what a step computes, reads and sends:

    rollouts    every context token once, 2 operations for each weight of a layer, and attention;
                each generated token also reads all weights, which the rows of the batch share
    training    8 operations a weight and token: 2 for the reference, 2 forward, 4 backward
    exchange    gradients in float32, twice their bytes but for one part in W; episodes as JSON

and divides by rates. Those of this machine are measured on matrices of the run's own sizes; for
GPUs they are data sheets times an assumed share, and what comes out is arithmetic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.tables import write_page
from transformers import AutoConfig

from ragen_apo.files import read_json_lines
from ragen_apo.report.load import read_config
from ragen_apo.run_directory import open_run

RECORDED = (
    "num_episodes",
    "num_generated_tokens",
    "num_context_tokens",
    "rollout_seconds",
    "training_seconds",
)
JSON_BYTES_PER_TOKEN = 17  # docs/scaling.md


@dataclass(frozen=True)
class Network:
    """The sizes of a decoder that decide its cost."""

    layers: int
    hidden: int
    intermediate: int
    attention: int
    """Heads times their size."""
    key_values: int
    """Heads of keys times their size."""
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Network:
        """From a configuration of transformers."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            attention=size * config.num_attention_heads,
            key_values=size * config.num_key_value_heads,
            vocabulary=config.vocab_size,
        )

    @property
    def layer_weights(self) -> int:
        """The weights of all layers."""
        projections = 2 * self.hidden * (self.attention + self.key_values)
        return self.layers * (projections + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Those of the vocabulary."""
        return self.hidden * self.vocabulary

    def operations(self, num_tokens: float, *, context: float, with_head: float) -> float:
        """Forward, of tokens that look at `context` tokens each; `with_head` of them get logits."""
        attention = 4 * self.layers * self.attention * context
        return num_tokens * (2 * self.layer_weights + attention) + 2 * self.head_weights * with_head


@dataclass(frozen=True)
class Machine:
    """The rates of one rank."""

    operations: float
    """Of matrix products, a second."""
    memory: float
    """Bytes read a second."""
    network: float = 1e9
    """Bytes to the other ranks a second."""
    weight_bytes: int = 4


@dataclass(frozen=True)
class Step:
    """What a step plays and trains on, of all ranks."""

    episodes: float
    generated: float
    """Tokens."""
    context: float
    """Tokens, prompts and responses."""
    rows: int
    """Episodes at a time, of a rank."""


def seconds(network: Network, machine: Machine, step: Step, ranks: int = 1) -> dict[str, float]:
    """Rollouts, training and exchange of a step whose work `ranks` share equally."""
    generated, context = step.generated / ranks, step.context / ranks
    half = 0.5 * step.context / step.episodes  # the mean number of tokens looked at
    prompts = network.operations(context - generated, context=half, with_head=0)
    sampled = network.operations(generated, context=2 * half, with_head=generated)
    weights = network.layer_weights + network.head_weights
    at_a_time = max(1.0, min(step.rows, step.episodes / ranks))
    reading = generated / at_a_time * weights * machine.weight_bytes / machine.memory
    rollouts = prompts / machine.operations + max(sampled / machine.operations, reading)
    trained = network.operations(context, context=half, with_head=generated)
    exchange = 0.0
    if ranks > 1:
        gradients = 2 * 4 * weights * (ranks - 1) / ranks
        exchange = (gradients + JSON_BYTES_PER_TOKEN * step.context) / machine.network
    return {
        "rollouts": rollouts,
        "training": 4 * trained / machine.operations,
        "exchange": exchange,
    }


def measured_machine(network: Network, *, num_tokens: int, products: torch.dtype) -> Machine:
    """The rates of this process, with its threads, on matrices of the network's own sizes.

    `products` is the number format in which the run multiplies.
    """
    left = torch.randn(num_tokens, network.hidden, dtype=products)
    right = torch.randn(network.hidden, network.intermediate, dtype=products)
    operations = 2 * left.numel() * network.intermediate
    large = torch.randn(4096, 8192, dtype=products)
    vector = torch.randn(8192, dtype=products)
    return Machine(
        operations=operations / _fastest(lambda: left @ right),
        memory=large.nbytes / _fastest(lambda: large @ vector),
        weight_bytes=products.itemsize,
    )


def _fastest(work: Any, *, repeats: int = 30) -> float:
    """Seconds of the fastest of some runs: what the processor does when nobody disturbs it."""
    took: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


def recorded(path: Path) -> list[object]:
    """A row of the table: a run's median step, and what the model says of it."""
    run = open_run(path)
    training = read_config(run.config)[1]["training"]
    network = Network.of(AutoConfig.from_pretrained(run.reference(0)))
    rows = read_json_lines(run.metrics)
    middle = {key: median(float(row[key]) for row in rows) for key in RECORDED}
    step = Step(
        episodes=middle["num_episodes"],
        generated=middle["num_generated_tokens"],
        context=middle["num_context_tokens"],
        rows=training["num_rows"],
    )
    tokens = round(training["micro_batch_size"] * step.context / step.episodes)
    mixed = run.read_status().get("mixed_precision") == "bfloat16"  # what `auto` had come to
    products = torch.bfloat16 if mixed else torch.float32
    machine = measured_machine(network, num_tokens=tokens, products=products)
    said = seconds(network, machine, step)
    return [
        path.name,
        f"{(network.layer_weights + network.head_weights) / 1e6:.1f}",
        f"{step.context:,.0f} / {step.generated:,.0f}",
        f"{machine.operations / 1e9:.0f} / {machine.memory / 1e9:.0f}",
        *(
            f"{middle[f'{key}_seconds']:.1f} / {said[name]:.1f} = "
            f"{middle[f'{key}_seconds'] / said[name]:.1f}"
            for key, name in (("rollout", "rollouts"), ("training", "training"))
        ),
    ]


QWEN = {
    "1.5B": Network(28, 1536, 8960, 1536, 256, 151_936),
    "7B": Network(28, 3584, 18_944, 3584, 512, 152_064),
}
"""Qwen2.5, from the configurations that its models come with."""
H100 = Machine(operations=0.35 * 989e12, memory=0.6 * 3.35e12, weight_bytes=2)
"""NVIDIA's data sheet (SXM: 989 TFLOP/s in bfloat16, 3.35 TB/s), times shares that are assumed."""
NETWORKS = {8: 0.7 * 450e9, 64: 0.7 * 50e9}
"""Bytes a second of a rank by the number of GPUs: NVLink in a host, 400 Gbit/s between hosts."""
TASKS = Step(episodes=512, generated=512 * 8 * 100, context=512 * 8 * 350, rows=64)


def on_paper() -> list[list[object]]:
    """Qwen2.5 on H100s, 512 episodes of 8 turns a step, whole weights on each GPU."""
    rows: list[list[object]] = []
    for name, network in QWEN.items():
        for ranks, bandwidth in NETWORKS.items():
            machine = Machine(H100.operations, H100.memory, bandwidth, H100.weight_bytes)
            said = seconds(network, machine, TASKS, ranks)
            rows.append([name, ranks, *(f"{said[part]:.2f}" for part in said)])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes benchmarks/results/step_time.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    paper = on_paper()
    lines = [f"| {' | '.join(map(str, row))} |" for row in paper]
    notes = "\n".join(
        [
            "In the last two columns stand the recorded seconds of a run's median step, the seconds"
            " that the model says with rates measured here, and how many times longer the step"
            " took.",
            "",
            "**On paper.** The model was asked for Qwen2.5 on H100s (35% of the data sheet's"
            " operations, 60% of its memory bandwidth, 70% of the networks'), 512 episodes of"
            " 8 turns of 350 tokens, 100 of them generated. Nothing of it was run.",
            "",
            "| model | GPUs | rollouts, s | training, s | exchange, s |",
            "|---|---|---|---|---|",
            *lines,
        ]
    )
    write_page(
        "step_time",
        title="The seconds of a step",
        notes=notes,
        header=[
            "run",
            "million weights",
            "tokens of contexts / generated",
            "Gop/s / GB/s measured",
            "rollouts, s",
            "training, s",
        ],
        rows=[recorded(path) for path in given.runs],
    )


if __name__ == "__main__":
    main()
