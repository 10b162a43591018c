import dataclasses
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ragen_apo.errors import ConfigError
from ragen_apo.session import Session
from ragen_apo.task_order import DrawOrder, epoch_slice, training_tasks
from tests import factories
from tests.factories import with_keys

WEIGHTS = {"many": 2, "few": 1}
CATEGORIES = ["few"] * 7 + ["many"] * 1_000


def order(weights: dict[str, float], *, seed: int = 0) -> DrawOrder:
    return DrawOrder(CATEGORIES, weights=weights, seed=seed, purpose="test")


def draws(each: DrawOrder, num_steps: int, batch_size: int = 10) -> list[int]:
    return [item for step in range(num_steps) for item in each.items(step, batch_size=batch_size)]


@pytest.mark.parametrize("weights", [WEIGHTS, {"many": 0.3, "few": 0.7}, {"few": 1, "many": 97}])
def test_the_first_thousand_draws_have_the_shares_of_the_weights(weights: dict) -> None:
    counts = Counter(CATEGORIES[item] for item in draws(order(weights), 100))
    for name, weight in weights.items():
        assert abs(counts[name] - 1_000 * weight / sum(weights.values())) < 1


def test_every_item_of_a_category_is_drawn_equally_often_in_a_new_order_each_time() -> None:
    few = [item for item in draws(order(WEIGHTS), 100) if CATEGORIES[item] == "few"]
    epochs = [few[start : start + 7] for start in range(0, 7 * 47, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 40
    many = [item for item in draws(order(WEIGHTS), 300) if CATEGORIES[item] == "many"]
    assert set(Counter(many).values()) == {2}


def test_a_step_is_the_same_whether_or_not_the_ones_before_were_asked_for() -> None:
    sequential = order(WEIGHTS)
    before = [sequential.items(step, batch_size=10) for step in range(30)]
    assert order(WEIGHTS).items(29, batch_size=10) == before[29]
    assert sequential.items(3, batch_size=10) == before[3]


def test_the_order_depends_on_the_seed_and_the_turns_do_not() -> None:
    first, other = (draws(order(WEIGHTS, seed=seed), 5) for seed in (0, 1))
    assert first != other
    assert [CATEGORIES[item] for item in first] == [CATEGORIES[item] for item in other]


def test_without_weights_it_is_the_order_of_epochs() -> None:
    plain = DrawOrder(CATEGORIES, weights={}, seed=4, purpose="task-order")
    expected = epoch_slice(num_items=1_007, batch_size=10, step=3, seed=4, purpose="task-order")
    assert plain.items(3, batch_size=10) == expected


def test_the_draws_of_a_category_without_items_go_to_the_others_by_weight() -> None:
    with_none = order({"many": 2, "gone": 5, "few": 1})
    assert draws(with_none, 30) == draws(order(WEIGHTS), 30)
    all_gone = order({"gone": 1})
    assert draws(all_gone, 3) == draws(order({}), 3)


def on_a_mixture(session: Session, max_tasks: int | None = None, **parts: Any) -> Session:
    limit = f"--training.max_tasks={json.dumps(max_tasks)}"
    return with_keys(session, limit, environment={"name": "mixture", "parts": parts})


def test_a_limit_on_tasks_goes_by_weight_as_well(session: Session) -> None:
    parts = {"countdown": {"weight": 3}, "bandit": {"num_train_tasks": 9}}
    tasks = on_a_mixture(session, 20, **parts).training_tasks()
    assert Counter(task.category for task in tasks) == {"countdown": 15, "bandit": 5}
    assert tasks == on_a_mixture(session, 20, **parts).training_tasks()
    every = on_a_mixture(session, **parts).training_tasks()
    assert len(every) == 409
    assert [task for task in every if task in tasks] == tasks, "in the split's order"
    assert tasks != every[:20], "drawn, not the first"


def test_a_part_without_a_training_task_is_an_error(session: Session) -> None:
    parts = {"countdown": {"weight": 3}, "bandit": {}}
    with pytest.raises(ConfigError, match="no training task is of bandit.*max_tasks .now 1"):
        on_a_mixture(session, 1, **parts).training_tasks()


def test_different_tasks_with_one_id_are_refused() -> None:
    tasks = [factories.task(instruction) for instruction in ("a mug", "a pen")]
    shared = [dataclasses.replace(task, task_id="same") for task in tasks]
    properties = SimpleNamespace(category_weights={})
    environment = SimpleNamespace(tasks=lambda split: shared, properties=properties)
    with pytest.raises(ConfigError, match="different training tasks with the id 'same'"):
        training_tasks(environment, name="shop", max_tasks=None, seed=0)
    environment.tasks = lambda split: [tasks[0], tasks[0]]
    found = training_tasks(environment, name="shop", max_tasks=None, seed=0)
    assert found == [tasks[0]], "listed twice, it is one task, whose episodes count once"
