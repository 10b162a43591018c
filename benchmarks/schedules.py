"""How long ranks wait for each other when episodes are dealt out, and when they are drawn.

    torchrun --nproc-per-node 2 -m benchmarks.schedules RUN --episodes 64 --rows 4 8 16
    torchrun --nproc-per-node 2 -m benchmarks.schedules RUN --episodes 64 --rows 4 8 16 --slow 0.5

Plays the same episodes with the run's reference under both values of `rollouts.schedule`, one after
the other and again, so that the load of the machine is the same for both; the ratio is the median
over those pairs. With `--slow` the last rank is stopped for that part of the time (SIGSTOP), in
turns of a tenth of a second. The tokens of both are compared. The run is only read.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from ragen_apo.agent.assembly import build_proxy
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.choices import EpisodeSchedule
from ragen_apo.config import load_run_config, parse_config, resolved_yaml
from ragen_apo.environments.base import TextEnvironment
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import open_run
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session, open_session
from ragen_apo.types import Task, Trajectory

SCHEDULES: tuple[EpisodeSchedule, ...] = ("static", "dynamic")

HEADER = (
    "| episodes | rows of a rank | turns of an episode | static: rollout | waiting "
    "| dynamic: rollout | waiting | played by each | ratio of rollouts | of waiting "
    "| episodes with other tokens |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)

STOPPING = """
import os, signal, sys, time
rank, part = os.getppid(), float(sys.argv[1])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.1 * part)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.1 * (1 - part))
"""


@dataclass(frozen=True)
class Rollout:
    """What one rollout was, on all ranks."""

    seconds: float
    """Until the last rank had all trajectories."""
    waiting_seconds: float
    """Mean over the ranks."""
    num_played: list[int]
    """Episodes of each rank."""
    tokens: list[list[tuple[int, ...]]]
    """Sampled in each turn of each episode."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=float, default=0.0)
    arguments = parser.parse_args()
    run = open_run(arguments.run)
    session = open_session(load_run_config(run.config), run, SilentProgress())
    model = session.load_model(run.reference(0))
    tasks = session.training_tasks()
    requests = [
        EpisodeRequest(tasks[index % len(tasks)], derive_seed(0, "schedules", index))
        for index in range(arguments.episodes)
    ]
    is_slow = session.ranks.rank == session.ranks.size - 1 and arguments.slow > 0
    if session.ranks.is_first:
        print(HEADER, flush=True)
    with stopped_now_and_then(arguments.slow) if is_slow else contextlib.nullcontext():
        for num_rows in arguments.rows:
            proxies = {
                schedule: proxy_of(session, model, schedule, num_rows) for schedule in SCHEDULES
            }
            pairs = [
                {name: played(proxy, requests) for name, proxy in proxies.items()}
                for _ in range(arguments.repeats + 1)
            ][1:]  # the first one warms up
            if session.ranks.is_first:
                print(line(pairs, num_rows), flush=True)


def proxy_of(
    session: Session, model: LanguageModel, schedule: EpisodeSchedule, num_rows: int
) -> AgentProxy:
    keys = [f"--rollouts.schedule={schedule}", f"--training.num_rows={num_rows}"]
    config = parse_config(resolved_yaml(session.config), source="the run", overrides=keys)
    return build_proxy(config, model, session.environments, ranks=session.ranks)


@contextlib.contextmanager
def stopped_now_and_then(part: float) -> Iterator[None]:
    """Inside, this process gets the processor for the rest of the time alone."""
    with subprocess.Popen([sys.executable, "-c", STOPPING, str(part)]) as stopping:
        try:
            yield
        finally:
            stopping.kill()


def played(proxy: AgentProxy, requests: Sequence[EpisodeRequest]) -> Rollout:
    """The episodes of one rollout, and how long it took all ranks."""
    ranks, start, num_own = proxy.ranks, proxy.environments.start, 0

    def counted(task: Task, *, seed: int) -> tuple[TextEnvironment, str]:
        nonlocal num_own
        num_own += 1
        return start(task, seed=seed)

    ranks.total(0.0, what="the start")
    began, exchanged = time.perf_counter(), ranks.seconds
    with patch.object(proxy.environments, "start", counted):
        trajectories = proxy.rollout(requests, temperature=1.0, policy_version="benchmark")
    seconds = time.perf_counter() - began
    waiting = ranks.mean_seconds(since=exchanged)["waiting_seconds"]
    num_played = [int(each) for each in ranks.gather(str(num_own).encode(), "counts")]
    return Rollout(seconds, waiting, num_played, tokens(trajectories))


def tokens(trajectories: Sequence[Trajectory]) -> list[list[tuple[int, ...]]]:
    return [[turn.response_token_ids for turn in each.turns] for each in trajectories]


def line(pairs: Sequence[Mapping[str, Rollout]], num_rows: int) -> str:
    """A line of the table: medians over the pairs, and medians of the ratios of each."""
    static, dynamic = ([pair[name] for pair in pairs] for name in ("static", "dynamic"))
    both, first = list(zip(static, dynamic, strict=True)), static[0].tokens
    num_others = sum(
        mine != theirs
        for each in (*static, *dynamic)
        for mine, theirs in zip(each.tokens, first, strict=True)
    )
    num_turns = [len(turns) for turns in first]
    cells = [
        len(first),
        num_rows,
        f"{min(num_turns)} to {max(num_turns)}",
        *(
            f"{median(getattr(each, name) for each in rollouts):.2f} s"
            for rollouts in (static, dynamic)
            for name in ("seconds", "waiting_seconds")
        ),
        " + ".join(
            f"{median(each.num_played[rank] for each in dynamic):.0f}"
            for rank in range(len(dynamic[0].num_played))
        ),
        *(
            f"{median(getattr(b, name) / getattr(a, name) for a, b in both):.2f}"
            for name in ("seconds", "waiting_seconds")
        ),
        num_others,
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
