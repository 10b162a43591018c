import pytest
import torch

from ragen_apo.config.algorithms import RewardNormalizationConfig
from ragen_apo.environments.base import make_environment
from ragen_apo.training.rollouts import gather_rollouts, normalized
from ragen_apo.types import StopReason, Task, Trajectory, Turn
from ragen_apo.values.reference_values import ReferenceValues


def episode(task: Task, reward: float) -> Trajectory:
    turn = Turn(
        observation="",
        prompt_token_ids=(1,),
        response_token_ids=(2, 3),
        logprobs=(0.0, 0.0),
        response="",
        thought="",
        action="",
        reward=reward,
    )
    return Trajectory(
        task=task,
        turns=(turn,),
        terminated=True,
        truncated=False,
        stop_reason=StopReason.TERMINATED,
        success=False,
        final_observation="",
        policy_version="",
        seed=0,
    )


def test_returns_of_a_mixture_are_normalised_within_each_part() -> None:
    tasks = make_environment("mixture", {"parts": {"bandit": {}, "countdown": {}}}).tasks("test")
    rewards = [1.0, 10.0, 3.0, 30.0]  # the parts take turns
    rollouts = gather_rollouts(
        [episode(task, reward) for task, reward in zip(tasks[:4], rewards, strict=True)],
        step=0,
        group_size=1,
        returns_B=torch.tensor(rewards),
        values=ReferenceValues(),
        pad_id=0,
        device=torch.device("cpu"),
    )
    settings = RewardNormalizationConfig(method="mean", grouping="environment")
    assert normalized(rollouts, settings).returns_B.tolist() == pytest.approx([-1, -10, 1, 10])
