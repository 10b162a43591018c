"""One step of the trainer: what it plays, what its gradient does not depend on, what it leaves."""

import time
from typing import Any

import pytest
import torch

from ragen_apo.files import read_json_lines
from ragen_apo.policy.scoring import token_logprobs
from ragen_apo.session import Session
from ragen_apo.training.trainer import Trainer
from tests.factories import reference, step_without_update, trainer, trainer_of, with_keys


def gradient_of(trainer: Trainer) -> torch.Tensor:
    return step_without_update(trainer, 3).gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        "--training.micro_batch_size=1",
        "--training.micro_batch_size=8",
        "--training.num_rows=1",
        "--training.num_rows=3",
        "--algorithm.loss=weighted",
        "--algorithm.advantage_clamp=1e6",
    ],
)
def test_the_gradient_does_not_depend_on_how_it_is_computed(key: str, session: Session) -> None:
    """Micro-batches, episodes side by side, the weighted form, a clamp that is out of reach."""
    expected = gradient_of(trainer(session))
    assert expected.norm() > 0.1
    actual = gradient_of(trainer(with_keys(session, key)))
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.slow
def test_a_step_is_a_function_of_weights_moments_and_its_number(session: Session) -> None:
    first, again = trainer(session), trainer(session)
    results = [each.step(2) for each in (first, again)]
    assert results[0].trajectories == results[1].trajectories
    for left, right in zip(
        first.policy.model.parameters(), again.policy.model.parameters(), strict=True
    ):
        assert torch.equal(left, right)


def test_a_step_plays_each_task_once_and_trains_the_policy_alone(session: Session) -> None:
    one = trainer(session)
    before, policy_before = one.reference.fingerprint(), one.policy.fingerprint()
    result = one.step(0)
    tasks = [trajectory.task.task_id for trajectory in result.trajectories]
    assert len(tasks) == len(set(tasks)) == session.config.training.tasks_per_step
    assert result.metrics["logprob_gap_max"] < 1e-4, "what was sampled is what is scored"
    assert one.reference.fingerprint() == before
    assert one.policy.fingerprint() != policy_before


@pytest.mark.slow
def test_shuffled_returns_are_a_permutation_that_differs_from_step_to_step(
    session: Session,
) -> None:
    shuffled = trainer(with_keys(session, "--training.shuffle_returns=true"))
    numbers = list(range(8))  # returns repeat in a tiny run
    seen = [
        step_without_update(shuffled, step, returns=numbers).rollouts for step in (0, 0, 1, 2, 3)
    ]
    orders = [rollouts.returns_B.tolist() for rollouts in seen]
    assert sorted(orders[0]) == numbers
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert all(own != given for order in orders for own, given in enumerate(order))
    assert orders[0] == seen[0].rewards_BT.sum(dim=1).tolist()
    plain = step_without_update(trainer(session), 0, returns=numbers).rollouts
    assert plain.returns_B.tolist() == numbers


def test_a_refresh_makes_a_new_reference_from_which_the_next_step_starts(session: Session) -> None:
    rows = read_json_lines(session.run.metrics)
    assert [row["reference_version"] for row in rows] == [0, 0, 0, 1, 1, 1]
    # The step after a refresh starts from the reference itself: its log-ratio is zero.
    assert [row["log_ratio_max_abs"] < 1e-4 for row in rows] == [True, False, False] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "overrides", "is_apart"),
    [
        ("grpo", (), True),
        ("ppo", (), True),
        ("oapl", (), True),
        ("grpo", ("--algorithm.kl_coefficient=0.1",), False),
        ("grpo", ("--training.early_stop.max_kl=1000",), False),
        ("apo", (), False),
    ],
)
def test_scores_of_the_reference_for_a_metric_alone_are_not_in_the_seconds_of_training(
    algorithm: str,
    overrides: tuple[str, ...],
    is_apart: bool,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 0.0

    def slow(model: Any, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal seconds
        time.sleep(0.2)
        seconds += 0.2
        return token_logprobs(model, *args, **options)

    monkeypatch.setattr("ragen_apo.training.trainer.token_logprobs", slow)
    trained = trainer_of(session, algorithm, *overrides)
    started = time.perf_counter()
    metrics = trained.step(0).metrics
    whole = time.perf_counter() - started
    assert ("reference_scoring_seconds" in metrics) == is_apart
    apart = metrics.get("reference_scoring_seconds", 0.0)
    assert metrics["rollout_seconds"] + metrics["training_seconds"] + apart < whole
    assert apart >= (seconds if is_apart else 0.0)


def test_frozen_embeddings_stay_as_they_are_while_the_rest_learns(session: Session) -> None:
    policy = reference(session, 1)
    policy.model.requires_grad_(True)
    policy.freeze_embeddings()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    trainer(session, policy=policy).step(0)
    after = policy.model.state_dict()
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= same
    assert "model.layers.0.mlp.up_proj.weight" not in same
