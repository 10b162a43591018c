"""Tokens per second of training and rollouts, beside the rate at which the machine multiplies.

    python -m benchmarks.throughput [--config FILE] [--model FOLDER] [--threads 1 2] [--repeats 5]

Without a configuration: the default small model with untrained weights, in float32. With one, such
as `configs/shop_smollm2.yaml`: its model folder, or another one, with what it says of precision,
frozen embeddings, micro-batches and rows. Three workloads:

- `Stage 2`: one update on episodes of the environment's teacher as the trainer makes it (frozen
  reference scored, policy forward and backward, AdamW);
- `supervised`: one update on the responses of the same episodes;
- `rollouts`: as many episodes of the same tasks by the model at temperature 1.

Arithmetic counted, in multiply-adds times two, for useful tokens only (padding is waste):
weights of the layers 2 P a token; attention 4 H times the mean number of keys a token and layer;
vocabulary 2 H V a scored or sampled token. A backward pass counts twice a forward pass, and once
for a frozen vocabulary. What the norms, rotary positions, softmax and the optimizer do is not
counted; prompts that other rows have read and that are copied are not counted either.

Two rates of products in the format of the model's own, measured before every workload, so that a
share is of rates at the same time; shares are medians over the repeats:

- `2048 squared`: two square matrices of 2048;
- `own shapes`: every matrix of the model times as many tokens as a pass has: those of a micro-batch
  in training, one a row in rollouts, and in the vocabulary's the scored ones.

`--clock cpu` counts processor seconds, for machines that are busy with other work; it is of use
with one thread only.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.small_model import default_model, demonstrations
from benchmarks.step_time import Network
from benchmarks.tables import write_page
from torch import Tensor

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.api import read_config
from ragen_apo.config import RunConfig
from ragen_apo.objectives.apo import ApoSettings, apo_loss
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.precision import chosen_precision
from ragen_apo.policy.scoring import score_tokens, token_logprobs
from ragen_apo.training.algorithms.apo import Apo
from ragen_apo.training.batching import collate, micro_batches, pass_cost
from ragen_apo.training.optimization import Optimizer
from ragen_apo.types import TrainingSample, training_samples
from ragen_apo.warm_start.supervised import SupervisedBatch, accumulate_supervised_gradients

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """What a workload has done: its tokens, and floating-point operations without padding."""

    num_tokens: int
    """Read by the model."""
    num_sampled: int
    """Sampled or scored."""
    operations: float


@dataclass(frozen=True)
class Measured:
    """A workload at one time, with the rates of products just before it, in operations a second."""

    work: Work
    seconds: float
    square: float
    own: float

    @property
    def rate(self) -> float:
        return self.work.operations / self.seconds


def training_work(
    config: RunConfig,
    model: LanguageModel,
    samples: Sequence[TrainingSample],
    *,
    has_reference: bool,
) -> Work:
    """One update on the samples: a forward and a backward pass, and one forward of a reference."""
    network = Network.of(model.config)
    lengths = [len(sample.token_ids) for sample in samples]
    num_scored = sum(sum(sample.loss_mask) for sample in samples)
    num_keys = sum(length * (length + 1) / 2 for length in lengths)
    mean_keys = num_keys / sum(lengths)
    forward = network.operations(sum(lengths), context=mean_keys, with_head=num_scored)
    operations = (4 if has_reference else 3) * forward
    if config.policy.freeze_embeddings:
        operations -= 2 * network.head_weights * num_scored
    return Work(sum(lengths), num_scored, operations)


def rollout_work(proxy: AgentProxy, model: LanguageModel, requests: list[EpisodeRequest]) -> Work:
    """Plays the episodes; what it says of their work leaves out what was copied."""
    with counted_prompts(model) as counts:
        played = proxy.rollout(requests, temperature=1.0, policy_version="benchmark")
    num_sampled = sum(each.num_response_tokens for each in played)
    lengths = [each.num_context_tokens for each in played]
    # The last token of a response is read with the next prompt, or never.
    num_read = sum(counts) + num_sampled - sum(len(each.turns) for each in played)
    mean_keys = sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
    operations = Network.of(model.config).operations(
        num_read, context=mean_keys, with_head=num_sampled
    )
    return Work(num_read, num_sampled, operations)


@contextlib.contextmanager
def counted_prompts(model: LanguageModel) -> Iterator[list[int]]:
    """Collects how many tokens the passes read that read prompts."""
    counts: list[int] = []
    hidden_states = model.hidden_states

    def counting(token_ids_RT: Tensor, **kwargs: Any) -> Tensor:
        if "prompt_slices" in kwargs:
            counts.append(token_ids_RT.numel())
        return hidden_states(token_ids_RT, **kwargs)

    with patch.object(model, "hidden_states", counting):
        yield counts


class Products:
    """Matrix products in a model's own number format."""

    def __init__(self, model: LanguageModel, clock: Callable[[], float]) -> None:
        self._clock, self._dtype = clock, model.compute_dtype
        head = model.model.get_output_embeddings().weight
        layers = (each for each in model.model.base_model.layers.parameters() if each.ndim == 2)
        self._weights = [each.detach().to(self._dtype) for each in layers]
        self._head = head.detach()  # logits are computed in the format of the weights
        self._square = torch.randn(2048, 2048, dtype=self._dtype)

    def square_rate(self) -> float:
        """Operations a second."""
        return self._rate(lambda: torch.mm(self._square, self._square), 2.0 * 2048**3)

    def own_rate(self, num_tokens: int, num_scored: int) -> float:
        """Operations a second of one forward pass of so many tokens, products alone."""
        sizes = {each.shape[1] for each in (*self._weights, self._head)}
        inputs = {size: torch.randn(num_tokens, size, dtype=self._dtype) for size in sizes}
        scored = torch.randn(num_scored, self._head.shape[1], dtype=self._head.dtype)
        layer_weights = sum(each.numel() for each in self._weights)

        def multiply() -> None:
            for weight in self._weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            torch.nn.functional.linear(scored, self._head)

        operations = 2.0 * (layer_weights * num_tokens + self._head.numel() * num_scored)
        return self._rate(multiply, operations)

    def _rate(
        self, call: Callable[[], object], operations: float, *, seconds: float = 1.5
    ) -> float:
        """The mean, as of the workloads: what disturbs one disturbs the other."""
        started, calls = self._clock(), 0
        while calls == 0 or self._clock() - started < seconds:
            call()
            calls += 1
        return operations * calls / (self._clock() - started)


def apo_update(
    config: RunConfig,
    policy: LanguageModel,
    reference: LanguageModel,
    samples: Sequence[TrainingSample],
    optimizer: Optimizer,
) -> None:
    """One Stage 2 update as the trainer makes it, with made-up returns and values."""
    settings = ApoSettings(beta2=Apo().beta2)
    for indices in _passes(config, samples, policy):
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


def _passes(
    config: RunConfig, samples: Sequence[TrainingSample], model: LanguageModel
) -> list[list[int]]:
    size, cost = config.training.micro_batch_size, pass_cost(model.device)
    return micro_batches([(each,) for each in samples], size=size, pass_cost=cost)


def supervised_update(
    config: RunConfig,
    model: LanguageModel,
    samples: Sequence[TrainingSample],
    optimizer: Optimizer,
) -> None:
    """One update on the responses of the same episodes."""
    parts = []
    for indices in _passes(config, samples, model):
        batch = collate(
            [samples[index] for index in indices], pad_id=model.pad_id, device=model.device
        )
        parts.append(SupervisedBatch(batch.token_ids_RT, batch.loss_mask_RT))
    accumulate_supervised_gradients(model, parts)
    optimizer.update(learning_rate=1e-6, max_grad_norm=1.0)


def load_model(config: RunConfig) -> LanguageModel:
    """The model of the configuration, or the untrained small one."""
    if config.policy.path is None:
        return default_model(config)
    precision = chosen_precision(config.machine.mixed_precision, CPU, begun_with=None)
    autocast = torch.bfloat16 if precision == "bfloat16" else None
    return load_language_model(config.policy.path, device=CPU, autocast=autocast)


def measure(
    config: RunConfig,
    policy: LanguageModel,
    *,
    num_episodes: int,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, list[Measured]]:
    """Each workload `repeats` times, in turns, after a small one that does not count."""
    reference = load_model(config)
    if config.policy.freeze_embeddings:
        policy.freeze_embeddings()
    episodes = demonstrations(config, policy)[:num_episodes]
    optimizer, size = Optimizer(policy.model), config.training.micro_batch_size
    proxy = build_proxy(config, policy, build_environments(config.environment, config.agent))
    requests = [EpisodeRequest(each.task, number) for number, each in enumerate(episodes)]

    def samples(number: int) -> list[TrainingSample]:
        return [sample for each in episodes[:number] for sample in training_samples(each)]

    def update(number: int) -> Work:
        apo_update(config, policy, reference, samples(number), optimizer)
        return training_work(config, policy, samples(number), has_reference=True)

    def imitate(number: int) -> Work:
        supervised_update(config, policy, samples(number), optimizer)
        return training_work(config, policy, samples(number), has_reference=False)

    def play(number: int) -> Work:
        return rollout_work(proxy, policy, requests[:number])

    workloads = {"Stage 2": update, "supervised": imitate, "rollouts": play}
    for work in workloads.values():
        work(size)
    products, num_rows = Products(policy, clock), min(config.training.num_rows, num_episodes)
    whole = training_work(config, policy, samples(num_episodes), has_reference=True)
    passes = num_episodes / size
    found: dict[str, list[Measured]] = {name: [] for name in workloads}
    for _ in range(repeats):
        for name, work in workloads.items():
            shape = num_rows, num_rows
            if work is not play:
                shape = round(whole.num_tokens / passes), round(whole.num_sampled / passes)
            square, own = products.square_rate(), products.own_rate(*shape)
            started = clock()
            done = work(num_episodes)
            found[name].append(Measured(done, clock() - started, square=square, own=own))
    return found


def entropy_seconds(
    num_tokens: int, *, vocabulary: int, clock: Callable[[], float], piece: int = 64
) -> float:
    """What the entropy of so many tokens' distributions costs by itself, from a small piece."""
    logprobs_NV = torch.randn(piece, vocabulary).log_softmax(-1)
    seconds: list[float] = []
    for _ in range(20):
        started = clock()
        -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        seconds.append(clock() - started)
    return median(seconds) * num_tokens / piece


def entropy_share(
    found: Sequence[Measured], *, vocabulary: int, clock: Callable[[], float]
) -> float:
    """Of the seconds of updates whose scored tokens have it."""
    cost = entropy_seconds(found[0].work.num_sampled, vocabulary=vocabulary, clock=clock)
    return cost / median(each.seconds for each in found)


def row(name: str, threads: int, found: Sequence[Measured]) -> list[object]:
    """Medians over the repeats."""

    def middle(number: Callable[[Measured], float]) -> float:
        return median(map(number, found))

    return [
        name,
        threads,
        f"{middle(lambda each: each.work.num_tokens / each.seconds):.0f}",
        f"{middle(lambda each: each.work.num_sampled / each.seconds):.0f}",
        f"{middle(lambda each: each.rate) / 1e9:.1f}",
        f"{middle(lambda each: each.square) / 1e9:.1f}",
        f"{middle(lambda each: each.own) / 1e9:.1f}",
        f"{middle(lambda each: each.rate / each.square):.0%}",
        f"{middle(lambda each: each.rate / each.own):.0%}",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, help="default: the small model in float32")
    parser.add_argument("--model", help="a folder in place of the configured one")
    parser.add_argument("--episodes", type=int, help="default: those of a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--suffix", default="", help="of the page's name, for another model")
    given = parser.parse_args()
    config = read_config(given.config) if given.config else RunConfig()
    if given.model:
        config = read_config(config, policy={"path": given.model})
    num_episodes = given.episodes or config.training.tasks_per_step
    clock, rows, shares = CLOCKS[given.clock], [], []
    for threads in given.threads:
        torch.set_num_threads(threads)
        model = load_model(config)
        found = measure(
            config, model, num_episodes=num_episodes, repeats=given.repeats, clock=clock
        )
        rows += [row(name, threads, each) for name, each in found.items()]
        shares.append(
            entropy_share(found["Stage 2"], vocabulary=model.vocabulary_size, clock=clock)
        )
    write_page(
        "throughput",
        title="Training and rollouts beside matrix products",
        notes=(
            f"{config.policy.path or 'The default model'} trains on {num_episodes} episodes in"
            f" micro-batches of at most {config.training.micro_batch_size}, and plays rollouts of"
            f" as many. Times are {given.clock} seconds, measured {given.repeats} times in turns"
            " (medians)."
            " The entropy of the scored tokens, a metric, by itself takes"
            f" {' and '.join(f'{share:.1%}' for share in shares)} of Stage 2. What is counted is"
            " described in `benchmarks/throughput.py`, and so are the two rates of products that"
            " are measured before every workload."
        ),
        header=[
            "workload",
            "threads",
            "tokens/s",
            "scored or sampled/s",
            "GFLOP/s",
            "2048 squared, GFLOP/s",
            "own shapes, GFLOP/s",
            "of 2048 squared",
            "of own shapes",
        ],
        rows=rows,
        suffix=given.suffix,
    )


if __name__ == "__main__":
    main()
