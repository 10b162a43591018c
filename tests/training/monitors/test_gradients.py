"""The gradient by variance of the returns: buckets, norms, and that measuring changes nothing."""

import contextlib
import math
import sqlite3
from dataclasses import replace

import pytest
import torch

from ragen_apo.agent.assembly import sampling_conditions
from ragen_apo.errors import ConfigError, MissingValueError
from ragen_apo.session import Session
from ragen_apo.stages.values import reference_values
from ragen_apo.training.monitors.gradients import return_std, variance_buckets
from ragen_apo.training.trainer import Trainer
from ragen_apo.values.store import ValueStore
from tests import factories
from tests.factories import (
    SINGLE_ROLLOUT,
    config,
    flat_gradient,
    loss_of,
    reference,
    sampled_logprobs,
    step_without_update,
    with_keys,
)

BUCKETS = "--monitors.gradient_buckets=true"
MONITORS = ("--monitors.every_steps=1", BUCKETS)
NAMES = ("zero", "low", "middle", "high")


def trainer_of(session: Session, algorithm: str, *keys: str) -> Trainer:
    """A trainer with six tasks a step, two episodes a task except for A*-PO.

    The finished run has one sample of some tasks, too few for a variance: A*-PO is told the
    standard deviations 0, 1, 2, 3 in turn instead.
    """
    values = None
    if algorithm in SINGLE_ROLLOUT:
        tasks = session.training_tasks()
        stored = with_keys(session, f"--algorithm={algorithm}", "--turn_level.min_visits=1")
        std = {task.task_id: float(index % 4) for index, task in enumerate(tasks)}
        values = replace(reference_values(stored, reference(session), tasks), return_std=std)
    keys = ("--training.tasks_per_step=6", "--apo.num_value_samples=2", *keys)
    return factories.trainer_of(session, algorithm, *keys, group_size=2, values=values)


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


def test_rollouts_of_a_task_give_its_variance_before_any_normalisation() -> None:
    returns = [0.0, 1.0, 2.0, 2.0, 0.0, 3.0]
    played = [
        factories.episode(factories.turn(value), task=factories.task(str(index // 2)))
        for index, value in enumerate(returns)
    ]
    normalised = factories.rollouts(played, group_size=2).with_returns(torch.zeros(6))
    half, third = math.sqrt(1 / 2), math.sqrt(9 / 2)  # sample standard deviations of (0, 1), (0, 3)
    expected = [half, half, 0, 0, third, third]
    assert return_std(normalised).tolist() == pytest.approx(expected)


@pytest.mark.slow
def test_norms_of_the_regression_equal_separate_backward_passes_by_hand(session: Session) -> None:
    trainer = trainer_of(session, "apo", *MONITORS, "--apo.beta2=0.5")
    seen = step_without_update(trainer, 3)
    metrics = seen.result.metrics
    # The standard deviations 0, 1, 2, 3: those that are not 0 and do occur make thirds.
    std = trainer.values.return_std
    assert std is not None
    chosen = buckets([std[each.task.task_id] for each in seen.trajectories])
    assert set(chosen) == {name for name in NAMES if metrics[f"task_share_{name}_variance"]}
    assert len(set(chosen)) >= 3
    for name in set(chosen):
        trainer.policy.model.zero_grad()
        for trajectory, bucket in zip(seen.trajectories, chosen, strict=True):
            if bucket != name:
                continue
            with torch.no_grad():
                log_reference = sampled_logprobs(trainer.reference, trajectory).sum()
            delta = sampled_logprobs(trainer.policy, trajectory).sum() - log_reference
            advantage = trajectory.episode_return - trainer.values.tasks[trajectory.task.task_id]
            # (beta2 Delta - (R - V*))^2 / (2 beta2), mean over the six trajectories of the step
            ((0.5 * delta - advantage).square() / (2 * 0.5) / 6).backward()
        expected = flat_gradient(trainer).norm().item()
        assert metrics[f"gradient_norm_{name}_variance"] == pytest.approx(expected, rel=1e-3)
        assert metrics[f"task_share_{name}_variance"] == chosen.count(name) / 6


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo_turn", "ppo", "rloo", "reinforce_plus_plus"])
def test_norms_equal_separate_backward_passes_of_single_trajectories(
    algorithm: str, session: Session
) -> None:
    trainer = trainer_of(session, algorithm, *MONITORS, "--policy_gradient.kl_coefficient=0.1")
    # Two episodes a task: the standard deviations are 0, 1, 2, 3, 0, 1 times the square root of 2.
    pairs = [0.0, 0.0, 0.0, 2.0, 0.0, 4.0, 0.0, 6.0, 0.5, 0.5, 1.0, 3.0]
    returns = None if algorithm in SINGLE_ROLLOUT else pairs
    seen = step_without_update(trainer, 3, returns=returns)
    metrics, played = seen.result.metrics, seen.rollouts
    of_rows = buckets(return_std(played).tolist(), played.group_B.tolist())
    groups = dict(zip(played.group_B.tolist(), of_rows, strict=True))
    assert len(set(of_rows)) >= 3
    for name in set(of_rows):
        trainer.policy.model.zero_grad()
        for micro in played.micro_batches(range(len(played)), size=1):
            if of_rows[int(micro.places)] == name:
                loss_of(trainer, seen, micro).backward()
        expected = flat_gradient(trainer).norm().item()
        assert expected > 1e-6
        assert metrics[f"gradient_norm_{name}_variance"] == pytest.approx(expected, rel=1e-3)
        share = list(groups.values()).count(name) / 6
        assert metrics[f"task_share_{name}_variance"] == pytest.approx(share)


def test_the_one_bucket_that_all_tasks_are_in_has_the_norm_of_the_update(
    session: Session,
) -> None:
    trainer = trainer_of(session, "apo", *MONITORS)
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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "ppo", "grpo"])
def test_training_is_bit_for_bit_the_same_with_and_without_monitors(
    algorithm: str, session: Session
) -> None:
    passes = ["--policy_gradient.num_epochs=2", "--policy_gradient.num_minibatches=2"]
    keys = [] if algorithm == "apo" else passes
    plain = trainer_of(session, algorithm, "--monitors.every_steps=null", *keys)
    watched = trainer_of(session, algorithm, *MONITORS, *keys)
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


@pytest.mark.slow
def test_monitors_measure_in_the_first_step_and_then_every_so_many(
    session: Session,
) -> None:
    trainer = trainer_of(session, "apo", "--monitors.every_steps=2", "--monitors.num_thoughts=3")
    rows = [trainer.step(step).metrics for step in range(4)]
    assert ["mutual_information" in row for row in rows] == [True, False, True, False]
    assert rows[0]["num_scored_thoughts"] == 3
    assert not any("task_share_zero_variance" in row for row in rows)


@pytest.mark.slow
def test_a_loss_that_does_not_reach_the_policy_has_norm_zero(
    session: Session,
) -> None:
    trainer = trainer_of(session, "ppo", *MONITORS, "--ppo.critic_warmup_steps=1")
    norms = [value for name, value in trainer.step(0).metrics.items() if "norm_" in name]
    assert norms and not any(norms)


def test_standard_deviations_come_from_the_stored_returns(session: Session) -> None:
    model = reference(session)
    conditions = sampling_conditions(session.config, model, session.environments)
    with ValueStore(session.run.values) as store:
        returns = store.returns_by_task(conditions)
    tasks = [task for task in session.environments.tasks("train") if len(returns[task.task_id]) > 1]
    assert tasks
    asked = with_keys(session, BUCKETS, "--apo.num_value_samples=2")
    found = reference_values(asked, model, tasks).return_std
    assert found is not None
    for task in tasks:
        first, second = returns[task.task_id]  # two samples at most in the tiny configuration
        assert found[task.task_id] == pytest.approx(abs(first - second) / 2)


def test_a_task_with_a_single_stored_return_is_an_error(session: Session) -> None:
    tasks = list(session.environments.tasks("train"))[:3]
    with contextlib.closing(sqlite3.connect(session.run.values)) as connection, connection:
        connection.execute(
            "DELETE FROM samples WHERE task_id = ? AND sample_index = 1", (tasks[1].task_id,)
        )
    words = rf"1 of 3 tasks have fewer than 2 in .*values.sqlite, such as {tasks[1].task_id}"
    asked = with_keys(session, BUCKETS, "--apo.num_value_samples=2")
    with pytest.raises(MissingValueError, match=words):
        reference_values(asked, reference(session), tasks)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([BUCKETS], None),
        ([BUCKETS, "--apo.num_value_samples=1"], "at least 2, got 1"),
        ([BUCKETS, "--monitors.every_steps=null"], "every_steps, got"),
        ([BUCKETS, "--algorithm=ppo"], "raise policy_gradient.group_"),
        (["--monitors.num_thoughts=1"], "num_thoughts"),
    ],
)
def test_monitors_that_would_measure_nothing_are_refused(
    keys: list[str], words: str | None
) -> None:
    if words is None:
        assert config(*keys, text="").monitors.gradient_buckets
        return
    with pytest.raises(ConfigError, match=words):
        config(*keys, text="")
