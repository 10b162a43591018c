"""What the tests build, with defaults for all that a test does not care about.

Configurations are made here alone (`config`, `changed`), and so are tasks, turns, episodes,
rollouts, conditions of a value store, runs and trainers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from filelock import FileLock
from safetensors.torch import load_file

from ragen_apo.agent.assembly import build_environments
from ragen_apo.agent.context import TokenLimits
from ragen_apo.cli import app
from ragen_apo.config import RunConfig, parse_config, resolved_yaml
from ragen_apo.config.load import config_of
from ragen_apo.files import read_json_lines
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import TokenScores, score_tokens
from ragen_apo.progress import Progress, SilentProgress
from ragen_apo.run_directory import RunDirectory, create_run
from ragen_apo.session import Session
from ragen_apo.stages.pipeline import train
from ragen_apo.stages.stored_values import reference_values, selected_tasks
from ragen_apo.training.batching import collate
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.rollouts import MicroBatch, Rollouts, gather_rollouts
from ragen_apo.training.rollouts_ahead import rollouts_ahead
from ragen_apo.training.trainer import StepResult, Trainer
from ragen_apo.types import StopReason, Task, Trajectory, Turn, make_task, training_samples
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.state_values import ReferenceValues

TINY_ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""Keys of a transformers configuration, for architectures that are built and not loaded."""

# Configurations

MACHINE = os.environ.get("RAGEN_APO_TEST_MACHINE", "{num_threads: 1, device: cpu}")
"""The machine of tiny runs. On a host with a GPU, the same tests run there:

    RAGEN_APO_TEST_MACHINE='{device: cuda, deterministic: true}' pytest tests/stages tests/training
"""
TINY_CONFIG = (
    f"machine: {MACHINE}"
    + """
seed: 0
environment: {name: shop, num_products: 24, max_turns: 3}
agent: {max_response_tokens: 16, max_context_tokens: 320}
policy:
  small:
    vocab_size: 600
    hidden_size: 32
    num_layers: 1
    num_heads: 2
    intermediate_size: 64
    max_position: 512
warm_start:
  checkpoint_every: 10
  copy: {max_steps: 12, batch_size: 4, sequence_length: 32}
  demonstrations: {num_episodes_per_task: 1, num_steps: 40, batch_size: 8, learning_rate: 2.0e-2}
values: {num_samples: 1, adaptive: true, max_samples: 2}
reference: {refresh_every_steps: 3}
training:
  max_steps: 6
  tasks_per_step: 8
  micro_batch_size: 4
  num_rows: 24
  eval_every: 3
  eval_episodes: 4
  checkpoint_every: 2
evaluation: {num_episodes: 5}
"""
)
"""Every phase of a run in about three seconds; its agent answers in the right form now and then."""

HARDLY_TRAINED = (
    "--warm_start.demonstrations.num_steps=1",
    "--warm_start.copy.max_steps=0",
    "--training.eval_every=null",
)
"""For runs of which only the files matter."""

NO_LIMITS = TokenLimits(max_context_tokens=1 << 30, max_response_tokens=1)
"""A context that no test fills."""

SINGLE_ROLLOUT = ("apo", "apo_turn")
"""The algorithms that play a task once a step and subtract V*."""


def config(
    *overrides: str, text: str = TINY_CONFIG, environment: Mapping[str, Any] | None = None
) -> RunConfig:
    """The tiny configuration, or that of a YAML text, with `--key=value` overrides.

    `environment` replaces the whole section, as the options of one are unknown to another.
    """
    if environment is not None:
        text = yaml.safe_dump(yaml.safe_load(text) | {"environment": dict(environment)})
    return parse_config(text, source="test.yaml", overrides=overrides)


def changed(
    before: RunConfig, *overrides: str, environment: Mapping[str, Any] | None = None
) -> RunConfig:
    """A configuration with overrides on top of its own, or with another section `environment`."""
    values = before.model_dump(by_alias=True)
    if environment is not None:
        values["environment"] = dict(environment)
    return config_of([values], source="test.yaml", overrides=overrides)


# Records


def task(instruction: str = "buy", **fields: Any) -> Task:
    """A training task of the shop; equal arguments make equal tasks."""
    defaults = {"environment": "shop", "split": "train", "category": "mug", "payload": {}}
    return make_task(instruction=instruction, **{**defaults, **fields})


def turn(reward: float = 0.0, *, response_token_ids: Sequence[int] = (4, 5), **fields: Any) -> Turn:
    """A turn of two sampled tokens; each token has log-probability -0.5."""
    defaults = {
        "observation": "a page",
        "prompt_token_ids": (1, 2, 3),
        "logprobs": (-0.5,) * len(response_token_ids),
        "response": "",
        "thought": "",
        "action": "",
    }
    ids = tuple(response_token_ids)
    return Turn(reward=reward, response_token_ids=ids, **{**defaults, **fields})


def episode(*turns: Turn, **fields: Any) -> Trajectory:
    """An episode of these turns that the environment ended (or not: `terminated=False`)."""
    terminated = fields.setdefault("terminated", True)
    defaults = {
        "task": fields.get("task") or task(),
        "truncated": not terminated,
        "stop_reason": StopReason.TERMINATED if terminated else StopReason.TURN_LIMIT,
        "success": False,
        "final_observation": "the end",
        "policy_version": "p",
        "seed": 0,
    }
    return Trajectory(turns=turns, **{**defaults, **fields})


def played(instruction: str, *, rewards: Sequence[float] = (1.0,), **fields: Any) -> Trajectory:
    """An episode of a task, one turn a reward, with all that a file has to keep exactly."""
    turns = (
        turn(
            reward,
            observation=f"page {number}",
            logprobs=(-0.1, -1 / 3),
            response="<think>t</think><answer>search[mug]</answer>",
            thought="t",
            action="search[mug]",
            flags=("format_error",),
            state_key="start",
        )
        for number, reward in enumerate(rewards)
    )
    return episode(*turns, **{"task": task(instruction), "success": sum(rewards) > 0.5, **fields})


def conditions(**fields: Any) -> SamplingConditions:
    """How the returns of a value store were sampled."""
    defaults = {
        "reference_fingerprint": "abc",
        "environment": "shop",
        "environment_version": "1",
        "environment_options": "{}",
        "reward_version": "1",
        "context_mode": "full",
        "chat_template_hash": "4f2a",
        "system_prompt": "You are a shopper.",
        "parser_version": "1",
        "max_response_tokens": 64,
        "max_context_tokens": 2048,
        "temperature": 1.0,
        "format_penalty": 0.1,
        "invalid_action_penalty": 0.05,
    }
    return SamplingConditions(**{**defaults, **fields})


def rollouts(trajectories: Sequence[Trajectory], **fields: Any) -> Rollouts:
    """The rollouts of a step that played these episodes, one a task."""
    defaults = {
        "step": 0,
        "group_size": 1,
        "values": ReferenceValues(),
        "pad_id": 0,
        "device": torch.device("cpu"),
    }
    return gather_rollouts(trajectories, **{**defaults, **fields})


# Runs


class Sayings(SilentProgress):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    warn = say


@contextlib.contextmanager
def threads_restored() -> Iterator[None]:
    """A run sets torch's number of threads for the whole process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(config: RunConfig, path: Path, *, progress: Progress | None = None) -> RunDirectory:
    """A run of a configuration, trained; one that is there goes on."""
    there = RunDirectory(path)
    directory = there if path.exists() else create_run(path, config_yaml=resolved_yaml(config))
    with threads_restored():
        train(config, directory, progress=progress or SilentProgress())
    return directory


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The path that `make` was called with, by one of the processes that share the folder."""
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder / "run")
            (folder / "made").touch()
    return folder / "run"


def shipped_run(config: Path, folder: Path, *overrides: str) -> RunDirectory:
    """The run of a configuration in configs/, on a CPU with two steps of four tasks.

    By the command, up to the report.
    """
    sizes = [
        "--machine.device=cpu",
        "--machine.num_threads=1",
        "--agent.max_response_tokens=12",
        "--values.num_samples=2",
        "--training.max_steps=2",
        "--training.max_tasks=4",
        "--training.tasks_per_step=4",
        "--training.eval_every=1",
        "--training.eval_episodes=2",
        "--evaluation.num_episodes=3",
    ]
    keys = ["--config", str(config), "--run-dir", str(folder), *overrides, *sizes]
    with threads_restored():
        app(["train", *keys], result_action="return_value")
    return RunDirectory(folder)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of metrics, without those that the clock decides."""
    found = read_json_lines(path)
    assert found
    return [{key: row[key] for key in row if not key.endswith("seconds")} for row in found]


def assert_same_tensors(actual: Path, expected: Path) -> None:
    """Two model folders hold the same weights, bit by bit."""
    left, right = tensors(actual), tensors(expected)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a model folder."""
    return load_file(folder / "model.safetensors")


# Sessions and trainers


def with_keys(session: Session, *overrides: str, **options: Any) -> Session:
    """The session with overrides on top of its configuration."""
    after = changed(session.config, *overrides, **options)
    before = session.config
    same = (after.environment, after.agent, after.rollouts) == (
        before.environment,
        before.agent,
        before.rollouts,
    )
    environments = (
        session.environments
        if same
        else build_environments(after.environment, after.agent, after.rollouts)
    )
    return replace(session, config=after, environments=environments)


def with_progress(session: Session, progress: Progress) -> Session:
    """The session with somebody else who is told."""
    return replace(session, progress=progress)


def reference(session: Session, version: int = 0) -> LanguageModel:
    """A frozen reference of the session's run."""
    model = session.load_model(session.run.reference(version))
    model.model.requires_grad_(False)
    return session.shard(model)


def trainer(
    session: Session,
    *,
    policy: LanguageModel | None = None,
    tasks: Sequence[Task] | None = None,
    values: ReferenceValues | None = None,
) -> Trainer:
    """A trainer whose policy is the run's second reference and whose reference is the first.

    They differ, so that the log-ratio is not zero. The values are those of the store, or given.
    """
    frozen = reference(session)
    policy = policy or session.shard(session.load_model(session.run.reference(1)))
    tasks = session.training_tasks() if tasks is None else tasks
    algorithm = session.config.algorithm.make(session.config, policy)
    return Trainer(
        session.config,
        policy=policy,
        reference=frozen,
        proxy=session.proxy(policy),
        tasks=selected_tasks(session, frozen, tasks),
        values=reference_values(session, frozen, tasks) if values is None else values,
        algorithm=algorithm,
        optimizer=Optimizer(policy.model),
        ahead=rollouts_ahead(session.config, algorithm, session.environments),
    )


def trainer_of(
    session: Session,
    algorithm: str,
    *overrides: str,
    group_size: int = 3,
    values: ReferenceValues | None = None,
) -> Trainer:
    """A trainer of an algorithm, four tasks a step, each in a group but for A*-PO."""
    keys = [f"--algorithm={algorithm}", "--training.tasks_per_step=4"]
    if algorithm not in SINGLE_ROLLOUT:
        keys.append(f"--algorithm.group_size={group_size}")
    return trainer(with_keys(session, *keys, *overrides), values=values)


@dataclass(frozen=True)
class SeenStep:
    """A step of a trainer whose optimizer was held back."""

    result: StepResult
    rollouts: Rollouts
    """What the algorithm prepared its targets from."""
    targets: Any
    gradient: torch.Tensor
    """What reached the optimizer of the policy, flat, float64."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.result.trajectories


def step_without_update(
    trainer: Trainer, step: int = 0, *, returns: Sequence[float] | None = None
) -> SeenStep:
    """One step that leaves weights and moments as they are, and its gradient in place.

    `returns` replaces those of the episodes, which repeat in a tiny run.
    """
    seen: dict[str, Any] = {}
    prepare = trainer.algorithm.prepare

    def prepared(rollouts: Rollouts) -> Any:
        seen.update(rollouts=rollouts, targets=prepare(rollouts))
        return seen["targets"]

    with (
        patch.object(trainer.algorithm, "prepare", prepared),
        patch.object(trainer.optimizer, "update", lambda **_: 1.0),
        patch.object(trainer.algorithm, "update", lambda **_: {}),
        paying(trainer, returns),
    ):
        trainer.policy.model.zero_grad()
        result = trainer.step(step)
    return SeenStep(result, seen["rollouts"], seen["targets"], flat_gradient(trainer))


@contextlib.contextmanager
def paying(trainer: Trainer, returns: Sequence[float] | None) -> Iterator[None]:
    """The episodes of a step have these returns, each paid in the last turn."""
    roll_out = trainer.proxy.rollout

    def paid(*args: Any, **options: Any) -> list[Trajectory]:
        played = roll_out(*args, **options)
        if returns is None:
            return played
        return [with_return(each, given) for each, given in zip(played, returns, strict=True)]

    with patch.object(trainer.proxy, "rollout", paid):
        yield


def with_return(trajectory: Trajectory, value: float) -> Trajectory:
    """The episode with all of this return in its last turn."""
    turns = [replace(each, reward=0.0) for each in trajectory.turns]
    turns[-1] = replace(turns[-1], reward=value)
    return replace(trajectory, turns=tuple(turns))


def flat_gradient(trainer: Trainer) -> torch.Tensor:
    """The gradient of the policy in float64."""
    grads = [parameter.grad for parameter in trainer.policy.model.parameters()]
    return torch.cat([grad.flatten().double() for grad in grads if grad is not None])


def sampled_logprobs(
    model: LanguageModel, trajectory: Trajectory, *, temperature: float = 1.0
) -> torch.Tensor:
    """log pi of the sampled tokens [N] of an episode, scored again and alone."""
    batch = collate(training_samples(trajectory), pad_id=0, device=model.device)
    scores = score_tokens(model, batch.token_ids_RT, batch.loss_mask_RT, temperature=temperature)
    return scores.logprobs_BT[batch.loss_mask_RT]


def loss_of(trainer: Trainer, seen: SeenStep, micro: MicroBatch) -> torch.Tensor:
    """What a micro-batch adds to the loss of a step, as the algorithm has it."""
    scores = score_tokens(
        trainer.policy,
        micro.samples.token_ids_RT,
        micro.samples.loss_mask_RT,
        entropy_gradients=trainer.algorithm.entropy_gradients,
    )
    in_rows = TokenScores(
        logprobs_BT=micro.in_rows(scores.logprobs_BT), entropy_BT=micro.in_rows(scores.entropy_BT)
    )
    return trainer.algorithm.loss(seen.targets, micro, in_rows).loss


# One configuration and one run of every algorithm

ALGORITHM_KEYS: Mapping[str, Sequence[str]] = {
    "apo": ("--apo.beta=0.1",),
    "apo_turn": ("--algorithm.min_visits=1",),
    "oapl": ("--algorithm.lag=2", "--monitors.every_steps=1"),
    "ppo": (
        "--algorithm.num_epochs=2",
        "--algorithm.num_minibatches=2",
        "--algorithm.entropy_coefficient=0.01",
        "--algorithm.kl_in=reward",
        "--algorithm.kl_coefficient=0.01",
        "--algorithm.bi_level_gae=true",
        "--algorithm.critic_warmup_steps=1",
        "--monitors.every_steps=1",
    ),
    "grpo": ("--algorithm.kl_coefficient=0.01", "--rollout_filter.strategy=top_p"),
    "dr_grpo": (),
    "rloo": (),
    "reinforce_plus_plus": ("--algorithm.reward_normalization.method=mean_std",),
    "brpo": (),
    "gigpo": (),
}
"""Something of what each algorithm can do besides its defaults."""


class AlgorithmRuns:
    """Four steps of an algorithm from a finished run's reference, three episodes a task."""

    def __init__(self, reference: Path, folder: Path) -> None:
        self._reference, self._folder = reference, folder

    def config(self, algorithm: str, *overrides: str, **options: Any) -> RunConfig:
        group = [] if algorithm in SINGLE_ROLLOUT else ["--algorithm.group_size=3"]
        return config(
            f"--algorithm={algorithm}",
            f"--policy.path={self._reference}",
            "--warm_start.enabled=false",
            "--reference.refresh_every_steps=null",
            "--training.max_steps=4",
            "--training.tasks_per_step=4",
            "--training.eval_every=null",
            "--evaluation.num_episodes=1",
            *group,
            *ALGORITHM_KEYS[algorithm],
            *overrides,
            **options,
        )

    def finished(self, algorithm: str) -> RunDirectory:
        """The run, made when a process first asks for it; read only."""
        made = made_once(self._folder / algorithm, partial(run, self.config(algorithm)))
        return RunDirectory(made)
