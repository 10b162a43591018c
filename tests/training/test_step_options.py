"""Options that no shipped configuration sets, seen in a step: what it trains on, and with what."""

from statistics import fmean
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ragen_apo.policy.scoring import TokenScores
from ragen_apo.session import Session
from ragen_apo.stages.training import make_trainer
from ragen_apo.training.algorithms.ppo import PpoAlgorithm
from ragen_apo.training.checkpoint import STAGE_TWO, Position
from ragen_apo.training.rollouts import MicroBatch
from ragen_apo.training.step_metrics import LossPart
from tests.factories import changed, loss_of, step_without_update, trainer_of, with_keys

RETURNS = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.0, 0.9, 1.1, 0.9]
"""Of four tasks, three rollouts each. Standard deviations 0, 0.577, 0.289, 0.115: 59, 29 and 12% of
their sum 0.981."""
FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"strategy": "top_p", "value": 0.8}, [1, 2]),
    ({"strategy": "top_p", "value": 0.5}, [1]),
    ({"strategy": "top_fraction", "value": 0.7}, [1, 2]),
    ({"strategy": "top_fraction", "value": 1.0, "zero_variance": "keep"}, [0, 1, 2, 3]),
]


@pytest.mark.slow
def test_a_step_trains_on_the_tasks_that_the_filter_keeps_and_on_all_their_rollouts(
    session: Session,
) -> None:
    trainer = trainer_of(session, "grpo")
    everything = trainer.config
    for settings, kept in FILTERS:
        keys = [f"--rollout_filter.{name}={value}" for name, value in settings.items()]
        trainer.config = changed(everything, *keys)
        seen = step_without_update(trainer, returns=RETURNS)
        assert seen.rollouts.group_B.tolist() == [n for n in kept for _ in range(3)], settings
        assert seen.result.metrics["kept_share"] == len(kept) / 4, settings


@pytest.mark.slow
def test_of_several_episodes_the_best_is_trained_on_and_all_are_counted(session: Session) -> None:
    trainer = trainer_of(session, "grpo", "--training.best_of=2")
    returns = [0.1 * (number * 7 % 24) for number in range(24)]  # of four tasks three pairs each
    seen = step_without_update(trainer, returns=returns)
    pairs = [seen.trajectories[start : start + 2] for start in range(0, 24, 2)]
    best = [max(pair, key=lambda each: each.episode_return) for pair in pairs]
    assert list(seen.rollouts.trajectories) == best
    assert [pair.index(one) for pair, one in zip(pairs, best, strict=True)].count(0) in range(1, 12)
    assert seen.rollouts.group_B.tolist() == [number // 3 for number in range(12)]
    tasks = [each.task.task_id for each in seen.trajectories]
    assert [tasks.count(each.task.task_id) for each in best] == [6] * 12
    metrics = seen.result.metrics
    assert metrics["num_episodes"] == 24
    num_tokens = sum(each.num_response_tokens for each in seen.trajectories)
    assert metrics["num_generated_tokens"] == num_tokens
    assert metrics["return_mean"] == pytest.approx(fmean(returns)), "of all, as the policy plays"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # Mean 1/12 and standard deviation sqrt(1/12): the success is 3.175 of them above it.
        ("mean", [-1 / 12] * 11 + [11 / 12]),
        ("mean_std", [-0.2887] * 11 + [3.1754]),
        ("asym_clip", [-0.2887] * 11 + [3.0]),
    ],
)
def test_advantages_are_made_of_the_normalised_returns(
    method: str, expected: list[float], session: Session
) -> None:
    trainer = trainer_of(session, "grpo", f"--algorithm.reward_normalization.method={method}")
    seen = step_without_update(trainer, returns=[0.0] * 11 + [1.0])
    assert seen.rollouts.returns_B.tolist() == pytest.approx(expected, abs=1e-4)
    paid_B = seen.rollouts.rewards_BT.sum(dim=1)
    assert paid_B.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("fewest_passes")
@pytest.mark.parametrize(
    ("algorithm", "coefficient", "expected"),
    [
        # Two passes of two minibatches, each one micro-batch.
        ("grpo", 0.0, [True, True, False, False]),
        ("grpo", 0.01, [True] * 4),
        ("ppo", 0.0, [True, True, False, False]),
        ("ppo", 0.01, [True] * 4),
    ],
)
def test_later_passes_compute_the_entropy_for_a_bonus_only(
    algorithm: str, coefficient: float, expected: list[bool], session: Session
) -> None:
    keys = ["--algorithm.num_epochs=2", "--algorithm.num_minibatches=2"]
    keys += [f"--algorithm.entropy_coefficient={coefficient}", "--training.micro_batch_size=99"]
    trainer = trainer_of(session, algorithm, *keys)
    loss, has_entropy = trainer.algorithm.loss, []

    def seen(targets: Any, micro: MicroBatch, scores: TokenScores) -> LossPart:
        has_entropy.append(scores.entropy_BT is not None)
        return loss(targets, micro, scores)

    with patch.object(trainer.algorithm, "loss", seen):
        metrics = step_without_update(trainer, returns=RETURNS).result.metrics
    assert has_entropy == expected
    one_pass = trainer_of(session, algorithm, *keys, "--algorithm.num_epochs=1")
    alone = step_without_update(one_pass, returns=RETURNS).result.metrics
    assert metrics["entropy"] == alone["entropy"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("fewest_passes")
@pytest.mark.parametrize(("clip", "is_stopped"), [("0.2", True), ("null", False)])
def test_the_value_clip_stops_a_critic_that_has_moved_further_towards_the_returns(
    clip: str, is_stopped: bool, session: Session
) -> None:
    trainer = trainer_of(session, "ppo", f"--algorithm.value_clip={clip}")
    seen = step_without_update(trainer, returns=[1000.0] * 12)
    assert isinstance(trainer.algorithm, PpoAlgorithm)
    bias = dict(trainer.algorithm.other_models[0].named_parameters())["head.bias"]
    with torch.no_grad():
        bias += 1.0  # every value, which was 0
    (micro,) = seen.rollouts.micro_batches(range(12), size=1000)
    (gradient,) = torch.autograd.grad(loss_of(trainer, seen, micro), bias)
    assert (gradient.item() == 0) is is_stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("autocast", "least", "most"), [(None, 0.0, 1e-5), (torch.bfloat16, 1e-5, 0.1)]
)
def test_importance_weights_undo_the_samplers_rounding_alone(
    autocast: torch.dtype | None, least: float, most: float, session: Session
) -> None:
    gradients = []
    for cap in ("null", "2"):
        trainer = trainer_of(session, "grpo", f"--algorithm.importance_cap={cap}")
        trainer.policy.autocast = autocast
        gradients.append(step_without_update(trainer, returns=RETURNS).gradient)
    without, weighted = gradients
    assert least <= (weighted - without).norm() / without.norm() < most


@pytest.mark.slow
def test_weight_decay_shrinks_what_is_trained_by_its_share_of_the_rate(session: Session) -> None:
    decaying = with_keys(session, "--optimizer.weight_decay=0.5")
    policy = session.load_model(session.run.reference(1))
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    start = Position(STAGE_TWO, 0)
    trainer = make_trainer(decaying, policy, session.training_tasks(), position=start)
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    for old, new in zip(before, policy.model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), 0.95 * old)
