import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.environments.contract import play
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import draw_limit, goal_of_task, limit_text
from ragen_apo.errors import ConfigError
from ragen_apo.types import make_task
from tests.sweeps import quick_first

Make = Callable[..., WebShopEnvironment]


def test_a_limit_is_the_larger_of_two_of_the_next_four_tens() -> None:
    limits = {draw_limit(15.9, random.Random(seed)) for seed in range(200)}
    assert limits == {30.0, 40.0, 50.0}  # 20 is never the larger of two
    expected = max(random.Random(3).sample([20.0, 30.0, 40.0, 50.0], 2))
    assert draw_limit(15.9, random.Random(3)) == expected
    assert limit_text(expected) == f", and price lower than {expected:.2f} dollars"


def test_a_price_near_the_top_has_no_limit_and_draws_nothing() -> None:
    source = random.Random(1)
    assert draw_limit(980.0, source) == 1_000_000.0
    assert limit_text(1_000_000.0) == ""
    assert source.getstate() == random.Random(1).getstate()


def test_prices_lie_between_their_ends(make: Make) -> None:
    environment = make(price_seed=5)
    prices = environment.prices()
    for product in map(environment.catalog.product, range(environment.catalog.num_products)):
        assert min(product.prices) <= prices[product.asin] <= max(product.prices)
        if len(product.prices) == 1:
            assert prices[product.asin] == product.prices[0]


def test_one_draw_per_two_priced_product_and_then_one_per_instruction(make: Make) -> None:
    """The sequence of draws, recomputed with a plain loop."""
    environment = make(price_seed=11)
    source = random.Random(11)
    products = list(map(environment.catalog.product, range(environment.catalog.num_products)))
    prices = {
        p.asin: source.uniform(*p.prices) if len(p.prices) == 2 else p.prices[0] for p in products
    }
    assert environment.prices() == prices
    texts: list[str] = []
    for product in products:
        if product.instruction is not None:
            texts.append(limit_text(draw_limit(prices[product.asin], source)))
    from_goals = {
        environment.goal_task(i).payload["asin"]: environment.goal_task(i).instruction
        for i in range(environment.num_goals)
    }
    with_instruction = [p for p in products if p.instruction is not None]
    assert all(
        from_goals[p.asin].endswith(text) for p, text in zip(with_instruction, texts, strict=True)
    )


def test_every_combination_of_options_is_a_goal(make: Make) -> None:
    environment = make()
    expected = 0
    for product in map(environment.catalog.product, range(environment.catalog.num_products)):
        if product.instruction is not None:
            combinations = 1
            for values in product.options.values():
                combinations *= len(values)
            expected += combinations
    assert environment.num_goals == expected


def shop_of(tmp_path: Path, options: dict[str, list[str]], human: list[dict]) -> WebShopEnvironment:
    """One product with these options and human instructions."""
    choices = {name: [{"value": v} for v in values] for name, values in options.items()}
    product = {
        "asin": "B1", "name": "Shoe", "full_description": "", "small_description": [],
        "pricing": "$15.9", "customization_options": choices, "category": "fashion",
        "query": "shoe", "product_category": "A",
    }  # fmt: skip
    labels = {"B1": {"instruction": "Find me a shoe", "instruction_attributes": ["soft"]}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "items_shuffle_1.json").write_text(json.dumps([product]))
    (tmp_path / "data" / "items_ins_v2_1.json").write_text(json.dumps(labels))
    (tmp_path / "data" / "items_human_ins.json").write_text(json.dumps({"B1": human}))
    kind = "human" if human else "synthetic"
    return WebShopEnvironment(data=tmp_path / "data", store=tmp_path / "store", goals=kind)


def test_goals_are_upstreams_combinations_shuffled_and_equal_ones_are_counted(
    tmp_path: Path,
) -> None:
    """The list that upstream makes, written out: all combinations, then one shuffle."""
    options = {"Size": ["S", "M", "S"], "Color": ["Red", "red", "Blue", "Red"]}
    environment = shop_of(tmp_path, options, [])
    limit = draw_limit(15.9, random.Random(0))
    text = limit_text(limit)
    expected: list[tuple] = []
    for color, size in itertools.product(("red", "red", "blue", "red"), ("s", "m", "s")):
        chosen = ((("color", color), ("size", size)),)
        told = f"Find me a shoe with color: {color}, and size: {size}{text}"
        repetition = sum(goal[:2] == (told, chosen[0]) for goal in expected)
        expected.append((told, chosen[0], limit, repetition))
    random.Random(233).shuffle(expected)
    tasks = [environment.goal_task(index) for index in range(environment.num_goals)]
    goals = [goal_of_task(task, environment.catalog) for task in tasks]
    made = [(g.instruction, g.options, g.price_limit, g.repetition) for g in goals]
    assert made == expected
    assert max(goal.repetition for goal in goals) == 5  # red, s: 3 x 2 equal goals
    assert len({task.task_id for task in tasks}) == 12


def test_an_option_without_values_leaves_no_combination(tmp_path: Path) -> None:
    assert shop_of(tmp_path, {"Size": ["S"], "Color": []}, []).num_goals == 0


def test_without_goals_by_people_none_can_be_played(tmp_path: Path) -> None:
    shop_of(tmp_path, {"Size": ["S"]}, [])
    environment = WebShopEnvironment(
        data=tmp_path / "data", store=tmp_path / "store", goals="human"
    )
    with pytest.raises(ConfigError, match=r"goals is human, and .*items_human_ins\.json"):
        environment.tasks("train")


@pytest.mark.parametrize("policy", ["teacher", "forgetful", "oracle"])
def test_a_shopper_buys_where_people_want_two_values_of_one_option(
    policy: str, tmp_path: Path
) -> None:
    human = [
        {
            "instruction": "a red or blue shoe",
            "instruction_attributes": ["soft"],
            "instruction_options": ["red", "blue"],
        }
    ]
    environment = shop_of(tmp_path, {"Color": ["red", "blue", "light blue"]}, human)
    task = environment.goal_task(0)
    player = environment.scripted_policies()[policy]()
    steps = play(environment, task, player, max_turns=12).steps
    assert steps[-1].terminated and steps[-1].reward > 0
    said = [step.reply.action for step in steps]
    assert [said.count(f"click {color}") for color in ("red", "blue")] == [1, 1]


def test_equal_human_goals_are_counted_and_those_without_attributes_skipped(tmp_path: Path) -> None:
    def written(text: str, attributes: list[str]) -> dict:
        return {
            "instruction": text,
            "instruction_attributes": attributes,
            "instruction_options": [],
        }

    human = [written("a shoe.", ["soft"])] * 30 + [written("no", [])] + [written("b", ["soft"])]
    environment = shop_of(tmp_path, {}, human)
    assert environment.num_goals == 31
    source = random.Random(0)
    texts = [f"a shoe{limit_text(draw_limit(15.9, source))}" for _ in range(30)]
    expected = [(text, texts[:index].count(text)) for index, text in enumerate(texts)]
    expected.append((f"b{limit_text(draw_limit(15.9, source))}", 0))
    random.Random(233).shuffle(expected)
    tasks = [environment.goal_task(index) for index in range(31)]
    assert [(t.instruction, t.payload["repetition"]) for t in tasks] == expected


def test_the_tasks_of_a_split_are_a_sequence_made_on_demand(make: Make) -> None:
    environment = make()
    tasks = environment.tasks("test")
    assert tasks[0] is tasks[0]
    assert tasks[-1] == tasks[len(tasks) - 1]
    assert tasks[3:6] == (tasks[3], tasks[4], tasks[5])
    assert list(tasks) == list(make().tasks("test"))
    assert tasks != environment.tasks("train")
    assert tasks[2] in tasks
    with pytest.raises(IndexError):
        tasks[len(tasks)]
    with pytest.raises(IndexError):
        environment.goal_task(environment.num_goals)


def test_ids_are_unique_and_depend_on_content_alone(make: Make) -> None:
    environment = make()
    tasks = [task for split in ("train", "validation", "test") for task in environment.tasks(split)]
    assert len({task.task_id for task in tasks}) == len(tasks) == environment.num_goals
    by_product = make(split_scheme="product")
    moved = {
        t.task_id for split in ("train", "validation", "test") for t in by_product.tasks(split)
    }
    assert moved == {task.task_id for task in tasks}


def test_standard_splits_go_by_the_goals_number(make: Make) -> None:
    environment = make()
    test, validation = environment.tasks("test"), environment.tasks("validation")
    assert [t.task_id for t in test] == [environment.goal_task(i).task_id for i in range(len(test))]
    assert len(test) == min(500, environment.num_goals)
    assert len(validation) == min(1000, max(environment.num_goals - 500, 0))


def test_product_splits_share_no_product(make: Make) -> None:
    environment = make(data="generated:1000", split_scheme="product")
    products = {
        split: {task.payload["asin"] for task in environment.tasks(split)}
        for split in ("train", "validation", "test")
    }
    assert all(products.values())
    assert not products["train"] & products["test"]
    assert not products["train"] & products["validation"]
    assert not products["validation"] & products["test"]


@pytest.mark.parametrize("split", quick_first(["standard", "product"]))
@pytest.mark.parametrize("goals", quick_first(["synthetic", "human"]))
def test_training_goals_of_a_product_can_be_limited_to_the_first(
    make: Make, split: str, goals: str
) -> None:
    options = {"data": "generated:1000", "split_scheme": split, "goals": goals}
    everything, limited = make(**options), make(**options, train_goals_per_product=2)
    products = [task.payload["asin"] for task in everything.tasks("train")]
    expected = [
        task
        for index, task in enumerate(everything.tasks("train"))
        if products[:index].count(products[index]) < 2
    ]
    assert list(limited.tasks("train")) == expected
    assert goals == "human" or len(expected) < len(products)
    for other in ("validation", "test"):
        assert list(limited.tasks(other)) == list(everything.tasks(other))
    assert limited.properties == everything.properties, "stored values stay valid"


def test_an_unknown_split_and_a_foreign_task_are_config_errors(make: Make) -> None:
    environment = make()
    with pytest.raises(ConfigError, match="unknown split"):
        environment.tasks("dev")
    foreign = make_task(environment="shop", instruction="x", split="test", category="", payload={})
    with pytest.raises(ConfigError, match="is not a webshop task"):
        environment.reset(foreign, seed=0)


def test_a_task_describes_its_goal_completely(make: Make) -> None:
    environment = make()
    goal = goal_of_task(environment.goal_task(7), environment.catalog)
    assert goal.instruction == environment.goal_task(7).instruction
    assert goal.price_limit > environment.prices()[environment.goal_task(7).payload["asin"]]


def test_human_goals_name_values_without_names_and_lose_their_final_dot(make: Make) -> None:
    environment = make(data="generated:1000", goals="human", price_seed=2)
    assert environment.num_goals > 20
    task = next(t for t in environment.tasks("test") if t.payload["options"])
    assert all(name == "" for name, _ in task.payload["options"])
    assert ".," not in task.instruction
    assert not task.instruction.endswith(".")


@pytest.mark.slow
def test_goals_and_prices_are_the_same_in_another_process(make: Make, store: Path) -> None:
    program = (
        "import sys, random; from pathlib import Path; random.seed(99)\n"
        "from ragen_apo.environments.webshop import WebShopEnvironment\n"
        "e = WebShopEnvironment(data='generated:200', store=Path(sys.argv[1]), price_seed=3)\n"
        "print(sum(e.prices().values()), [e.goal_task(i).task_id for i in range(50)])\n"
    )
    environment = make(price_seed=3)
    ids = [environment.goal_task(i).task_id for i in range(50)]
    expected = f"{sum(environment.prices().values())} {ids}\n"
    path = os.pathsep.join(p for p in sys.path if p)
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not that of this one
    finished = subprocess.run(
        [sys.executable, "-c", program, str(store)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert finished.stdout == expected


def test_another_seed_gives_other_goals_and_another_version(make: Make) -> None:
    one, two = make(price_seed=1), make(price_seed=2)
    ids = [{env.goal_task(i).task_id for i in range(one.num_goals)} for env in (one, two)]
    assert ids[0] != ids[1]
    assert one.properties.version != two.properties.version


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "sizes"), [("standard", [5410, 1000, 500]), ("product", [5402, 576, 932])]
)
def test_the_splits_of_the_real_data_have_the_documented_sizes(
    make_real: Make, split: str, sizes: list[int]
) -> None:
    environment = make_real(split_scheme=split)
    assert [len(environment.tasks(name)) for name in ("train", "validation", "test")] == sizes


@pytest.mark.slow
def test_few_products_have_most_of_the_real_goals(make_real: Make) -> None:
    limited = make_real(split_scheme="product", train_goals_per_product=8)
    assert len(limited.tasks("train")) == 1223


def test_the_real_human_instructions_are_thirteen_goals(make_real: Make) -> None:
    assert make_real(goals="human").num_goals == 13
