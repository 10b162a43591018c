"""How much slower two threads of torch become on two cores that other processes use as well.

    python -m benchmarks.busy_cores [--seconds 10] [--repeats 3]

Threads that have done their part of an operation wait for the others. torch's OpenMP (libgomp)
lets them ask a number of times whether the others are done (spins: `GOMP_SPINCOUNT`, 300,000
unless told) before they sleep. Where another process has a core, the thread that is waited for gets
no turn while the waiting one spins. `ragen_apo.SPIN_COUNT` is what the package asks for.

Updates of the default small model on the teacher's episodes, and rollouts, are counted in a
process of their own: alone, beside a process that counts without end, and beside a second process
that does the same work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import torch
from benchmarks.small_model import default_model, demonstrations
from benchmarks.tables import write_page
from benchmarks.throughput import supervised_update

import ragen_apo
from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.config import RunConfig
from ragen_apo.training.optimization import Optimizer
from ragen_apo.types import training_samples

LIBGOMP = 300_000
"""What libgomp does unless told otherwise."""
THREADS = ((2, LIBGOMP), (2, ragen_apo.SPIN_COUNT), (1, ragen_apo.SPIN_COUNT))
"""Of a worker, and how often they ask."""
EPISODES = 8
"""In an update, and in a call of the rollouts."""
Rates = dict[str, float]
"""Updates and episodes a second."""


def work(num_threads: int, seconds: float) -> Rates:
    """Trains and plays for so many seconds each, when standard input says when to begin."""
    config = RunConfig()
    model = default_model(config)
    episodes = demonstrations(config, model)[:EPISODES]
    samples = [sample for episode in episodes for sample in training_samples(episode)]
    optimizer = Optimizer(model.model)
    proxy = build_proxy(config, model, build_environments(config.environment, config.agent))
    requests = [EpisodeRequest(each.task, index) for index, each in enumerate(episodes)]
    torch.set_num_threads(num_threads)

    def train() -> None:
        supervised_update(config, model, samples, optimizer)

    def play() -> None:
        proxy.rollout(requests, temperature=1.0, policy_version="benchmark")

    rates = {}
    for name, part, of_a_call in (("updates", train, 1), ("episodes", play, EPISODES)):
        part()
        print("ready", flush=True)
        sys.stdin.readline()
        rates[name] = of_a_call * _calls_per_second(part, seconds)
    return rates


def _calls_per_second(part: Callable[[], None], seconds: float) -> float:
    started, calls = time.perf_counter(), 0
    while (took := time.perf_counter() - started) < seconds:
        part()
        calls += 1
    return calls / took


@contextmanager
def worker(num_threads: int, spins: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that does the work."""
    arguments = ["--threads", str(num_threads), "--work", str(seconds)]
    command = [sys.executable, "-m", "benchmarks.busy_cores", *arguments]
    pipe = subprocess.PIPE
    told = {**os.environ, "GOMP_SPINCOUNT": str(spins)}
    with subprocess.Popen(command, env=told, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def counting() -> Iterator[None]:
    """A process that uses one core for something else."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def measured(num_threads: int, spins: int, *, seconds: float, others: str) -> Rates:
    """The rates of one worker (the first, if there are two)."""
    with ExitStack() as stack:
        number = 2 if others == "the same work" else 1
        workers = [stack.enter_context(worker(num_threads, spins, seconds)) for _ in range(number)]
        if others == "a busy process":
            stack.enter_context(counting())
        for _ in ("updates", "episodes"):
            for each in workers:
                assert each.stdin and each.stdout
                if each.stdout.readline() != "ready\n":
                    raise RuntimeError("A worker ended.")
            for each in workers:
                assert each.stdin
                each.stdin.write("go\n")
                each.stdin.flush()
        rates: Rates = json.loads(workers[0].communicate()[0])
    return rates


def main() -> None:
    """Writes benchmarks/results/busy_cores.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="in turns; the medians count")
    parser.add_argument("--work", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        print(json.dumps(work(given.threads, given.work)))
        return
    places = list(itertools.product(("nothing", "a busy process", "the same work"), THREADS))
    found: dict[tuple[str, tuple[int, int]], list[Rates]] = {place: [] for place in places}
    for _ in range(given.repeats):
        for others, threads in places:
            rates = measured(*threads, seconds=given.seconds, others=others)
            found[others, threads].append(rates)
    middle = {
        place: {kind: median(each[kind] for each in rates) for kind in ("updates", "episodes")}
        for place, rates in found.items()
    }
    alone = middle[places[0]]
    write_page(
        "busy_cores",
        title="Two threads on cores that others use",
        notes=(
            "One process trains and plays with the default small model. The ratio is to two threads"
            f" alone that wait as libgomp does by itself ({LIBGOMP:,} spins); the package asks for"
            f" {ragen_apo.SPIN_COUNT:,}. Beside the same work, the figures are those of one of the"
            f" two processes. Medians of {given.repeats} measurements of {given.seconds:g} seconds,"
            " made in turns."
        ),
        header=["beside", "threads", "spins", "updates/s", "ratio", "episodes/s", "ratio"],
        rows=[
            [
                others,
                num_threads,
                f"{spins:,}",
                *(
                    text
                    for kind, rate in middle[others, (num_threads, spins)].items()
                    for text in (f"{rate:.2f}", f"{rate / alone[kind]:.2f}")
                ),
            ]
            for others, (num_threads, spins) in places
        ],
    )


if __name__ == "__main__":
    main()
