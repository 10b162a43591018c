from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragen_apo.agent.assembly import build_proxy, sampling_conditions
from ragen_apo.config.agent import ContextConfig
from ragen_apo.errors import MissingValueError
from ragen_apo.files import read_json_lines
from ragen_apo.session import Session
from ragen_apo.stages.values import reference_values
from ragen_apo.training.algorithms import make_algorithm
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.trainer import Trainer
from ragen_apo.values.store import ValueStore


def changed(session: Session, section: str, **values: Any) -> Session:
    part = getattr(session.config, section).model_copy(update=values)
    return replace(session, config=session.config.model_copy(update={section: part}))


def trainer_of(session: Session) -> Trainer:
    """A trainer whose policy is the second reference and whose reference is the first.

    They differ, so that the log-ratio is not zero.
    """
    policy = session.load_model(session.run.reference(1))
    reference = session.load_model(session.run.reference(0))
    reference.model.requires_grad_(False)
    tasks = session.environments.tasks("train")
    return Trainer(
        session.config,
        policy=policy,
        reference=reference,
        proxy=build_proxy(session.config, policy, session.environments),
        tasks=tasks,
        values=reference_values(session, reference, tasks),
        algorithm=make_algorithm(session.config, reference),
        optimizer=Optimizer(policy.model),
    )


@pytest.fixture
def gradient_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Session], torch.Tensor]:
    """The gradient that reaches the optimizer in step 3, in float64."""

    def gradient_of(session: Session) -> torch.Tensor:
        trainer = trainer_of(session)
        monkeypatch.setattr(trainer.optimizer, "update", lambda **_: 1.0)
        trainer.step(3)
        parameters = trainer.policy.model.parameters()
        return torch.cat([parameter.grad.flatten().double() for parameter in parameters])

    return gradient_of


@pytest.mark.parametrize("values", [{"micro_batch_size": 1}, {"micro_batch_size": 8}])
def test_the_gradient_does_not_depend_on_the_micro_batch_size(
    values: dict, session: Session, gradient_of: Callable[[Session], torch.Tensor]
) -> None:
    expected = gradient_of(session)
    assert expected.norm() > 0.1
    actual = gradient_of(changed(session, "training", **values))
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_gradient_does_not_depend_on_how_many_episodes_are_played_side_by_side(
    num_rows: int, session: Session, gradient_of: Callable[[Session], torch.Tensor]
) -> None:
    expected = gradient_of(session)
    actual = gradient_of(changed(session, "training", num_rows=num_rows))
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("values", [{"loss": "weighted"}, {"advantage_clamp": 1e6}])
def test_the_weighted_form_and_a_clamp_out_of_reach_have_the_same_gradient(
    values: dict, session: Session, gradient_of: Callable[[Session], torch.Tensor]
) -> None:
    expected = gradient_of(session)
    actual = gradient_of(changed(session, "apo", **values))
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_a_step_is_a_function_of_weights_moments_and_its_number(session: Session) -> None:
    first, again = trainer_of(session), trainer_of(session)
    results = [trainer.step(2) for trainer in (first, again)]
    assert results[0].trajectories == results[1].trajectories
    for left, right in zip(
        first.policy.model.parameters(), again.policy.model.parameters(), strict=True
    ):
        assert torch.equal(left, right)


def test_one_rollout_a_task_and_the_sampled_logprobs_are_those_that_are_scored(
    session: Session,
) -> None:
    result = trainer_of(session).step(0)
    tasks = [trajectory.task.task_id for trajectory in result.trajectories]
    assert len(tasks) == len(set(tasks)) == session.config.training.tasks_per_step
    assert result.metrics["logprob_gap_max"] < 1e-4


def test_the_reference_is_not_trained(session: Session) -> None:
    trainer = trainer_of(session)
    before = trainer.reference.fingerprint()
    policy_before = trainer.policy.fingerprint()
    trainer.step(0)
    assert trainer.reference.fingerprint() == before
    assert trainer.policy.fingerprint() != policy_before


def test_shuffled_returns_are_a_permutation_that_differs_from_step_to_step(
    session: Session,
) -> None:
    plain, shuffled = trainer_of(session), trainer_of(changed(session, "apo", shuffle_returns=True))
    trajectories = plain.step(0).trajectories
    # Returns repeat in a tiny run: give each a number of its own.
    numbered = [
        replace(trajectory, turns=(replace(trajectory.turns[0], reward=float(number)),))
        for number, trajectory in enumerate(trajectories)
    ]
    rollouts = shuffled._gather(numbered, 0)
    assert rollouts.returns_B.tolist() == rollouts.rewards_BT.sum(dim=1).tolist()
    assert rollouts.returns_B.tolist() == shuffled._returns(numbered, 0).tolist()
    assert plain._returns(numbered, 0).tolist() == list(range(8))
    orders = [shuffled._returns(numbered, step).tolist() for step in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(8))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != list(range(8))


def test_a_task_without_v_star_is_an_error_and_never_zero(session: Session) -> None:
    reference = session.load_model(session.run.reference(0))
    tasks = session.environments.tasks("all")  # the held-out ones were not sampled
    with pytest.raises(MissingValueError, match="3 of 24 tasks have fewer than 1 sampled returns"):
        reference_values(session, reference, tasks)


def test_v_star_under_another_temperature_is_missing(session: Session) -> None:
    reference = session.load_model(session.run.reference(0))
    with pytest.raises(MissingValueError, match=r"temperature: store has 1\.0, asked for 0\.5"):
        reference_values(
            changed(session, "apo", temperature=0.5),
            reference,
            session.environments.tasks("train"),
        )


def test_v_star_of_another_context_mode_is_missing(session: Session) -> None:
    reference = session.load_model(session.run.reference(0))
    context = ContextConfig(mode="last_turns", num_turns=2)
    with pytest.raises(MissingValueError, match="store has 'full', asked for 'last_turns-2'"):
        reference_values(
            changed(session, "agent", context=context),
            reference,
            session.environments.tasks("train"),
        )


def test_the_ablations_use_zero_and_the_mean_of_the_returns(session: Session) -> None:
    reference = session.load_model(session.run.reference(0))
    tasks = session.environments.tasks("train")
    zero = reference_values(changed(session, "apo", value_baseline="zero"), reference, tasks).tasks
    assert zero == dict.fromkeys([task.task_id for task in tasks], 0.0)
    mean = reference_values(changed(session, "apo", value_baseline="mean"), reference, tasks).tasks
    v_star = reference_values(session, reference, tasks).tasks
    conditions = sampling_conditions(session.config, reference, session.environments)
    with ValueStore(session.run.values) as store:
        returns = store.returns_by_task(conditions)
    for task_id, value in mean.items():
        assert value == pytest.approx(sum(returns[task_id]) / len(returns[task_id]))
        assert value <= v_star[task_id] + 1e-12
    assert any(value < v_star[task_id] - 1e-6 for task_id, value in mean.items())


def test_a_refresh_makes_a_new_reference_and_keeps_the_old_values(session: Session) -> None:
    rows = read_json_lines(session.run.metrics)
    assert [row["reference_version"] for row in rows] == [0, 0, 0, 1, 1, 1]
    # The step after a refresh starts from the reference itself: its log-ratio is zero.
    assert [row["log_ratio_max_abs"] < 1e-4 for row in rows] == [True, False, False] * 2
    tasks = session.environments.tasks("train")
    values = [
        reference_values(session, session.load_model(session.run.reference(version)), tasks).tasks
        for version in (0, 1)
    ]
    assert values[0].keys() == values[1].keys()
    assert values[0] != values[1]


def test_frozen_embeddings_stay_as_they_are_while_the_rest_learns(session: Session) -> None:
    policy = session.load_model(session.run.reference(1))
    policy.freeze_embeddings()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    trainer = trainer_of(session)
    trainer.policy, trainer.optimizer = policy, Optimizer(policy.model)
    trainer.proxy = build_proxy(session.config, policy, session.environments)
    trainer.step(0)
    after = policy.model.state_dict()
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= same
    assert "model.layers.0.mlp.up_proj.weight" not in same
