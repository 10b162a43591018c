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
import functools
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
from ragen_apo.config import RunConfig
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task, Trajectory

CONFIG = Path("configs/shop_smollm2.yaml")
NOTES = """{model} plays {episodes} episodes of the shop at temperature {temperature:g} in {rows}
rows, {repeats} times each in turns, with other tasks each time. A first time does not count. Either
has {threads} threads. The local engine computes in {local}. The server computes in what it was
started with: {server}. Rates are medians. A token is a sampled one."""


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


def load_engine(
    config: RunConfig, *, precision: str
) -> tuple[LanguageModel, AgentProxy, Sequence[Task]]:
    """The configured model folder, what plays it here, and the training tasks."""
    autocast = None if precision == "none" else torch.bfloat16
    path = config.policy.path
    assert path is not None
    model = load_language_model(path, device=torch.device("cpu"), autocast=autocast)
    environments = build_environments(config.environment, config.agent)
    return model, build_proxy(config, model, environments), environments.tasks("train")


def parts_of(tasks: Sequence[Task], *, size: int, repeats: int) -> list[Sequence[Task]]:
    """Other tasks for each time, as a server keeps what it has read; one time more, the first.

    Ends the program where there are too few.
    """
    needed = size * (repeats + 1)
    if needed > len(tasks):
        raise SystemExit(
            f"{size} tasks, {repeats} times and a first time that does not count need {needed}, "
            f"and the environment has {len(tasks)}"
        )
    return [tasks[start : start + size] for start in range(0, needed, size)]


def in_turns(
    parts: Sequence[Sequence[Task]], players: Mapping[str, Callable[..., Rates]]
) -> dict[str, list[Rates]]:
    """What each player measures of each part but the first: `player(tasks, repeat=number)`.

    All play a part before the next one begins, in turns from the first and from the last player.
    """
    found: dict[str, list[Rates]] = {name: [] for name in players}
    for repeat, tasks in enumerate(parts):
        in_order = [*players.items()]
        for name, player in in_order if repeat % 2 else reversed(in_order):
            measured = player(tasks, repeat=repeat)
            if repeat > 0:
                found[name].append(measured)
    return found


def compare_without(
    without: Callable[[], AbstractContextManager[object]],
    proxy: AgentProxy,
    parts: Sequence[Sequence[Task]],
) -> list[str]:
    """Median episodes per second at temperature 1 without something and with it, and their ratio.

    `without` makes a context inside which the engine lacks it.
    """
    play = functools.partial(measure, proxy, temperature=1.0)

    def play_without(tasks: Sequence[Task], *, repeat: int) -> Rates:
        with without():
            return play(tasks, repeat=repeat)

    found = in_turns(parts, {"without": play_without, "with": play})
    before, after = (median_rate(each) for each in found.values())
    return [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]


def median_rate(found: Sequence[Rates]) -> float:
    """Episodes per second."""
    return statistics.median(each.episodes_per_second for each in found)


def row(name: str, found: Sequence[Rates]) -> list[str]:
    """Medians over the times."""
    return [
        name,
        f"{median_rate(found):.2f}",
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
    model, local, tasks = load_engine(config, precision=precision)
    parts = parts_of(tasks, size=arguments.episodes, repeats=arguments.repeats)
    served = build_proxy(read_config(config, rollouts=remote), model, local.environments)
    players = {
        name: functools.partial(measure, proxy, temperature=arguments.temperature)
        for name, proxy in {"local": local, "vLLM": served}.items()
    }
    found = in_turns(parts, players)
    notes = NOTES.format(
        model=f"`{arguments.folder.parent.name}/{arguments.folder.name}`",
        episodes=arguments.episodes,
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
