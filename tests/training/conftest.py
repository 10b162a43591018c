"""A finished tiny run to take models from, and the session of a copy of it."""

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragen_apo.agent.assembly import build_proxy
from ragen_apo.config import RunConfig, parse_config, resolved_yaml
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory, create_run
from ragen_apo.session import Session, open_session
from ragen_apo.stages.pipeline import train
from ragen_apo.stages.values import reference_values
from ragen_apo.training.algorithms import make_algorithm
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.trainer import Trainer
from ragen_apo.values.reference_values import ReferenceValues


@pytest.fixture
def session(finished_run: Path, tiny_config: str, tmp_path: Path) -> Iterator[Session]:
    """Work on a copy of the finished run, with the tiny configuration."""
    shutil.copytree(finished_run, tmp_path / "copy")
    before = torch.get_num_threads()
    config = parse_config(tiny_config, source="tiny")
    yield open_session(config, RunDirectory(tmp_path / "copy"), SilentProgress())
    torch.set_num_threads(before)


@pytest.fixture
def trainer_with(session: Session) -> Callable[..., Trainer]:
    """A trainer under a configuration; its policy is the second reference, its reference the first.

    They differ, so that the log-ratio is not zero. The values are those of the store, or given.
    """

    def trainer_with(config: RunConfig, *, values: ReferenceValues | None = None) -> Trainer:
        policy = session.load_model(session.run.reference(1))
        reference = session.load_model(session.run.reference(0))
        reference.model.requires_grad_(False)
        tasks = session.environments.tasks("train")
        if values is None:
            values = reference_values(replace(session, config=config), reference, tasks)
        return Trainer(
            config,
            policy=policy,
            reference=reference,
            proxy=build_proxy(config, policy, session.environments),
            tasks=tasks,
            values=values,
            algorithm=make_algorithm(config, reference),
            optimizer=Optimizer(policy.model),
        )

    return trainer_with


ALGORITHM_KEYS = {
    "apo": [
        "--apo.beta=0.1",
        "--apo.replay.num_trajectories_per_step=3",
        "--apo.replay.capacity=6",
    ],
    "apo_turn": ["--turn_level.min_visits", "1"],
    "ppo": [
        "--policy_gradient.num_epochs=2",
        "--policy_gradient.num_minibatches=2",
        "--policy_gradient.entropy_coefficient=0.01",
        "--policy_gradient.kl_in=reward",
        "--policy_gradient.kl_coefficient=0.01",
        "--ppo.bi_level_gae=true",
        "--ppo.critic_warmup_steps=1",
        "--monitors.every_steps=1",
        "--monitors.gradient_buckets=true",
    ],
    "grpo": ["--policy_gradient.kl_coefficient=0.01", "--rollout_filter.strategy=top_p"],
    "dr_grpo": [],
    "rloo": [],
    "reinforce_plus_plus": ["--reward_normalization.method=mean_std"],
    "brpo": [],
    "gigpo": [],
}
"""Something of what each algorithm can do besides its defaults."""


@pytest.fixture(scope="session")
def algorithm_config(finished_run: Path, tiny_config: str) -> Callable[[str], RunConfig]:
    """Four steps of an algorithm from the finished run's reference, three episodes a task."""

    def algorithm_config(algorithm: str) -> RunConfig:
        group = [] if algorithm in ("apo", "apo_turn") else ["--policy_gradient.group_size=3"]
        overrides = [
            f"--algorithm={algorithm}",
            f"--policy.path={finished_run / 'references' / '0'}",
            "--warm_start.enabled=false",
            "--apo.reference_refresh.every_steps=null",
            "--training.max_steps=4",
            "--training.tasks_per_step=4",
            "--training.eval_every=null",
            "--evaluation.num_episodes=1",
        ]
        keys = [*overrides, *group, *ALGORITHM_KEYS[algorithm]]
        return parse_config(tiny_config, source="tiny", overrides=keys)

    return algorithm_config


@pytest.fixture(scope="session")
def algorithm_runs(
    algorithm_config: Callable[[str], RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], RunDirectory]:
    """A finished run of an algorithm, made when it is first asked for; read only."""
    folder = tmp_path_factory.mktemp("algorithms")

    @functools.cache
    def finished(algorithm: str) -> RunDirectory:
        config = algorithm_config(algorithm)
        run = create_run(folder / algorithm, config_yaml=resolved_yaml(config))
        before = torch.get_num_threads()
        try:
            train(config, run, progress=SilentProgress())
        finally:
            torch.set_num_threads(before)
        return run

    return finished
