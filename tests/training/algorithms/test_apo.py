"""Residuals around the mean of the step's other trajectories, and where that is refused."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import Tensor

from ragen_apo.errors import ConfigError
from ragen_apo.policy.turn_features import state_reader, turn_features
from ragen_apo.session import Session
from ragen_apo.training.algorithms.apo import ApoTargets
from ragen_apo.training.algorithms.apo_turn import TurnTargets
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.values.state_values import Segment, segments
from tests.factories import (
    config,
    paying,
    sampled_logprobs,
    step_without_update,
    trainer,
    trainer_of,
)
from tests.sweeps import quick_first

TRACE = 0.5


STORED = [f"--algorithm.trace={TRACE}", "--algorithm.min_visits=1"]
PREDICTED = [f"--algorithm.trace={TRACE}", "--values.estimator=regression"]
FORMS = [("apo", []), ("apo_turn", STORED), ("apo_turn", PREDICTED)]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "by_turn"), FORMS)
@pytest.mark.usefixtures("few_random_features")
def test_the_offset_is_the_mean_of_what_the_others_multiply_their_log_ratios_with(
    algorithm: str, by_turn: list[str], session: Session
) -> None:
    trainer = trainer_of(
        session,
        algorithm,
        "--algorithm.center_residuals=true",
        "--training.tasks_per_step=6",
        "--algorithm.beta2=0.1",
        *by_turn,
    )
    seen = step_without_update(trainer, returns=[0.4, -0.3, 0.1, 1.0, 0.0, -0.1])
    advantages: list[list[float]] = []
    for trajectory in seen.trajectories:
        policy, reference = (
            sampled_logprobs(model, trajectory) for model in (trainer.policy, trainer.reference)
        )
        log_ratios = (policy - reference).tolist()
        parts = parts_of(trajectory, trainer)
        residuals = []
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            turns = trajectory.turns[part.first_turn : part.first_turn + part.num_turns]
            num_tokens = sum(len(turn.response_token_ids) for turn in turns)
            delta, log_ratios = sum(log_ratios[:num_tokens]), log_ratios[num_tokens:]
            next_value = following.value if following else 0.0
            residuals.append(part.reward + next_value - part.value - 0.1 * delta)
        traced = [
            sum(TRACE**later * residual for later, residual in enumerate(residuals[start:]))
            for start in range(len(residuals))
        ]
        advantages.append(traced)
    if algorithm == "apo_turn":
        known = sum(map(len, advantages)) - len(advantages)
        assert known > 0, "a state after the first one is known"
    others = [
        fmean(value for row, values in enumerate(advantages) if row != index for value in values)
        for index in range(len(advantages))
    ]
    offset_B = first_offsets(seen.targets)
    assert offset_B.tolist() == pytest.approx(others, abs=1e-5)
    assert offset_B.abs().max() > 1e-3 and len(set(offset_B.tolist())) > 1


def parts_of(trajectory: Trajectory, trainer: Trainer) -> list[Segment]:
    """The segments of an episode, cut turn by turn."""
    regression, task_id = trainer.values.regression, trajectory.task.task_id
    if regression is None:
        by_turn = trainer.config.algorithm.name == "apo_turn"
        states = trainer.values.states if by_turn else {}
        return segments(trajectory, task_value=trainer.values.tasks[task_id], values=states)
    (sample,) = training_samples(trajectory)
    tokens, targets = torch.tensor([sample.token_ids]), torch.tensor([sample.loss_mask])
    value_of = regression.on(tokens.device)
    values = value_of(turn_features(trainer.reference, tokens, targets, state_reader)).tolist()
    assert values[0] == pytest.approx(trainer.values.tasks[task_id], abs=1e-4)
    assert len(set(values)) == len(trajectory.turns)
    return [
        Segment(first_turn=number, num_turns=1, reward=turn.reward, value=value)
        for number, (turn, value) in enumerate(zip(trajectory.turns, values, strict=True))
    ]


def first_offsets(targets: ApoTargets | TurnTargets) -> Tensor:
    """What is subtracted from the first, or only, residual of each trajectory."""
    return targets.offset_BS[:, 0] if isinstance(targets, TurnTargets) else targets.offset_B


@pytest.mark.parametrize("algorithm", quick_first(["apo", "apo_turn"]))
def test_a_fitted_step_subtracts_the_line_through_the_others(
    algorithm: str, session: Session
) -> None:
    keys = ["--algorithm.fit_values=true", "--training.tasks_per_step=6", "--algorithm.beta2=1e-9"]
    keys += ["--algorithm.min_visits=1000"] if algorithm == "apo_turn" else []
    trainer = trainer_of(session, algorithm, *keys)
    tasks = {task: index**0.5 for index, task in enumerate(trainer.values.tasks)}
    trainer.values = replace(trainer.values, tasks=tasks)
    returns = [0.1, 0.9, 0.4, 1.0, 0.0, 0.3]
    seen = step_without_update(trainer, returns=returns)
    values = [trainer.values.tasks[episode.task.task_id] for episode in seen.trajectories]
    assert len(set(values)) > 3
    residuals = [earned - value for earned, value in zip(returns, values, strict=True)]
    expected = []
    for index, value in enumerate(values):
        rows = [row for row in range(len(values)) if row != index]
        fit = np.polyfit([values[row] for row in rows], [residuals[row] for row in rows], 1)
        others = [values[row] for row in rows]
        expected.append(float(np.polyval(fit, np.clip(value, min(others), max(others)))))
    assert first_offsets(seen.targets).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_kl_penalty_is_subtracted_from_as_a_larger_beta2_is(session: Session) -> None:
    """Else the common part of the penalty would push every trajectory down."""
    keys = ["--algorithm.center_residuals=true", "--training.tasks_per_step=4"]
    larger, penalised, without = (
        first_offsets(
            step_without_update(
                trainer_of(session, "apo", *keys, *own), returns=[0.4, -0.3, 0.1, 1.0]
            ).targets
        )
        for own in (
            ["--algorithm.beta2=0.5"],
            ["--algorithm.beta2=0.2", "--algorithm.kl_coefficient=0.3"],
            ["--algorithm.beta2=0.2"],
        )
    )
    torch.testing.assert_close(penalised, larger)
    assert not torch.equal(without, larger)


def test_a_clamp_limits_no_penalty_so_the_penalty_is_not_in_what_is_subtracted(
    session: Session,
) -> None:
    """Subtracted before the clamp, a large one would leave nothing of the returns."""
    keys = ["--algorithm.center_residuals=true", "--training.tasks_per_step=4"]
    penalised, without = (
        first_offsets(
            step_without_update(
                trainer_of(session, "apo", *keys, "--algorithm.advantage_clamp=1", *own),
                returns=[0.4, -0.3, 0.1, 1.0],
            ).targets
        )
        for own in (["--algorithm.kl_coefficient=0.3"], [])
    )
    assert torch.equal(penalised, without)


@pytest.mark.slow
def test_without_the_key_nothing_is_subtracted(session: Session) -> None:
    assert not step_without_update(trainer(session)).targets.offset_B.any()


@pytest.mark.parametrize("algorithm", ["apo", "apo_turn"])
@pytest.mark.parametrize(("option", "least"), [("center_residuals", 2), ("fit_values", 3)])
def test_a_step_with_too_few_tasks_for_an_offset_is_refused(
    algorithm: str, option: str, least: int
) -> None:
    keys = [f"--algorithm.{option}=true", f"--training.tasks_per_step={least - 1}"]
    with pytest.raises(ConfigError, match=f"at least {least}, got {least - 1}"):
        config(f"--algorithm={algorithm}", *keys, text="")
    config("--algorithm=grpo", "--training.tasks_per_step=1", text="")


CENTRED = ["--algorithm.center_residuals=true"]
FITTED = ["--algorithm.fit_values=true"]
NO_STATES = ["--algorithm.min_visits=1000"]


@pytest.mark.parametrize(
    ("algorithm", "keys", "num_updates"),
    [
        ("apo", CENTRED, 0),
        ("apo", [], 1),
        *quick_first(
            [
                ("apo", FITTED, 0),
                ("apo_turn", [*CENTRED, *NO_STATES], 0),
                ("apo_turn", [*CENTRED, *STORED], 1),
                ("apo_turn", NO_STATES, 1),
            ]
        ),
    ],
)
def test_equal_returns_teach_nothing_where_the_others_are_subtracted(
    algorithm: str, keys: list[str], num_updates: int, session: Session
) -> None:
    trainer = trainer_of(session, algorithm, *keys)
    before = [parameter.detach().clone() for parameter in trainer.policy.model.parameters()]
    with paying(trainer, [0.7] * 4):
        metrics = trainer.step(0).metrics
    assert metrics["num_updates"] == num_updates
    assert metrics["kept_share"] == num_updates
    after = trainer.policy.model.parameters()
    is_same = all(map(torch.equal, before, after))
    assert is_same == (num_updates == 0)


@pytest.mark.parametrize("algorithm", quick_first(["apo", "apo_turn"]))
def test_one_return_that_differs_makes_an_update(algorithm: str, session: Session) -> None:
    trainer = trainer_of(session, algorithm, *CENTRED)
    with paying(trainer, [0.7, 0.7, 0.7, 0.69]):
        metrics = trainer.step(0).metrics
    assert (metrics["num_updates"], metrics["kept_share"]) == (1, 1)
