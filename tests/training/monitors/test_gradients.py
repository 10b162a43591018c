"""The gradient by variance of the returns: buckets, norms, and that measuring changes nothing."""

import contextlib
import math
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragen_apo.agent.assembly import sampling_conditions
from ragen_apo.config import parse_config
from ragen_apo.errors import ConfigError, MissingValueError
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.session import Session
from ragen_apo.stages.values import reference_values
from ragen_apo.training.batching import collate
from ragen_apo.training.monitors.gradients import return_std, variance_buckets
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import training_samples
from ragen_apo.values.store import ValueStore

MONITORS = ("--monitors.every_steps=1", "--monitors.gradient_buckets=true")


def buckets(std: list[float], groups: list[int] | None = None) -> list[str]:
    groups = list(range(len(std))) if groups is None else groups
    return variance_buckets(torch.tensor(std, dtype=torch.float64), group_B=torch.tensor(groups))


def test_tasks_without_variance_and_thirds_of_the_others() -> None:
    std = [0.0, 0.6, 0.1, 0.5, 0.0, 0.2, 0.4, 0.3]
    assert buckets(std) == ["zero", "high", "low", "high", "zero", "low", "middle", "middle"]


def test_tasks_of_equal_variance_share_a_bucket() -> None:
    assert buckets([0.5, 0.5, 0.5]) == ["low"] * 3
    # Of four, the first third ends in the second: all three equal ones belong to it.
    assert buckets([0.2, 0.2, 0.2, 0.9]) == ["low", "low", "low", "high"]


def test_of_two_tasks_one_is_in_the_first_and_one_in_the_second_third() -> None:
    assert buckets([0.2, 0.1]) == ["middle", "low"]


def test_thirds_are_of_tasks_and_not_of_rollouts() -> None:
    std = [0.1] * 4 + [0.2] + [0.3]
    assert buckets(std, [0, 0, 0, 0, 1, 2]) == ["low"] * 4 + ["middle", "high"]


def test_rounding_is_no_variance() -> None:
    assert buckets([1e-9, 1e-3]) == ["zero", "low"]
    assert buckets([1e-9, 0.0]) == ["zero", "zero"]


def test_rollouts_of_a_task_give_its_variance_before_any_normalisation(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("grpo")
    trajectories = [
        replace(episode, turns=(replace(episode.turns[0], reward=reward),))
        for episode, reward in zip(
            trainer._roll_out(0), [0, 1, 2, 2, 0, 3, 1, 1, 0, 0, 0, 0], strict=True
        )
    ]
    rollouts = trainer._gather(trajectories, 0).with_returns(torch.zeros(12))
    half, third = math.sqrt(1 / 2), math.sqrt(9 / 2)  # sample standard deviations of (0, 1), (0, 3)
    expected = [half, half, 0, 0, third, third] + [0] * 6
    assert return_std(rollouts).tolist() == pytest.approx(expected)


def flat_gradient(trainer: Trainer) -> torch.Tensor:
    found = [p.grad for p in trainer.policy.model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten().double() for gradient in found])


def test_norms_of_the_regression_equal_separate_backward_passes_by_hand(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("apo", *MONITORS, "--apo.beta2=0.5")
    indices = {task.task_id: place for place, task in enumerate(trainer.tasks)}
    result = trainer_of("apo", *MONITORS, "--apo.beta2=0.5").step(3)
    names = ("zero", "low", "middle", "high")
    # The standard deviations 0, 1, 2, 3: those that are not 0 and do occur make thirds.
    episodes = result.trajectories
    std = [float(indices[episode.task.task_id] % 4) for episode in episodes]
    chosen = buckets(std)
    assert set(chosen) == {name for name in names if result.metrics[f"task_share_{name}_variance"]}
    assert len(set(chosen)) >= 3
    for name in set(chosen):
        trainer.policy.model.zero_grad()
        for episode, bucket in zip(episodes, chosen, strict=True):
            if bucket != name:
                continue
            batch = collate(training_samples(episode), pad_id=0, device=trainer.policy.device)
            ids, mask = batch.token_ids_BT, batch.loss_mask_BT
            with torch.no_grad():
                reference = score_tokens(trainer.reference, ids, mask).logprobs_BT.sum()
            delta = score_tokens(trainer.policy, ids, mask).logprobs_BT.sum() - reference
            advantage = episode.episode_return - trainer.values.tasks[episode.task.task_id]
            # (beta2 Delta - (R - V*))^2 / (2 beta2), mean over the six trajectories of the step
            ((0.5 * delta - advantage).square() / (2 * 0.5) / 6).backward()
        expected = flat_gradient(trainer).norm().item()
        assert result.metrics[f"gradient_norm_{name}_variance"] == pytest.approx(expected, rel=1e-3)
        assert result.metrics[f"task_share_{name}_variance"] == chosen.count(name) / 6


@pytest.mark.parametrize("algorithm", ["apo_turn", "ppo", "rloo", "reinforce_plus_plus"])
def test_norms_equal_separate_backward_passes_of_single_trajectories(
    algorithm: str, trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(algorithm, *MONITORS, "--policy_gradient.kl_coefficient=0.1")
    monkeypatch.setattr(trainer.optimizer, "update", lambda **_: 1.0)
    monkeypatch.setattr(trainer.algorithm, "update", lambda **_: {})
    std = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 0.0, 0.0, 1.0, 1.0])
    if algorithm == "apo_turn":
        std = std[::2]
    monkeypatch.setattr(
        "ragen_apo.training.monitors.gradients.return_std", lambda rollouts: std.double()
    )
    seen: dict[str, Any] = {}
    measure = trainer._monitor_gradients

    def note(rollouts: Any, signals: Any) -> dict[str, float]:
        seen.update(rollouts=rollouts, signals=signals)
        return measure(rollouts, signals)

    monkeypatch.setattr(trainer, "_monitor_gradients", note)
    metrics = trainer.step(3).metrics
    rollouts = seen["rollouts"]
    limits = {"zero": 0.0, "low": 1.0, "middle": 2.0, "high": 3.0}
    gradients = []
    for name, value in limits.items():
        trainer.policy.model.zero_grad()
        for micro in rollouts.micro_batches(range(len(rollouts)), size=1):
            if std[micro.places] == value:
                trainer._loss(micro, seen["signals"])[0].loss.backward()
        gradients.append(flat_gradient(trainer))
        expected = gradients[-1].norm().item()
        assert expected > 1e-6
        assert metrics[f"gradient_norm_{name}_variance"] == pytest.approx(expected, rel=1e-3)
    shares = [metrics[f"task_share_{name}_variance"] for name in limits]
    assert shares == pytest.approx([2 / 6, 2 / 6, 1 / 6, 1 / 6])


def test_the_one_bucket_that_all_tasks_are_in_has_the_norm_of_the_update(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("apo", *MONITORS)
    trainer.values = replace(
        trainer.values, return_std={task.task_id: 0.0 for task in trainer.tasks}
    )
    metrics = trainer.step(0).metrics
    whole = metrics["gradient_norm"]
    assert metrics["gradient_norm_zero_variance"] == pytest.approx(whole, rel=1e-4)
    assert [name for name in metrics if name.startswith("gradient_norm_")] == [
        "gradient_norm_zero_variance"
    ]
    assert metrics["task_share_high_variance"] == 0


@pytest.mark.parametrize("algorithm", ["apo", "ppo", "grpo"])
def test_training_is_bit_for_bit_the_same_with_and_without_monitors(
    algorithm: str, trainer_of: Callable[..., Trainer]
) -> None:
    passes = ["--policy_gradient.num_epochs=2", "--policy_gradient.num_minibatches=2"]
    keys = [] if algorithm == "apo" else passes
    plain = trainer_of(algorithm, "--monitors.every_steps=null", *keys)
    watched = trainer_of(algorithm, *MONITORS, *keys)
    torch.manual_seed(0)
    generators = torch.get_rng_state()
    for step in range(3):
        left, right = plain.step(step), watched.step(step)
        assert left.trajectories == right.trajectories
        added = {name for name in right.metrics if name not in left.metrics}
        assert {"mutual_information", "task_share_zero_variance"} <= added
        same = [name for name in left.metrics if not name.endswith("seconds")]
        assert {name: left.metrics[name] for name in same} == {
            name: right.metrics[name] for name in same
        }
    assert torch.equal(torch.get_rng_state(), generators)
    assert all(p.grad is None for p in watched.policy.model.parameters())
    states = [
        {
            **trainer.policy.model.state_dict(),
            **trainer.optimizer.state_tensors(),
            **trainer.algorithm.state_tensors(),
        }
        for trainer in (plain, watched)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_monitors_measure_in_the_first_step_and_then_every_so_many(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("apo", "--monitors.every_steps=2", "--monitors.num_thoughts=3")
    rows = [trainer.step(step).metrics for step in range(4)]
    assert ["mutual_information" in row for row in rows] == [True, False, True, False]
    assert rows[0]["num_scored_thoughts"] == 3
    assert not any("task_share_zero_variance" in row for row in rows)


def test_a_loss_that_does_not_reach_the_policy_has_norm_zero(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("ppo", *MONITORS, "--ppo.critic_warmup_steps=1")
    norms = [value for name, value in trainer.step(0).metrics.items() if "norm_" in name]
    assert norms and not any(norms)


def with_buckets(session: Session) -> Session:
    monitors = session.config.monitors.model_copy(update={"gradient_buckets": True})
    return replace(session, config=session.config.model_copy(update={"monitors": monitors}))


def test_standard_deviations_come_from_the_stored_returns(session: Session) -> None:
    reference = session.load_model(session.run.reference(0))
    conditions = sampling_conditions(session.config, reference, session.environments)
    with ValueStore(session.run.values) as store:
        returns = store.returns_by_task(conditions)
    tasks = [task for task in session.environments.tasks("train") if len(returns[task.task_id]) > 1]
    assert tasks
    found = reference_values(with_buckets(session), reference, tasks).return_std
    assert found is not None
    for task in tasks:
        first, second = returns[task.task_id]  # two samples at most in the tiny configuration
        assert found[task.task_id] == pytest.approx(abs(first - second) / 2)


def test_a_task_with_a_single_stored_return_is_an_error(session: Session) -> None:
    reference = session.load_model(session.run.reference(0))
    tasks = list(session.environments.tasks("train"))[:3]
    with contextlib.closing(sqlite3.connect(session.run.values)) as connection, connection:
        connection.execute(
            "DELETE FROM samples WHERE task_id = ? AND sample_index = 1", (tasks[1].task_id,)
        )
    words = rf"1 of 3 tasks have fewer than 2 in .*values.sqlite, such as {tasks[1].task_id}"
    with pytest.raises(MissingValueError, match=words):
        reference_values(with_buckets(session), reference, tasks)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--monitors.gradient_buckets=true"], None),
        (["--monitors.gradient_buckets=true", "--apo.num_value_samples=1"], "at least 2, got 1"),
        (["--monitors.gradient_buckets=true", "--monitors.every_steps=null"], "every_steps, got"),
        (["--monitors.gradient_buckets=true", "--algorithm=ppo"], "raise policy_gradient.group_"),
        (["--monitors.num_thoughts=1"], "num_thoughts"),
    ],
)
def test_monitors_that_would_measure_nothing_are_refused(
    keys: list[str], words: str | None
) -> None:
    if words is None:
        assert parse_config("", source="run.yaml", overrides=keys).monitors.gradient_buckets
        return
    with pytest.raises(ConfigError, match=words):
        parse_config("", source="run.yaml", overrides=keys)
