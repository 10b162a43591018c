"""Records: ids from content, sums over turns, masks exactly at the sampled tokens."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ragen_apo.types import Task, TrainingSample, Trajectory, Turn, TurnFlag, training_samples
from tests import factories


def task(**changes: object) -> Task:
    payload = {"product": 7, "colours": ["red"]}
    fields = {"instruction": "buy classic blanket", "category": "home", "payload": payload}
    return factories.task(**{**fields, **changes})


def turn(
    *, prompt: tuple[int, ...] = (1, 2), response: tuple[int, ...] = (3,), **fields: Any
) -> Turn:
    return factories.turn(
        prompt_token_ids=prompt,
        response_token_ids=response,
        logprobs=tuple(-0.1 * token for token in response),
        **fields,
    )


def trajectory(*turns: Turn) -> Trajectory:
    return factories.episode(*turns, task=task(), success=True, seed=5)


class TestTaskId:
    def test_it_stays_what_it_was_in_earlier_versions(self) -> None:
        assert task().task_id == "02a891dffaddf25c"

    def test_it_does_not_depend_on_the_split_or_on_the_order_of_the_payload(self) -> None:
        reordered = {"colours": ["red"], "product": 7}
        assert task().task_id == task(split="test").task_id == task(payload=reordered).task_id

    @pytest.mark.parametrize(
        "change",
        [
            {"environment": "webshop"},
            {"instruction": "buy classic blanket "},
            {"category": "kitchen"},
            {"payload": {"product": 8, "colours": ["red"]}},
            {"payload": {"product": "7", "colours": ["red"]}},
            {"payload": {}},
        ],
        ids=str,
    )
    def test_it_changes_with_the_content(self, change: dict[str, object]) -> None:
        assert task(**change).task_id != task().task_id

    def test_the_task_keeps_its_own_copy_of_the_payload(self) -> None:
        payload = {"product": 7}
        made = task(payload=payload)
        payload["product"] = 8
        assert made.payload == {"product": 7}

    def test_a_payload_that_is_not_json_is_refused(self) -> None:
        with pytest.raises(TypeError):
            task(payload={"product": object()})


def test_the_records_cannot_be_changed() -> None:
    for record, name in [(task(), "split"), (turn(), "reward"), (trajectory(), "success")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


def test_the_return_is_the_sum_of_rewards_and_tokens_are_counted_over_turns() -> None:
    episode = trajectory(turn(reward=0.1, response=(3, 4)), turn(reward=-0.05), turn(reward=1.0))
    assert episode.episode_return == pytest.approx(1.05)  # 0.1 - 0.05 + 1.0
    assert episode.num_response_tokens == 4  # 2 + 1 + 1
    assert episode.num_context_tokens == 10  # 4 and three prompts of 2
    assert trajectory().episode_return == 0


def test_the_same_rewards_in_another_order_are_the_same_return() -> None:
    rewards = (0.09, -0.02, -0.02, -0.05)  # added up one by one: 0, -7e-18, -1e-17 or -1.4e-17
    orders = itertools.permutations(rewards)
    returns = {trajectory(*(turn(reward=r) for r in order)).episode_return for order in orders}
    assert len(returns) == 1
    assert returns.pop() == pytest.approx(0)


def test_a_trajectory_survives_json() -> None:
    flags = (TurnFlag.FORMAT_ERROR.value, "search_loop")
    episode = trajectory(turn(flags=flags), turn(prompt=(), response=()))
    values = json.loads(json.dumps(episode.to_json()))
    assert TypeAdapter(Trajectory).validate_python(values) == episode


def test_the_mask_is_true_exactly_at_the_sampled_tokens() -> None:
    #          prompt 10 11 | response 12 13 | prompt 14 | response 15
    episode = trajectory(
        turn(prompt=(10, 11), response=(12, 13)), turn(prompt=(14,), response=(15,))
    )
    (sample,) = training_samples(episode)
    assert sample == TrainingSample(
        token_ids=(10, 11, 12, 13, 14, 15),
        loss_mask=(False, False, True, True, False, True),
        logprobs=(0.0, 0.0, -0.1 * 12, -0.1 * 13, 0.0, -0.1 * 15),
    )


def test_a_teachers_mistake_is_read_and_not_sampled() -> None:
    wrong = turn(prompt=(10,), response=(12, 13), flags=(TurnFlag.MISTAKE.value,))
    (sample,) = training_samples(trajectory(wrong, turn(prompt=(14,), response=(15,))))
    assert sample.token_ids == (10, 12, 13, 14, 15)
    assert sample.loss_mask == (False, False, False, False, True)


def test_a_turn_that_restarts_the_context_opens_another_sample() -> None:
    first, second = turn(prompt=(10,), response=(12,)), turn(prompt=(14,), response=(15,))
    moved = dataclasses.replace(turn(prompt=(10, 16), response=(17,)), restarts_context=True)
    samples = training_samples(trajectory(first, second, moved, moved, second))
    assert [sample.token_ids for sample in samples] == [
        (10, 12, 14, 15),
        (10, 16, 17),
        (10, 16, 17, 14, 15),
    ]
    assert samples[2].loss_mask == (False, False, True, False, True)
    assert training_samples(trajectory(moved)) == samples[1:2]


token_ids = st.lists(st.integers(0, 99), max_size=5).map(tuple)


@given(st.lists(st.tuples(token_ids, token_ids), max_size=6))
def test_a_sample_keeps_every_token_of_every_turn(
    turns: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    episode = trajectory(*(turn(prompt=prompt, response=response) for prompt, response in turns))
    (sample,) = training_samples(episode)
    assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs)
    assert sample.token_ids == sum((prompt + response for prompt, response in turns), ())
    sampled = [
        (token, logprob)
        for token, mask, logprob in zip(*dataclasses.astuple(sample), strict=True)
        if mask
    ]
    recorded = [
        pair
        for one in episode.turns
        for pair in zip(one.response_token_ids, one.logprobs, strict=True)
    ]
    assert sampled == recorded
    assert len(sampled) == episode.num_response_tokens
