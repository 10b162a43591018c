"""Which episodes an evaluation plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.environments.base import make_environment
from ragen_apo.evaluation.evaluate import EvaluationPlan, play_evaluation, sampled_pass_at
from ragen_apo.types import Trajectory
from tests import factories

NUM_TASKS = 4


def lakes(**options: Any) -> EnvironmentManager:
    few = {"num_train_tasks": 4, "num_test_tasks": NUM_TASKS, **options}
    make = partial(make_environment, "frozen_lake", few)
    return EnvironmentManager(make, format_penalty=0.0, invalid_action_penalty=0.0)


def played(environments: EnvironmentManager, *, temperature: float) -> list[tuple[str, int]]:
    plan = EvaluationPlan("test", 2 * NUM_TASKS + 1, temperature, seed=3)
    return [(each.task.task_id, each.seed) for each in plan.requests(environments)]


def test_greedy_play_of_a_deterministic_environment_has_each_task_once() -> None:
    environments = lakes(slippery=False)
    ids = [task_id for task_id, _ in played(environments, temperature=0.0)]
    assert ids == [task.task_id for task in environments.tasks("test")]


@pytest.mark.parametrize(("slippery", "temperature"), [(True, 0.0), (False, 0.5), (True, 0.5)])
def test_where_something_is_drawn_a_small_split_begins_again_with_other_seeds(
    slippery: bool, temperature: float
) -> None:
    environments = lakes(slippery=slippery)
    episodes = played(environments, temperature=temperature)
    ids = [task.task_id for task in environments.tasks("test")]
    assert [task_id for task_id, _ in episodes] == [*ids, *ids, ids[0]]
    assert len({seed for _, seed in episodes}) == len(episodes)


def test_tasks_that_are_trained_on_come_last() -> None:
    environments = lakes()
    tasks = environments.tasks("train")
    trained = frozenset(task.task_id for task in tasks[:-1])
    plan = EvaluationPlan("train", 2, 0.0, seed=3, trained_on=trained)
    assert [each.task for each in plan.requests(environments)] == [tasks[-1], tasks[0]]


def test_another_seed_and_another_repeat_draw_otherwise() -> None:
    environments = lakes(slippery=True)

    def seeds(seed: int, **options: int) -> list[int]:
        plan = EvaluationPlan("test", NUM_TASKS, 0.0, seed=seed)
        return [each.seed for each in plan.requests(environments, **options)]

    assert seeds(3) == seeds(3, repeat=0)
    drawn = [*seeds(3), *seeds(4), *seeds(3, repeat=1)]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("slippery", [True, False])
@pytest.mark.parametrize(("num_episodes", "num_played"), [(2, 2), (3 * NUM_TASKS, NUM_TASKS)])
def test_pass_at_k_samples_each_task_k_times(
    num_episodes: int, num_played: int, slippery: bool
) -> None:
    asked: Counter[str] = Counter()
    seeds: set[int] = set()

    def play(
        requests: Sequence[EpisodeRequest], *, temperature: float, **_: str
    ) -> list[Trajectory]:
        """All in one call, so that none waits for others; the first of a task succeeds."""
        assert temperature == 0.7, "k greedy episodes would be one"
        played = []
        for each in requests:
            asked[each.task.task_id] += 1
            seeds.add(each.seed)
            is_first = asked[each.task.task_id] == 1
            played.append(factories.episode(task=each.task, success=is_first))
        return played

    proxy = SimpleNamespace(environments=lakes(slippery=slippery), rollout=play)
    plan = EvaluationPlan("test", num_episodes, 0.0, seed=3)
    found = sampled_pass_at(cast(AgentProxy, proxy), plan, k=4, temperature=0.7)
    assert set(asked.values()) == {4} and len(asked) == num_played
    assert len(seeds) == asked.total()
    assert found == {"1": 0.25, "2": 0.5, "4": 1.0}


def test_fewer_episodes_than_tasks_are_the_first_tasks() -> None:
    environments = lakes(slippery=False)
    plan = EvaluationPlan("test", 2, 0.0, seed=3)
    ids = [each.task.task_id for each in plan.requests(environments)]
    assert ids == [task.task_id for task in environments.tasks("test")[:2]]


def test_a_policy_plays_without_dropout() -> None:
    model = nn.Dropout().train()
    proxy = SimpleNamespace(
        engine=SimpleNamespace(model=SimpleNamespace(model=model)),
        environments=lakes(slippery=False),
        rollout=lambda *_, **__: [],
    )
    play_evaluation(
        cast(AgentProxy, proxy), EvaluationPlan("test", 1, 0.0, seed=0), policy_version="0"
    )
    assert not model.training
