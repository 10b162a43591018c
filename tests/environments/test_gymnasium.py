import re
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ragen_apo.environments.gymnasium import (
    REGISTERED,
    FreeText,
    GymnasiumTextEnv,
    register_environments,
)
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.errors import ConfigError


@pytest.mark.parametrize("name", sorted({*REGISTERED} - {"ragen_apo/TextWorld-v0"}))
def test_gymnasiums_own_checker_has_no_complaint_and_no_warning(name: str, tmp_path: Path) -> None:
    register_environments()
    options: dict = {"max_turns": 5}  # the checker takes a single turn for a fault
    if "WebShop" in name:
        options |= {"data": "generated:1000", "store": tmp_path}
    if "Mixture" in name:
        options |= {"parts": {"shop": {}, "countdown": {}}}
    environment = gymnasium.make(name, render_mode="ansi", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(environment.unwrapped)


def test_registering_twice_changes_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_environments()
        register_environments()
    assert "ragen_apo/Shop-v0" in gymnasium.registry


def test_make_passes_options_to_the_shop() -> None:
    register_environments()
    environment = gymnasium.make("ragen_apo/Shop-v0", split="test", max_turns=1)
    _, info = environment.reset(seed=0)
    assert info["split"] == "test"
    assert environment.step("search blue")[3] is True
    with pytest.raises(ConfigError, match="did you mean environment.max_turns"):
        gymnasium.make("ragen_apo/Shop-v0", max_turn=1)


def test_the_same_seed_draws_the_same_sequence_of_tasks() -> None:
    first, second = GymnasiumTextEnv("shop"), GymnasiumTextEnv("shop")
    sequences = [
        [env.reset(seed=5)[1]["task_id"]] + [env.reset()[1]["task_id"] for _ in range(20)]
        for env in (first, second)
    ]
    assert sequences[0] == sequences[1]
    assert len(set(sequences[0])) > 15


def test_a_task_can_be_asked_for_by_its_id() -> None:
    environment = GymnasiumTextEnv("shop")
    task = ShopEnvironment().tasks("test")[3]
    observation, info = environment.reset(options={"task_id": task.task_id})
    assert (info["task_id"], info["split"], info["category"]) == (
        task.task_id,
        "test",
        task.category,
    )
    assert task.instruction in observation


def test_a_task_can_be_asked_for_by_its_number_in_the_split() -> None:
    environment = GymnasiumTextEnv("shop")
    tasks = ShopEnvironment().tasks("test")
    for index in (0, 3, len(tasks) - 1):
        _, info = environment.reset(options={"split": "test", "task_index": index})
        assert info["task_id"] == tasks[index].task_id
    _, info = environment.reset(options={"task_index": np.int64(2)})
    assert info["task_id"] == tasks[2].task_id
    for index in (-1, len(tasks)):
        with pytest.raises(ConfigError, match=f"task_index must be from 0 to .*, got {index}"):
            environment.reset(options={"task_index": index, "split": "test"})


@pytest.mark.slow
def test_webshops_own_division_of_the_goals_is_an_option_beside_the_split(tmp_path: Path) -> None:
    register_environments()
    options = {"data": "generated:1000", "store": tmp_path, "split_scheme": "product"}
    environment = gymnasium.make("ragen_apo/WebShop-v0", split="test", **options)
    _, info = environment.reset(options={"task_index": 5})
    expected = WebShopEnvironment(**options).tasks("test")[5]
    assert (info["task_id"], info["split"]) == (expected.task_id, "test")
    assert expected != WebShopEnvironment(**options | {"split_scheme": "standard"}).tasks("test")[5]


def test_a_split_without_tasks_is_refused_when_it_is_chosen(tmp_path: Path) -> None:
    # The human goals of 140 products are too few: the split test takes them all.
    options = {"data": "generated:140", "store": tmp_path, "goals": "human"}
    with pytest.raises(ConfigError, match="the split 'train' has no tasks; expected test"):
        GymnasiumTextEnv("webshop", **options)
    environment = GymnasiumTextEnv("webshop", split="test", **options)
    with pytest.raises(ConfigError, match="the split 'validation' has no tasks"):
        environment.reset(options={"split": "validation"})
    assert environment.reset(seed=0)[1]["split"] == "test"


def test_a_split_asked_for_stays_for_the_following_resets() -> None:
    environment = GymnasiumTextEnv("shop")
    splits = {environment.reset(seed=0, options={"split": "test"})[1]["split"]}
    splits |= {environment.reset()[1]["split"] for _ in range(10)}
    assert splits == {"test"}
    training = environment.text_environment.tasks("train")[0].task_id
    environment.reset(options={"task_id": training})
    assert environment.reset()[1]["split"] == "test", "no other split was asked for"
    environment.reset(options={"task_id": training, "split": "train"})
    assert environment.reset()[1]["split"] == "train"


def test_unknown_splits_tasks_and_options_are_errors() -> None:
    environment = GymnasiumTextEnv("shop")
    with pytest.raises(ConfigError, match="the split 'dev' has no tasks"):
        environment.reset(options={"split": "dev"})
    with pytest.raises(ConfigError, match="no task has the id 'abc'"):
        environment.reset(options={"task_id": "abc"})
    with pytest.raises(ConfigError, match="unknown options tsak_id"):
        environment.reset(options={"tsak_id": "abc"})
    with pytest.raises(ConfigError, match="the split 'dev' has no tasks"):
        GymnasiumTextEnv("shop", split="dev")


def test_options_beside_a_finished_environment_are_an_error() -> None:
    with pytest.raises(ConfigError, match="got the options max_turns"):
        GymnasiumTextEnv(ShopEnvironment(), max_turns=3)


def test_a_failed_reset_does_not_change_the_split() -> None:
    environment = GymnasiumTextEnv("shop")
    with pytest.raises(ConfigError):
        environment.reset(options={"split": "dev"})
    assert environment.reset(seed=0)[1]["split"] == "train"


def test_rendering_shows_the_last_observation() -> None:
    environment = GymnasiumTextEnv("shop", render_mode="ansi")
    observation, _ = environment.reset(seed=0)
    assert environment.render() == observation
    observation = environment.step("search blue")[0]
    assert environment.render() == observation
    assert GymnasiumTextEnv("shop").render() is None


def test_the_text_space_contains_any_text_and_samples_printable_ones() -> None:
    space = FreeText(seed=0)
    assert "žluťoučký 🐴" in space
    assert "" in space
    assert "x" * 100_001 not in space
    assert 5 not in space
    assert space.sample() in space


def test_an_episode_of_webshop_is_truncated_after_15_turns_unless_asked_otherwise(
    tmp_path: Path,
) -> None:
    data = {"data": "generated:50", "store": tmp_path}
    adapter = gymnasium.make("ragen_apo/WebShop-v0", split="test", **data)
    adapter.reset(seed=0)
    assert [adapter.step("search mug")[3] for _ in range(15)] == [False] * 14 + [True]
    unlimited = gymnasium.make("ragen_apo/WebShop-v0", split="test", max_turns=None, **data)
    unlimited.reset(seed=0)
    assert not any(unlimited.step("search mug")[3] for _ in range(30))


def test_the_documented_random_baseline_plays_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "adding_an_environment.md"
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text("utf-8"), re.M | re.S)
    (tmp_path / "guess_number.py").write_text(blocks[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict = {"__file__": str(tmp_path / "block.py")}
    for block in blocks[1:]:
        if "trl" not in block:  # that one is for a GPU and a hub; test_trl.py trains with it
            exec(block, names)
    assert names["over"] is True
    assert isinstance(names["environment"].task.payload["secret"], int)


def test_an_environment_is_made_from_its_class_with_its_options() -> None:
    adapter = GymnasiumTextEnv(ShopEnvironment, max_turns=3)
    assert adapter.text_environment.properties == ShopEnvironment(max_turns=3).properties


def test_a_second_close_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(
        ShopEnvironment, "close", lambda self: closed.append(id(self)), raising=False
    )
    environment = GymnasiumTextEnv("shop", num_products=60)
    with environment:
        environment.close()
    assert len(closed) == 1
