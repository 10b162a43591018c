"""Training tokens per second, and their arithmetic as a share of the machine's matrix products.

    python -m benchmarks.throughput [--steps 5]

Workload: Stage 2 updates of the default small model on 64 episodes of the teacher (frozen reference
scored, policy forward and backward, AdamW), and supervised updates on the same episodes. Rollouts
are not part of it; benchmarks/generation.py measures them.

Arithmetic counted, in multiply-adds times two, for useful tokens only (padding is waste):
weights of the layers 2 P a token; attention 4 H times the mean number of keys a token and layer;
vocabulary 2 H V a scored token. A backward pass counts twice a forward pass. What the norms, rotary
positions, softmax and the optimizer do is not counted.

`measured rate`: float32 product of two square matrices of 2048 with the same threads; and the
product of one micro-batch of tokens with a feed-forward matrix, the largest that this model does.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from benchmarks.small_model import default_model, demonstrations
from benchmarks.tables import write_page

from ragen_apo.config import RunConfig
from ragen_apo.objectives.apo import apo_loss
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import score_tokens, token_logprobs
from ragen_apo.training.algorithms.apo import Apo
from ragen_apo.training.batching import collate, micro_batches
from ragen_apo.training.optimization import Optimizer
from ragen_apo.types import TrainingSample, training_samples
from ragen_apo.warm_start.supervised import SupervisedBatch, accumulate_supervised_gradients


def forward_flop(model: LanguageModel, samples: Sequence[TrainingSample]) -> float:
    """Floating-point operations of one forward pass over the samples without padding."""
    config = model.config
    layers = [
        parameter
        for name, parameter in model.model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    lengths = [len(sample.token_ids) for sample in samples]
    num_scored = sum(sum(sample.loss_mask) for sample in samples)
    num_keys = sum(length * (length + 1) / 2 for length in lengths)
    return (
        2.0 * sum(parameter.numel() for parameter in layers) * sum(lengths)
        + 4.0 * config.hidden_size * config.num_hidden_layers * num_keys
        + 2.0 * config.hidden_size * config.vocab_size * num_scored
    )


def product_rate(rows: int, inner: int, columns: int, *, seconds: float = 1.0) -> float:
    """The best rate of [rows, inner] @ [inner, columns] in float32, in FLOP per second."""
    first, second = torch.randn(rows, inner), torch.randn(inner, columns)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(first, second)
        best = min(best, time.perf_counter() - started)
    return 2.0 * rows * inner * columns / best


def apo_update(
    config: RunConfig,
    policy: LanguageModel,
    reference: LanguageModel,
    samples: Sequence[TrainingSample],
    optimizer: Optimizer,
) -> None:
    """One Stage 2 update as the trainer makes it, with made-up returns and values."""
    settings = Apo().objective()
    for indices in micro_batches([(s,) for s in samples], size=config.training.micro_batch_size):
        batch = collate(
            [samples[index] for index in indices], pad_id=policy.pad_id, device=policy.device
        )
        ids_BT, mask_BT = batch.token_ids_RT, batch.loss_mask_RT
        with torch.no_grad():
            frozen_BT = token_logprobs(reference, ids_BT, mask_BT)
        scores = score_tokens(policy, ids_BT, mask_BT)
        part = apo_loss(
            scores.logprobs_BT,
            reference_logprobs_BT=frozen_BT,
            mask_BT=mask_BT,
            returns_B=torch.ones(len(indices)),
            v_star_B=torch.full((len(indices),), 0.5),
            settings=settings,
            num_sequences=len(samples),
        )
        part.loss.backward()
    optimizer.update(learning_rate=1e-6, max_grad_norm=1.0)


def supervised_update(
    config: RunConfig,
    model: LanguageModel,
    samples: Sequence[TrainingSample],
    optimizer: Optimizer,
) -> None:
    """One update on the responses of the same episodes."""
    parts = []
    for indices in micro_batches([(s,) for s in samples], size=config.training.micro_batch_size):
        batch = collate(
            [samples[index] for index in indices], pad_id=model.pad_id, device=model.device
        )
        parts.append(SupervisedBatch(batch.token_ids_RT, batch.loss_mask_RT))
    accumulate_supervised_gradients(model, parts)
    optimizer.update(learning_rate=1e-6, max_grad_norm=1.0)


def seconds_per_call(call: Callable[[], None], *, repeats: int) -> float:
    """The median, after one call that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=5, help="updates to take the median of")
    steps = parser.parse_args().steps
    config = RunConfig()
    policy, reference = default_model(config), default_model(config)
    episodes = demonstrations(config, policy)[: config.training.tasks_per_step]
    samples = [sample for episode in episodes for sample in training_samples(episode)]
    optimizer = Optimizer(policy.model)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    tokens_per_micro_batch = num_tokens * config.training.micro_batch_size // len(samples)
    small = config.policy.small
    square = product_rate(2048, 2048, 2048)
    largest = product_rate(tokens_per_micro_batch, small.hidden_size, small.intermediate_size)
    forward = forward_flop(policy, samples)
    workloads: dict[str, tuple[Callable[[], None], float]] = {
        # Reference forward 1, policy forward 1, backward 2.
        "Stage 2": (
            lambda: apo_update(config, policy, reference, samples, optimizer),
            4 * forward,
        ),
        "supervised": (lambda: supervised_update(config, policy, samples, optimizer), 3 * forward),
    }
    rows = []
    for name, (call, flop) in workloads.items():
        seconds = seconds_per_call(call, repeats=steps)
        rate = flop / seconds
        rows.append(
            [
                name,
                f"{num_tokens / seconds:.0f}",
                f"{rate / 1e9:.1f}",
                f"{rate / square:.0%}",
                f"{rate / largest:.0%}",
            ]
        )
    write_page(
        "throughput",
        title="Training throughput of the default model",
        notes=(
            f"One update on {len(samples)} episodes of {num_tokens / len(samples):.0f} tokens on "
            f"average, micro-batches of {config.training.micro_batch_size}, median of {steps}. "
            f"Measured rates: {square / 1e9:.1f} GFLOP/s for 2048 x 2048 matrices, "
            f"{largest / 1e9:.1f} GFLOP/s for {tokens_per_micro_batch} x {small.hidden_size} with "
            f"{small.hidden_size} x {small.intermediate_size}. What is counted is described in "
            "benchmarks/throughput.py."
        ),
        header=["update", "tokens/s", "GFLOP/s", "of 2048 squared", "of the model's own shape"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
