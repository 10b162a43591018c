"""Conditions and trajectories for the tests of the value store."""

import pytest

from ragen_apo.types import StopReason, Task, Trajectory, Turn, make_task
from ragen_apo.values.conditions import SamplingConditions


@pytest.fixture
def conditions() -> SamplingConditions:
    return SamplingConditions(
        reference_fingerprint="abc",
        environment="shop",
        environment_version="1",
        environment_options="{}",
        reward_version="1",
        context_mode="full",
        chat_template_hash="4f2a",
        system_prompt="You are a shopper.",
        parser_version="1",
        max_response_tokens=64,
        max_context_tokens=2048,
        temperature=1.0,
        format_penalty=0.1,
        invalid_action_penalty=0.05,
    )


class Episodes:
    """Makes tasks and short episodes of the environment `shop`."""

    def task(self, name: str) -> Task:
        return make_task(
            environment="shop", instruction=name, split="train", category="mug", payload={}
        )

    def play(self, name: str, *, rewards: tuple[float, ...] = (1.0,)) -> Trajectory:
        turns = tuple(
            Turn(
                observation=f"page {number}",
                prompt_token_ids=(1, 2, 3),
                response_token_ids=(4, 5),
                logprobs=(-0.1, -1 / 3),
                response="<think>t</think><answer>search[mug]</answer>",
                thought="t",
                action="search[mug]",
                reward=reward,
                flags=("format_error",),
                state_key="start",
            )
            for number, reward in enumerate(rewards)
        )
        return Trajectory(
            task=self.task(name),
            turns=turns,
            terminated=True,
            truncated=False,
            stop_reason=StopReason.TERMINATED,
            success=sum(rewards) > 0.5,
            final_observation="Thank you!",
            policy_version="abc",
            seed=7,
        )


@pytest.fixture
def episodes() -> Episodes:
    return Episodes()
