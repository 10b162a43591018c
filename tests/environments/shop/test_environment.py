import pytest

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.shop.environment import Screen
from ragen_apo.environments.shop.scripted import listings, product_words, task_words
from ragen_apo.environments.shop.tasks import PHRASINGS, with_synonyms
from ragen_apo.errors import ConfigError
from tests.environments.shop.goal import GOAL_ID, OTHER_ID, shop_with_goal


def test_the_first_observation_is_the_task_and_the_size_of_the_shop() -> None:
    shop = ShopEnvironment()
    task = shop.tasks("train")[0]
    assert shop.reset(task, seed=0) == (
        f"TASK: {task.instruction}\nAvailable: 497 products across 8 categories.",
        {},
    )


def test_a_search_lists_the_best_five_with_their_ids_and_counts_all() -> None:
    shop = shop_with_goal()
    observation = shop.step("search history atlas")[0]
    # 7 titles with history + 6 with atlas - 2 with both
    assert observation.startswith("Found 11 results. Top 5: ")
    assert len(listings(observation)) == 5
    assert listings(observation)[0] == ("History Atlas", str(GOAL_ID))


def test_results_with_equal_overlap_come_in_the_order_of_length_and_id() -> None:
    shop = shop_with_goal(max_results=50)
    found = listings(shop.step("search atlas")[0])
    keys = [(len(title.split()), int(product_id)) for title, product_id in found]
    assert len(keys) == 6
    assert keys == sorted(keys)


def test_a_search_for_unknown_words_finds_nothing() -> None:
    shop = shop_with_goal()
    for keywords in ("spaceship", "?!", "ж"):
        observation, reward, _, _, info = shop.step(f"search {keywords}")
        assert (observation, reward, info) == ("Found 0 results.", -0.01, {})


def test_a_click_shows_the_product_in_one_line() -> None:
    shop = shop_with_goal()
    observation, reward, terminated, _, info = shop.step(f"click {GOAL_ID}")
    assert observation.startswith(f"{GOAL_ID} History Atlas: books, $")
    assert "\n" not in observation
    assert (reward, terminated) == (-0.01, False)
    assert info == {"flags": ("target_shown",)}


def test_the_screen_has_what_was_shown_last() -> None:
    shop = ShopEnvironment()
    shop.reset(shop.tasks("train")[0], seed=0)
    assert shop.screen == Screen()
    shop.step("search wool scarf")
    found = shop.screen.found
    assert (shop.screen.query, found[0]) == ("wool scarf", 17)
    shop.step(f"click {found[1]}")
    shop.step("no action")
    assert shop.screen == Screen("wool scarf", found, shop.catalogue.by_id[found[1]])
    shop.step("search zzz")
    assert shop.screen == Screen("zzz", (), None)
    shop.reset(shop.tasks("train")[0], seed=0)
    assert shop.screen == Screen()


def test_buying_the_goal_ends_with_success() -> None:
    shop = shop_with_goal()
    assert shop.step(f"buy {GOAL_ID}") == (
        "You bought History Atlas.",
        1.0 - 0.01,
        True,
        False,
        {"success": True},
    )


def test_buying_another_product_ends_without_success() -> None:
    shop = shop_with_goal()
    _, reward, terminated, truncated, info = shop.step(f"buy {OTHER_ID}")
    assert reward == pytest.approx(-0.10 - 0.01)
    assert (terminated, truncated, info) == (True, False, {"success": False})


def test_buying_in_the_last_turn_terminates_and_does_not_truncate() -> None:
    shop = shop_with_goal(max_turns=1)
    assert shop.step(f"buy {GOAL_ID}")[2:4] == (True, False)


def test_after_the_end_the_result_stays() -> None:
    shop = shop_with_goal()
    shop.step(f"buy {GOAL_ID}")
    for action in (f"buy {OTHER_ID}", "search atlas", ""):
        assert shop.step(action) == ("The episode is over.", 0.0, True, False, {"success": True})


@pytest.mark.parametrize("form", ["BUY {}", "  buy   {}  ", "Buy\t{}", "buy {}\n"])
def test_case_and_surrounding_space_do_not_matter(form: str) -> None:
    shop = shop_with_goal()
    assert shop.step(form.format(GOAL_ID))[4] == {"success": True}


@pytest.mark.parametrize(
    "action",
    [
        "",
        "buy",
        "buy ",
        "search",
        "search  ",
        "buy 0",
        "buy 498",
        "buy -1",
        "buy 1.0",
        "buy 007",
        "buy ٣",
        "buy 1 2",
        "buy History Atlas",
        "buy1",
        "click " + "9" * 5000,
        "purchase 3",
        "I want to buy 3",
    ],
)
def test_what_is_no_action_costs_a_turn_and_is_answered_with_what_is_possible(action: str) -> None:
    shop = shop_with_goal()
    observation, reward, terminated, _, info = shop.step(action)
    assert observation == "Invalid action. Use: search <keywords>, click <id> or buy <id>."
    assert reward == pytest.approx(-0.05 - 0.01)
    assert not terminated
    assert info == {"invalid_action": True}


def test_there_is_one_task_per_product_and_397_are_for_training() -> None:
    shop = ShopEnvironment()
    sizes = {split: len(shop.tasks(split)) for split in ("train", "test", "all")}
    assert sizes == {"train": 397, "test": 100, "all": 497}


def test_all_phrasings_of_a_product_stay_in_its_split() -> None:
    shop = ShopEnvironment(phrasings="all")
    assert len(shop.tasks("all")) == 497 * len(PHRASINGS)
    products = {
        split: {task.payload["product_id"] for task in shop.tasks(split)}
        for split in ("train", "test")
    }
    assert products["train"].isdisjoint(products["test"])
    assert {task.task_id for task in ShopEnvironment().tasks("all")} < {
        task.task_id for task in shop.tasks("all")
    }
    first = shop.tasks("test")[:100]
    assert {task.payload["product_id"] for task in first} == products["test"], "an evaluation's"


def test_every_phrasing_is_used_by_many_products() -> None:
    used = [task.payload["phrasing"] for task in ShopEnvironment().tasks("train")]
    assert all(used.count(phrasing) > 50 for phrasing in range(len(PHRASINGS)))


def test_a_task_keeps_its_id_across_releases() -> None:
    task = next(
        task for task in ShopEnvironment().tasks("all") if "history atlas" in task.instruction
    )
    assert (task.instruction, task.task_id) == ("Please order history atlas.", "600a3175a5ab5d09")


def test_the_words_of_every_instruction_find_the_goal_in_the_first_place() -> None:
    shop = ShopEnvironment(phrasings="all")
    for task in shop.tasks("all"):
        observation, _ = shop.reset(task, seed=0)
        for words in (product_words(task_words(observation)), task_words(observation)):
            found = listings(shop.step(f"search {' '.join(words)}")[0])
            assert found[0][1] == str(task.payload["product_id"]), task.instruction


def test_the_last_phrasing_uses_words_that_are_not_in_the_title_for_many_products() -> None:
    shop = ShopEnvironment(phrasings="all")
    plain, _, _, _, reworded = (
        [task for task in shop.tasks("all") if task.payload["phrasing"] == phrasing]
        for phrasing in range(len(PHRASINGS))
    )
    differs = [
        product_words(a.instruction.split()) != product_words(b.instruction.split())
        for a, b in zip(plain, reworded, strict=True)
    ]
    assert sum(differs) > 497 / 3


@pytest.mark.parametrize(
    ("title", "reworded"),
    [
        ("Classic Sneaker", "classic running shoe"),
        ("Classic Running Shoe", "classic sneaker"),
        ("Vintage Wool Sweater", "retro wool jumper"),
        ("Glass Bowl", "glass bowl"),
    ],
)
def test_synonyms_replace_whole_words_of_the_title(title: str, reworded: str) -> None:
    assert with_synonyms(title) == reworded


def test_every_word_of_held_out_instructions_is_known_from_training() -> None:
    shop = ShopEnvironment()
    known = {
        word for task in shop.tasks("train") for word in task_words(f"TASK: {task.instruction}")
    }
    for task in shop.tasks("test"):
        assert set(task_words(f"TASK: {task.instruction}")) <= known


def test_a_task_of_another_shop_is_refused() -> None:
    big, small = ShopEnvironment(), ShopEnvironment(num_products=8)
    kept = {task.task_id for task in small.tasks("all")}
    foreign = next(task for task in big.tasks("all") if task.task_id not in kept)
    with pytest.raises(ConfigError, match="a task of shop with the same options"):
        small.reset(foreign, seed=0)


def test_a_step_before_the_first_reset_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(RuntimeError, match="call reset"):
        ShopEnvironment().step("search atlas")


def test_state_keys_tell_task_page_turn_and_rewarded_searches_apart() -> None:
    shop = shop_with_goal()
    keys = [shop.state_key()]
    for action in ("search atlas", "search atlas", "search spoon"):
        shop.step(action)
        keys.append(shop.state_key())
    task_id = keys[0].split(":")[0]
    assert [key.split(":")[:3] for key in keys] == [
        [task_id, "0", "0"],
        [task_id, "1", "1"],
        [task_id, "2", "1"],
        [task_id, "3", "1"],
    ]
    assert keys[1].split(":")[4] == keys[2].split(":")[4] != keys[3].split(":")[4]
