"""Whole training runs as parts of a benchmark: what is done already is not done again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import RunConfig, load_config, resolved_yaml
from ragen_apo.console import ConsoleProgress
from ragen_apo.evaluation.evaluate import EvaluationPlan
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory, create_run, open_run
from ragen_apo.seeding import derive_seed
from ragen_apo.session import open_session
from ragen_apo.stages.pipeline import train
from ragen_apo.types import Task, Trajectory


def finished_run(path: Path, config: RunConfig) -> RunDirectory:
    """The run at `path`, trained to its end."""
    run = open_run(path) if path.exists() else create_run(path, config_yaml=resolved_yaml(config))
    if not run.policy.exists():
        with ConsoleProgress(Console()) as progress:
            train(config, run, progress=progress)
    return run


def greedy_episodes(
    run: RunDirectory,
    folder: Path,
    *,
    split: str,
    num_episodes: int,
    config: RunConfig | None = None,
) -> list[Trajectory]:
    """What a model folder does on the first tasks of a split, with the run's configuration.

    Or with another one, such as one with another environment.
    """
    config = config or load_config(run.config)
    plan = EvaluationPlan(split, num_episodes, 0.0, config.seed)
    return _episodes(run, folder, plan, config, repeats=[0])


def greedy_episodes_on(
    run: RunDirectory, folder: Path, tasks: Sequence[Task], *, config: RunConfig | None = None
) -> list[Trajectory]:
    """What a model folder does on these tasks."""
    config = config or load_config(run.config)
    requests = [EpisodeRequest(task, derive_seed(config.seed, task.task_id)) for task in tasks]
    proxy = _proxy(run, folder, config)
    return proxy.rollout(requests, temperature=0.0, policy_version="benchmark")


def sampled_episodes(
    run: RunDirectory,
    folder: Path,
    *,
    split: str,
    num_episodes: int,
    num_samples: int,
    config: RunConfig | None = None,
) -> list[Trajectory]:
    """As `greedy_episodes`, but each task so often at the temperature of training."""
    config = config or load_config(run.config)
    plan = EvaluationPlan(split, num_episodes, config.sampling.temperature, config.seed)
    return _episodes(run, folder, plan, config, repeats=range(1, num_samples + 1))


def _proxy(run: RunDirectory, folder: Path, config: RunConfig) -> AgentProxy:
    session = open_session(config, run, SilentProgress())
    return session.proxy(session.load_model(folder))


def _episodes(
    run: RunDirectory,
    folder: Path,
    plan: EvaluationPlan,
    config: RunConfig,
    *,
    repeats: Iterable[int],
) -> list[Trajectory]:
    proxy = _proxy(run, folder, config)
    requests = [each for n in repeats for each in plan.requests(proxy.environments, repeat=n)]
    return proxy.rollout(requests, temperature=plan.temperature, policy_version="benchmark")


def minutes(run: RunDirectory, *, phases: Collection[str] | None = None) -> float:
    """What phases of a run took, all of them without `phases`, interrupted attempts included."""
    taken = run.read_status()["phases"].items()
    return sum(p["seconds"] for name, p in taken if phases is None or name in phases) / 60


def percent(shares: Iterable[float]) -> str:
    """Mean and spread over seeds in percent."""
    mean, spread = mean_and_spread(list(shares))
    return f"{100 * mean:.1f} ± {100 * spread:.1f}"


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation (n - 1), NaN for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else math.nan
