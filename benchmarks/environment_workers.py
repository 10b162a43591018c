"""What it brings that environments act at the same time, where a step waits, and what it costs.

    python -m benchmarks.environment_workers RUN [--episodes 64] [--wait 0.05] [--workers 1 8 32]
    python -m benchmarks.environment_workers RUN --wait 0 --compute 0.02 --workers 1 2 --processes

Plays the same sampled episodes of the run's policy, and those of the teacher, with each number of
workers (`rollouts.num_environment_workers`), in and out of lockstep, as often as `--repeats` says,
in turns. Every reset and step of the shop waits `--wait` seconds, and computes `--compute` seconds
in Python; 0 shows the cost. With `--processes` each number of workers comes a second time, with
environments in processes of their own. Rates are episodes a second of the fastest repetition.
Beside them stands what the load of the machine hardly changes: how many waits come one after
another, and the least processor time of an episode in this process. That all workers give the same
bits is checked. The run is only read.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import slow_shop
from benchmarks.tables import write_page

from ragen_apo.agent.assembly import build_proxy
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.config import RunConfig
from ragen_apo.config.load import config_of, load_run_config
from ragen_apo.environments.base import TextEnvironment
from ragen_apo.environments.process import ProcessEnvironment
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import open_run
from ragen_apo.seeding import derive_seed
from ragen_apo.session import open_session
from ragen_apo.types import Trajectory

Play = Callable[[], list[Trajectory]]


class CountingPool(EnvironmentManager):
    """Counts the waits that come one after another."""

    num_waits = 0

    def map(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        calls = list(zip(*arguments, strict=True))
        self.num_waits += math.ceil(len(calls) / self.num_workers)
        return super().map(lambda each: work(*each), calls)


def pool(
    config: RunConfig,
    *,
    num_workers: int,
    wait: float = 0.0,
    compute: float = 0.0,
    in_processes: bool = False,
) -> CountingPool:
    """Environments of the run's options, `num_workers` of them at a time."""
    options = {"wait": wait, "compute": compute, **config.environment.options}
    name = f"{Path(slow_shop.__file__)}:SlowShop"

    def elsewhere(like: TextEnvironment) -> TextEnvironment:
        return ProcessEnvironment(name, options, like=like)

    return CountingPool(
        lambda: slow_shop.SlowShop(**options),
        format_penalty=config.agent.format_penalty,
        invalid_action_penalty=config.agent.invalid_action_penalty,
        num_workers=num_workers,
        make_elsewhere=elsewhere if in_processes else None,
    )


def requests_of(environments: EnvironmentManager, number: int) -> list[EpisodeRequest]:
    """Training tasks in their order, over and over."""
    tasks = itertools.islice(itertools.cycle(environments.tasks("train")), number)
    return [
        EpisodeRequest(task, derive_seed("environment-workers", index))
        for index, task in enumerate(tasks)
    ]


def of_the_policy(
    config: RunConfig,
    model: LanguageModel,
    environments: EnvironmentManager,
    *,
    lockstep: bool,
    number: int,
) -> Play:
    """Sampled episodes, all of them in progress at the same time."""
    keys = [f"--rollouts.lockstep={str(lockstep).lower()}", f"--training.num_rows={number}"]
    config = config_of([config.model_dump(by_alias=True)], source="benchmark", overrides=keys)
    proxy, requests = build_proxy(config, model, environments), requests_of(environments, number)
    return lambda: proxy.rollout(requests, temperature=1.0, policy_version="benchmark")


def of_the_teacher(environments: EnvironmentManager, *, number: int) -> Play:
    """Episodes of the scripted policy, in text."""
    teacher = environments.scripted_policies()["teacher"]
    requests = requests_of(environments, number)
    return lambda: play_scripted_episodes(
        teacher, environments, requests, policy_version="benchmark"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="a finished run in the shop")
    parser.add_argument("--episodes", type=int, default=64, help="all of them at the same time")
    parser.add_argument("--wait", type=float, default=0.05, help="seconds of a reset or a step")
    parser.add_argument("--compute", type=float, default=0.0, help="the same, of the processor")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--processes", action="store_true", help="also in processes of their own")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    run = open_run(given.run)
    config = load_run_config(run.config)
    model = open_session(config, run, SilentProgress()).load_model(run.policy)
    plays: dict[tuple[str, str], Play] = {}
    pools = {
        f"{number}, in processes" if in_processes else str(number): pool(
            config,
            num_workers=number,
            wait=given.wait,
            compute=given.compute,
            in_processes=in_processes,
        )
        for in_processes in ((False, True) if given.processes else (False,))
        for number in given.workers
    }
    num_waits: dict[tuple[str, str], int] = {}
    for workers, environments in pools.items():
        for name, lockstep in (("policy", False), ("policy, lockstep", True)):
            plays[name, workers] = of_the_policy(
                config, model, environments, lockstep=lockstep, number=given.episodes
            )
        plays["teacher", workers] = of_the_teacher(environments, number=given.episodes)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in plays}
    processor: dict[tuple[str, str], list[float]] = {key: [] for key in plays}
    played: dict[str, list[Trajectory]] = {}
    for _ in range(given.repeats):
        for (name, workers), play in plays.items():
            before = pools[workers].num_waits
            started, started_processor = time.perf_counter(), time.process_time()
            trajectories = play()
            seconds[name, workers].append(time.perf_counter() - started)
            processor[name, workers].append(time.process_time() - started_processor)
            num_waits[name, workers] = pools[workers].num_waits - before
            assert trajectories == played.setdefault(name, trajectories), "not the same bits"
    rows = []
    for name in played:
        for workers in pools:
            key = name, workers
            rate = given.episodes / min(seconds[key])
            cost = 1000 * min(processor[key]) / given.episodes
            rows.append([name, workers, f"{rate:.1f}", num_waits[key], f"{cost:.1f}"])
    turns = sum(len(each.turns) for each in played["policy"]) / given.episodes
    does = f"waits {1000 * given.wait:g} ms"
    if given.compute:
        does = f"computes {1000 * given.compute:g} ms"
    write_page(
        "environment_workers",
        title=f"Episodes a second where a step {does}",
        notes=f"{given.episodes} episodes are played at a time, with {turns:.1f} turns of the "
        "policy each. `waits in a row` counts how many waits come one after another. `processor "
        "ms` is the least processor time of an episode.",
        header=["episodes of", "workers", "episodes/s", "waits in a row", "processor ms"],
        rows=rows,
        suffix="" if given.wait else "_processes" if given.processes else "_cost",
    )


if __name__ == "__main__":
    main()
