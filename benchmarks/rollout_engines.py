"""Episodes per second of the local engine and of a vLLM server, with the same model and tasks.

    python -m benchmarks.rollout_engines FOLDER --base-url http://127.0.0.1:8000

FOLDER is the model that the server was started with (docs/server.md), such as RUN/references/0 of
`configs/shop_smollm2.yaml`. Both play the same tasks of the shop, in turns. Sampled, their draws
differ, and so do the lengths of their episodes: with `--temperature 0` both play the same ones, but
for what rounding decides. Give both the same threads: `--threads` here, OMP_NUM_THREADS to the
server. They never compute at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.tables import write_page

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.api import read_config
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task, Trajectory

CONFIG = Path("configs/shop_smollm2.yaml")
NOTES = """{model}, {episodes} episodes of the shop at temperature {temperature:g} in {rows} rows,
{repeats} times each in turns, with other tasks each time, after a first time that does not count;
{threads} threads for either. The local engine computes in {local}, the server in what it was
started with: {server}. Rates are medians; a token is a sampled one."""


@dataclass(frozen=True)
class Rates:
    """Of one engine, at one time."""

    episodes_per_second: float
    tokens_per_second: float
    success_rate: float


def measure(proxy: AgentProxy, tasks: Sequence[Task], *, temperature: float, repeat: int) -> Rates:
    """Plays each task once."""
    requests = [
        EpisodeRequest(task, derive_seed(repeat, "engines", index))
        for index, task in enumerate(tasks)
    ]
    started = time.perf_counter()
    played = proxy.rollout(requests, temperature=temperature, policy_version="benchmark")
    return rates(played, seconds=time.perf_counter() - started)


def rates(played: Sequence[Trajectory], *, seconds: float) -> Rates:
    """Of episodes that took so long together."""
    num_tokens = sum(len(turn.response_token_ids) for each in played for turn in each.turns)
    return Rates(
        episodes_per_second=len(played) / seconds,
        tokens_per_second=num_tokens / seconds,
        success_rate=statistics.fmean(each.success for each in played),
    )


def in_turns(
    proxy: AgentProxy,
    parts: Sequence[Sequence[Task]],
    variants: Mapping[str, Callable[[], AbstractContextManager[object]]],
) -> dict[str, float]:
    """The median episodes per second inside each variant, at temperature 1.

    All play a part before the next one begins; the first part does not count.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for repeat, tasks in enumerate(parts):
        for name, variant in variants.items():
            with variant():
                measured = measure(proxy, tasks, temperature=1.0, repeat=repeat)
            if repeat > 0:
                found[name].append(measured.episodes_per_second)
    return {name: statistics.median(rates) for name, rates in found.items()}


def row(name: str, found: Sequence[Rates]) -> list[str]:
    """Medians over the times."""
    return [
        name,
        f"{statistics.median(each.episodes_per_second for each in found):.2f}",
        f"{statistics.median(each.tokens_per_second for each in found):.0f}",
        f"{statistics.fmean(each.success_rate for each in found):.0%}",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="the model that the server was started with")
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--server", default="unknown", help="its number format, for the page")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--suffix", default="", help="of the page's name")
    parser.add_argument("--mixed-precision", choices=["none", "bfloat16"], default="none")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = arguments.mixed_precision
    config = read_config(CONFIG, policy={"path": str(arguments.folder)})
    remote = {"engine": "vllm", "base_url": arguments.base_url}
    model = load_language_model(
        arguments.folder,
        device=torch.device("cpu"),
        autocast=None if precision == "none" else torch.bfloat16,
    )
    environments = build_environments(config.environment, config.agent)
    tasks = environments.tasks("train")
    size = arguments.episodes
    if size * (arguments.repeats + 1) > len(tasks):
        parser.error(
            f"--episodes {size} with --repeats {arguments.repeats} and a first time that does not "
            f"count need {size * (arguments.repeats + 1)} tasks, and the shop has {len(tasks)}"
        )
    proxies = {
        "local": build_proxy(config, model, environments),
        "vLLM": build_proxy(read_config(config, rollouts=remote), model, environments),
    }
    found: dict[str, list[Rates]] = {name: [] for name in proxies}
    for repeat in range(arguments.repeats + 1):
        # Each time other tasks: a server keeps what it has read.
        part = tasks[repeat * size : (repeat + 1) * size]
        for name, proxy in proxies.items():
            measured = measure(proxy, part, temperature=arguments.temperature, repeat=repeat)
            if repeat > 0:
                found[name].append(measured)
    notes = NOTES.format(
        model=f"`{arguments.folder.name}` of `{arguments.folder.parent.name}`",
        episodes=size,
        rows=config.training.num_rows,
        repeats=arguments.repeats,
        threads=arguments.threads,
        temperature=arguments.temperature,
        local="float32" if precision == "none" else "float32 with products in bfloat16",
        server=arguments.server,
    )
    rows = [row(name, each) for name, each in found.items()]
    header = ["engine", "episodes/s", "tokens/s", "success"]
    title = "The local engine and a vLLM server"
    write_page(
        "rollout_engines",
        title=title,
        notes=notes,
        header=header,
        rows=rows,
        suffix=arguments.suffix,
    )


if __name__ == "__main__":
    main()
