from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from ragen_apo.environments.base import Reply
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.shop.scripted import product_words, task_words
from ragen_apo.types import Task


@dataclass(frozen=True)
class PlayedTurn:
    observation: str
    reply: Reply
    success: bool


def played(shop: ShopEnvironment, policy_name: str, task: Task, *, seed: int) -> list[PlayedTurn]:
    policy = shop.scripted_policies()[policy_name]()
    policy.begin(task, seed=seed)
    observation, _ = shop.reset(task, seed=0)
    turns: list[PlayedTurn] = []
    ended = False
    while not ended:
        reply = policy.act(observation)
        next_observation, _, terminated, truncated, info = shop.step(reply.action)
        turns.append(PlayedTurn(observation, reply, info.get("success", False)))
        observation, ended = next_observation, terminated or truncated
    return turns


def success_of(shop: ShopEnvironment, policy_name: str, tasks: Sequence[Task]) -> float:
    num_successes = sum(
        played(shop, policy_name, task, seed=number)[-1].success
        for number, task in enumerate(tasks)
    )
    return num_successes / len(tasks)


def test_the_oracle_always_succeeds() -> None:
    shop = ShopEnvironment(max_turns=2)
    assert success_of(shop, "oracle", shop.tasks("all")) == 1.0


@pytest.mark.slow
def test_the_teacher_succeeds_in_25_to_35_percent_of_1000_training_episodes() -> None:
    shop = ShopEnvironment()
    tasks = [*shop.tasks("train")] * 3
    assert 0.25 < success_of(shop, "teacher", tasks[:1000]) < 0.35


@pytest.mark.slow
def test_the_baselines_are_far_from_solving_the_shop() -> None:
    shop = ShopEnvironment()
    assert 0.05 < success_of(shop, "heuristic", shop.tasks("train")) < 0.60
    assert success_of(shop, "random", shop.tasks("train")) < 0.03


def test_all_that_the_teacher_writes_can_be_copied_from_what_it_read() -> None:
    shop = ShopEnvironment()
    for number, task in enumerate(shop.tasks("train")):
        read = ""
        for turn in played(shop, "teacher", task, seed=number):
            read += f"{turn.observation}\n"
            verb, argument = turn.reply.action.split(" ", 1)
            if verb == "search":
                assert set(argument.split()) <= set(task_words(read))
                assert turn.reply.thought == f"find {argument}"
            else:
                named = turn.reply.thought.removeprefix("look at ")
                assert named in read
                assert named.startswith(f"{argument} ")


def test_the_teacher_plays_optimally_in_more_than_a_tenth_of_the_episodes() -> None:
    shop = ShopEnvironment()
    tasks = shop.tasks("train")
    num_optimal = 0
    for number, task in enumerate(tasks):
        turns = played(shop, "teacher", task, seed=number)
        described = " ".join(product_words(task_words(turns[0].observation)))
        searched_all = turns[0].reply.action == f"search {described}"
        num_optimal += searched_all and len(turns) == 2 and turns[-1].success
    assert num_optimal / len(tasks) > 0.10


def test_scripted_policies_survive_observations_they_do_not_know() -> None:
    shop = ShopEnvironment()
    task = shop.tasks("train")[0]
    for make_policy in shop.scripted_policies().values():
        policy = make_policy()
        policy.begin(task, seed=0)
        for observation in ("", "The episode is over.", "Found 0 results.", "TASK: "):
            assert policy.act(observation).action
