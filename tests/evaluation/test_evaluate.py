"""Which episodes an evaluation plays."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.environments.base import make_environment
from ragen_apo.evaluation.evaluate import EvaluationPlan

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


def test_another_seed_and_another_repeat_draw_otherwise() -> None:
    environments = lakes(slippery=True)

    def seeds(seed: int, **options: int) -> list[int]:
        plan = EvaluationPlan("test", NUM_TASKS, 0.0, seed=seed)
        return [each.seed for each in plan.requests(environments, **options)]

    assert seeds(3) == seeds(3, repeat=0)
    drawn = [*seeds(3), *seeds(4), *seeds(3, repeat=1)]
    assert len(set(drawn)) == len(drawn)


def test_fewer_episodes_than_tasks_are_the_first_tasks() -> None:
    environments = lakes(slippery=False)
    plan = EvaluationPlan("test", 2, 0.0, seed=3)
    ids = [each.task.task_id for each in plan.requests(environments)]
    assert ids == [task.task_id for task in environments.tasks("test")[:2]]
