import json
from collections import Counter
from typing import Any

import pytest

from ragen_apo.errors import ConfigError
from ragen_apo.session import Session
from ragen_apo.task_order import DrawOrder, epoch_slice
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


def per_reference(session: Session, size: int | None, **parts: Any) -> Session:
    each = f"--reference.tasks_per_reference={json.dumps(size)}"
    return with_keys(session, each, environment={"name": "mixture", "parts": parts})


def test_each_reference_has_other_tasks_until_all_have_been_played(session: Session) -> None:
    each = per_reference(session, 8, bandit={"num_train_tasks": 24})
    tasks = each.training_tasks()
    pieces = [each.tasks_of_reference(tasks, version=version) for version in range(6)]
    for epoch in (pieces[:3], pieces[3:]):
        played = [task.task_id for piece in epoch for task in piece]
        assert Counter(played) == Counter(task.task_id for task in tasks)
    assert pieces[0] != pieces[3], "a new order"
    assert pieces[1] == [task for task in tasks if task in pieces[1]], "in the split's order"
    assert pieces[4] == each.tasks_of_reference(tasks, version=4)


@pytest.mark.parametrize("size", [None, 24, 100])
def test_without_a_smaller_number_each_reference_has_all_tasks(
    size: int | None, session: Session
) -> None:
    each = per_reference(session, size, bandit={"num_train_tasks": 24})
    assert each.tasks_of_reference(each.training_tasks(), version=1) == each.training_tasks()


def test_the_tasks_of_a_reference_go_by_weight(session: Session) -> None:
    parts = {"countdown": {"weight": 3}, "bandit": {"num_train_tasks": 90}}
    each = per_reference(session, 20, **parts)
    tasks = each.training_tasks()
    for version in range(4):
        counts = Counter(task.category for task in each.tasks_of_reference(tasks, version=version))
        assert counts == {"countdown": 15, "bandit": 5}


def test_a_part_that_a_reference_might_lack_is_an_error(session: Session) -> None:
    parts = {"countdown": {"weight": 3}, "bandit": {}}
    assert per_reference(session, 8, **parts).training_tasks()
    with pytest.raises(ConfigError, match=r"tasks_per_reference \(7\).* no task of bandit"):
        per_reference(session, 7, **parts).training_tasks()
