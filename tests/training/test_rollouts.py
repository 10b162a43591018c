"""What an algorithm reads of a step's episodes: rows, micro-batches, normalised returns."""

import pytest
import torch

from ragen_apo.environments.base import make_environment
from ragen_apo.training.algorithms.grpo import Grpo
from ragen_apo.training.step_metrics import rollout_metrics
from ragen_apo.types import StopReason
from tests.factories import episode, rollouts, turn


def test_returns_of_a_mixture_are_normalised_within_each_part() -> None:
    tasks = make_environment("mixture", {"parts": {"bandit": {}, "countdown": {}}}).tasks("test")
    rewards = [1.0, 10.0, 3.0, 30.0]  # the parts take turns
    episodes = [
        episode(turn(reward), task=task) for task, reward in zip(tasks[:4], rewards, strict=True)
    ]
    settings = {"method": "mean", "grouping": "category"}
    grpo = Grpo.model_validate({"reward_normalization": settings})
    expected = pytest.approx([-1, -10, 1, 10])
    assert grpo.normalized(rollouts(episodes)).returns_B.tolist() == expected


def test_a_full_context_is_told_from_the_turn_limit() -> None:
    cut = {"terminated": False}
    full = episode(turn(), **cut, stop_reason=StopReason.CONTEXT_LIMIT)
    episodes = [full, episode(turn(), **cut), episode(turn(), **cut), episode(turn())]
    metrics = rollout_metrics(episodes)
    assert (metrics["truncated_share"], metrics["out_of_context_share"]) == (0.75, 0.25)


def test_a_row_holds_the_sampled_tokens_of_all_samples_in_their_order() -> None:
    turns = (
        turn(0.1, prompt_token_ids=(10, 11), response_token_ids=(12,)),
        turn(0.2, prompt_token_ids=(13,), response_token_ids=(14, 15)),
        turn(
            0.4, prompt_token_ids=(10, 16, 17), response_token_ids=(18, 19), restarts_context=True
        ),
    )
    two = rollouts([episode(turns[0]), episode(*turns)])
    # Row 1: 10 11 12 13 14 15 of the first sample, then 18 19 of the second.
    assert two.tokens.token_ids_RT.tolist() == [
        [10, 11, 12, 0, 0, 0, 0, 0],
        [10, 11, 12, 13, 14, 15, 18, 19],
    ]
    assert two.turn_index_BT.tolist() == [
        [-1, -1, 0, -1, -1, -1, -1, -1],
        [-1, -1, 0, -1, 1, 1, 2, 2],
    ]
    assert two.rewards_BT[1].tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0.2, 0, 0.4])
    (micro,) = two.micro_batches([1, 0], size=8)
    assert micro.rows.tolist() == [0, 1]
    assert micro.samples.token_ids_RT.tolist() == [
        [10, 11, 12, 0, 0, 0],
        [10, 11, 12, 13, 14, 15],
        [10, 16, 17, 18, 19, 0],
    ]
    assert (micro.num_sequences, micro.num_tokens) == (2, 6)
    values_ML = micro.samples.token_ids_RT.float().requires_grad_()
    rows_BT = micro.in_rows(values_ML)
    expected = [[0, 0, 12, 0, 0, 0, 0, 0], [0, 0, 12, 0, 14, 15, 18, 19]]
    assert rows_BT.tolist() == expected
    rows_BT.sum().backward()
    assert values_ML.grad is not None
    assert torch.equal(values_ML.grad, micro.samples.loss_mask_RT.float())
