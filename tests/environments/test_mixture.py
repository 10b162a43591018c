from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.mixture import part_of
from ragen_apo.errors import ConfigError

LAKE = {"size": 4, "slippery": False}
PARTS: dict[str, Any] = {
    "shop": {"weight": 2, "max_turns": 6},
    "frozen_lake": {"weight": 1, **LAKE},
}


def mixture(parts: Any = PARTS, **options: Any):
    return make_environment("mixture", {"parts": parts, **options})


def refusal(parts: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        mixture(parts, **options)
    return str(caught.value)


@pytest.mark.parametrize("label", PARTS)
def test_an_episode_is_that_of_the_part(label: str) -> None:
    whole = mixture()
    options = {key: value for key, value in PARTS[label].items() if key != "weight"}
    part = make_environment(label, options)
    task = next(task for task in whole.tasks("test") if part_of(task) == label)
    own_task = part.tasks("test")[0]
    assert task.instruction == own_task.instruction
    policies = [each.scripted_policies()["oracle"]() for each in (whole, part)]
    policies[0].begin(task, seed=3)
    policies[1].begin(own_task, seed=3)
    pages = [whole.reset(task, seed=3), part.reset(own_task, seed=3)]
    assert pages[0] == pages[1]
    observation, ended = pages[0][0], False
    while not ended:
        replies = [policy.act(observation) for policy in policies]
        assert replies[0] == replies[1]
        steps = [whole.step(replies[0].action), part.step(replies[0].action)]
        assert steps[0] == steps[1]
        assert whole.state_key() == f"{label}:{part.state_key()}"
        observation, ended = steps[0][0], steps[0][2] or steps[0][3]
    assert steps[0][4]["success"]


def test_the_tasks_of_a_split_take_turns_by_weight_and_all_are_there() -> None:
    parts = [part_of(task) for task in mixture().tasks("train")]
    assert Counter(parts) == {"shop": 397, "frozen_lake": 400}
    assert Counter(parts[:99]) == {"shop": 66, "frozen_lake": 33}


def test_the_category_is_the_part_and_the_parts_own_category_is_kept() -> None:
    for task in mixture().tasks("test"):
        assert task.category == part_of(task)
    kept = {task.payload["category"] for task in mixture().tasks("test")}
    assert {"4x4", "books"} <= kept


def test_a_task_that_is_of_no_mixture_is_a_part_of_itself() -> None:
    assert part_of(make_environment("shop", {}).tasks("test")[0]) == "shop"


def test_properties_combine() -> None:
    whole = mixture().properties
    parts = [
        make_environment("shop", {"max_turns": 6}).properties,
        make_environment("frozen_lake", LAKE).properties,
    ]
    assert whole.deterministic
    assert whole.return_range == (
        min(part.return_range[0] for part in parts),
        max(part.return_range[1] for part in parts),
    )
    assert whole.splits == ("train", "test"), "the shop's split of all tasks is not the lake's"
    assert whole.category_weights == {"shop": 2, "frozen_lake": 1}
    for part in parts:
        assert part.version in whole.version
        assert part.reward_version in whole.reward_version
        assert part.rules in whole.rules


def test_one_part_of_chance_makes_the_mixture_one_of_chance() -> None:
    parts = {**PARTS, "slippery": {"name": "frozen_lake"}}
    assert not mixture(parts).properties.deterministic


def test_rules_that_the_parts_share_are_given_once() -> None:
    lakes = {size: {"name": "frozen_lake", "slippery": False} for size in ("small", "large")}
    single = make_environment("frozen_lake", {"slippery": False}).properties.rules
    assert mixture(lakes).properties.rules == single


def test_one_environment_can_be_several_parts_with_the_same_tasks() -> None:
    lakes = mixture({"one": {"name": "frozen_lake"}, "other": {"name": "frozen_lake"}})
    tasks = lakes.tasks("test")
    assert len({task.task_id for task in tasks}) == len(tasks) == 200
    keys = set()
    for task in tasks[:2]:
        lakes.reset(task, seed=0)
        keys.add(lakes.state_key().partition(":")[0])
    assert keys == {"one", "other"}


def test_a_turn_limit_is_for_the_parts_that_set_none() -> None:
    whole = mixture({"shop": {"max_turns": 2}, "countdown": {}}, max_turns=3)
    num_turns = {}
    for task in whole.tasks("train")[:2]:
        whole.reset(task, seed=0)
        num_turns[part_of(task)] = next(n for n in range(1, 9) if whole.step("\x00")[3])
    assert num_turns == {"shop": 2, "countdown": 3}


def test_policies_are_those_that_every_part_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragen_apo.environments.shop import ShopEnvironment

    assert set(mixture().scripted_policies()) == {"heuristic", "oracle", "random", "teacher"}
    one_policy = {"oracle": ShopEnvironment().scripted_policies()["oracle"]}
    monkeypatch.setattr(ShopEnvironment, "scripted_policies", lambda _: one_policy)
    assert set(mixture().scripted_policies()) == {"oracle"}


def test_a_task_of_a_part_that_is_not_there_is_refused() -> None:
    task = next(task for task in mixture().tasks("test") if part_of(task) == "frozen_lake")
    with pytest.raises(ConfigError, match=f"{task.task_id} of 'frozen_lake'.*its parts shop"):
        mixture({"shop": {}}).reset(task, seed=0)


def test_before_the_first_episode_there_is_no_state_and_no_step() -> None:
    assert mixture().state_key() == "none"
    with pytest.raises(RuntimeError, match="call reset"):
        mixture().step("Up")


def test_no_parts_are_an_error() -> None:
    with pytest.raises(ConfigError, match="environment.parts: missing"):
        make_environment("mixture", {})
    assert "environment.parts: got {}, expected a section of keys" in refusal({})


@pytest.mark.parametrize("weight", [0, -1, float("inf"), "2", True])
def test_a_weight_that_is_not_positive_and_finite_is_an_error(weight: Any) -> None:
    message = refusal({"shop": {"weight": weight}})
    assert message.startswith("environment.parts.shop.weight: got ")


def test_an_unknown_part_is_an_error_that_names_the_key_and_the_closest_environment() -> None:
    assert refusal({"frozen_lak": {}}).startswith("environment.parts.frozen_lak.name: got")
    assert "did you mean 'frozen_lake'" in refusal({"frozen_lak": {}})


def test_a_wrong_option_of_a_part_is_named_with_its_part() -> None:
    message = refusal({"shop": {"max_turn": 3, "num_products": 0}})
    told = "environment.parts.shop.max_turn: unknown key; did you mean"
    assert f"{told} environment.parts.shop.max_turns?" in message
    assert "environment.parts.shop.num_products: got 0" in message


def test_a_label_may_be_any_text_in_a_message() -> None:
    message = refusal({r"a\1\g<2>": {"name": "shop", "max_turn": 3}})
    assert r"environment.parts.a\1\g<2>.max_turn: unknown key" in message


@pytest.mark.parametrize("part", [{"mixture": {"parts": PARTS}}, {"x": {"name": "mixture"}}])
def test_a_mixture_within_a_mixture_is_refused(part: Any) -> None:
    assert "a mixture cannot be a part of a mixture" in refusal(part)


def test_a_split_that_one_part_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="parts shop, frozen_lake .* 'all'"):
        mixture().tasks("all")


def test_a_part_that_is_named_by_its_place_needs_a_name_of_its_own() -> None:
    assert "give it one, such as {mine: {name: './a.py:make'}}" in refusal({"./a.py:make": {}})


def test_the_turn_limit_is_that_of_the_longest_part_where_all_declare_one(tmp_path: Path) -> None:
    assert mixture({"shop": {"max_turns": 6}, "bandit": {}}).properties.max_turns == 6
    endless = {"data": "generated:50", "store": str(tmp_path), "max_turns": None}
    assert mixture({"shop": {}, "webshop": endless}).properties.max_turns is None


def test_a_limit_of_turns_for_all_parts_is_named_by_the_key_that_was_written() -> None:
    message = refusal({"shop": {}, "countdown": {}}, max_turns=0)
    assert "max_turns is environment.max_turns" in message
    assert "environment.max_turns" not in refusal({"shop": {"max_turns": 0}}, max_turns=3)
