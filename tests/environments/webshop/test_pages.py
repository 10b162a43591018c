"""Upstream's two modes, page by page, as they stand in recordings of the original program."""

from collections.abc import Callable, Sequence

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment

Make = Callable[..., WebShopEnvironment]

SHIRT = {
    "asin": "B000000001",
    "name": "Odd shirt",
    "full_description": "Made of wool.\n",
    "small_description": ["Soft", "", "Warm & light"],
    "pricing": "$5.0 $7.5",
    "customization_options": {
        "Fit": [{"value": "Men's <a&b>"}, {"value": "Wide"}],
        "Size": [{"value": "8"}],
    },
}
TASK = "Find me odd shirts with fit: wide, and size: 8, and price lower than 40.00 dollars"
TEXT_HEAD = f"Instruction: [SEP] {TASK} [SEP] Back to Search [SEP] "
RICH_HEAD = f"Instruction:\n{TASK}\n[button] Back to Search [button_]\n"
RICH_ITEM = RICH_HEAD + "[button] < Prev [button_]\n"
RICH_BUTTONS = """\
Odd shirt
Price: $5.0 to $7.5
Rating: N.A.
[button] Description [button_]
[button] Features [button_]
[button] Reviews [button_]
[button] Buy Now [button_]
"""
TEXT_ITEM = (
    f"{TEXT_HEAD}< Prev [SEP] fit [SEP] men's <a&b> [SEP] wide [SEP] size [SEP] 8 [SEP] Odd shirt "
    "[SEP] Price: $5.0 to $7.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews "
    "[SEP] Buy Now"
)
OPEN = ("search[shirt]", "click[b000000001]")

PAGES: dict[str, tuple[Sequence[str], str, str]] = {
    "start": (
        (),
        f"WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search",
        f"WebShop\nInstruction: \n{TASK}\n[button] Search [button_]\n",
    ),
    "results": (
        OPEN[:1],
        f"{TEXT_HEAD}Page 1 (Total results: 1) [SEP] Next > [SEP] B000000001 [SEP] Odd shirt [SEP] "
        "$5.0 to $7.5",
        f"{RICH_HEAD}Page 1 (Total results: 1)\n[button] Next > [button_]\n\n"
        "[button] B000000001 [button_]\nOdd shirt\n$5.0 to $7.5\n",
    ),
    "results of which one was opened": (
        (*OPEN, "click[< prev]"),
        f"{TEXT_HEAD}Page 1 (Total results: 1) [SEP] Next > [SEP] B000000001 [SEP] Odd shirt [SEP] "
        "$5.0 to $7.5",
        f"{RICH_HEAD}Page 1 (Total results: 1)\n[button] Next > [button_]\n\n"
        "[clicked button] B000000001 [clicked button_]\nOdd shirt\n$5.0 to $7.5\n",
    ),
    "a page behind the last": (
        ("search[shirt]", "click[next >]"),
        f"{TEXT_HEAD}Page 2 (Total results: 1) [SEP] < Prev [SEP] Next >",
        f"{RICH_HEAD}Page 2 (Total results: 1)\n[button] < Prev [button_]\n"
        "[button] Next > [button_]\n",
    ),
    "item": (
        OPEN,
        TEXT_ITEM,
        f"{RICH_ITEM}fit\n  [button] men's <a&b> [button_]\n  [button] wide [button_]\nsize\n"
        f"  [button] 8 [button_]\n{RICH_BUTTONS}",
    ),
    "item with two options selected": (
        (*OPEN, "click[8]", "click[wide]"),
        TEXT_ITEM,
        f"You have clicked 8.\nYou have clicked wide.\n{RICH_ITEM}fit\n"
        "  [button] men's <a&b> [button_]\n  [clicked button] wide [clicked button_]\nsize\n"
        f"  [clicked button] 8 [clicked button_]\n{RICH_BUTTONS}",
    ),
    "description": (
        (*OPEN, "click[description]"),
        f"{TEXT_HEAD}< Prev [SEP] Made of wool.",
        f"{RICH_ITEM}Made of wool.\n\n",
    ),
    # The second point is empty: its page has a node of a single blank.
    "features": (
        (*OPEN, "click[features]"),
        f"{TEXT_HEAD}< Prev [SEP] Soft [SEP]  [SEP] Warm & light",
        f"{RICH_ITEM} Soft\n \n Warm & light\n",
    ),
    "reviews": ((*OPEN, "click[reviews]"), f"{TEXT_HEAD}< Prev", RICH_ITEM),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_reads_as_upstream_writes_it(shop_of: Make, name: str) -> None:
    actions, *expected = PAGES[name]
    for mode, page in zip(("text", "text_rich"), expected, strict=True):
        environment = shop_of([SHIRT], observation=mode)
        task = environment.goal_task(0)
        assert task.instruction == TASK
        observation, _ = environment.reset(task, seed=0)
        for action in actions:
            observation, _, _, _, info = environment.step(action)
            assert not info["invalid_action"], action
        assert observation == page, mode


def test_the_last_page_has_the_purchase_as_escaped_json(shop_of: Make) -> None:
    environment = shop_of([SHIRT], observation="text")
    environment.reset(environment.goal_task(0), seed=0)
    for action in (*OPEN, "click[men's <a&b>]"):
        environment.step(action)
    page = environment.step("click[buy now]")[0]
    options = r'{"fit": "men\u0027s \u003ca\u0026b\u003e"}'
    assert page == " [SEP] ".join(
        [
            *("Thank you for shopping with us!", "Your code:", "None"),
            *("(Paste it in your MTurk interface.)", "Purchased", "asin", "B000000001"),
            *("options", options, "attrs", "None", "category", "None", "query", "None"),
            *("product category", "None", "Target", "asin", "options", "attrs", "price upper"),
            *("instuction text", "category", "product category", "query", "Goal", "None"),
            *("Reward", "Your score (min 0.0, max 1.0)", "0.5", "Reward Details", "None"),
        ]
    )


MANY = [SHIRT, *({"asin": f"B0000000{n}", "name": f"Plain shirt {n}"} for n in range(10, 21))]


def test_the_first_results_page_has_no_way_back_and_the_second_has(shop_of: Make) -> None:
    environment = shop_of(MANY, observation="text")
    environment.reset(environment.goal_task(0), seed=0)
    first = environment.step("search[shirt]")[0]
    observation, _, _, _, info = environment.step("click[< prev]")
    assert info["invalid_action"]
    assert observation == first
    second = environment.step("click[next >]")[0]
    heading = "Page 2 (Total results: 12) [SEP] < Prev [SEP] Next > [SEP] "
    assert second.startswith(TEXT_HEAD + heading)
    assert environment.step("click[< prev]")[0] == first


def test_a_search_works_from_a_sub_page(shop_of: Make) -> None:
    environment = shop_of(MANY, observation="text")
    environment.reset(environment.goal_task(0), seed=0)
    results = environment.step("search[shirt]")[0]
    for action in ("click[next >]", "click[b000000001]", "click[features]"):
        assert not environment.step(action)[4]["invalid_action"]
    assert environment.step("search[shirt]")[0] == results


@pytest.mark.parametrize(
    ("before", "action"),
    [
        ((*OPEN, "click[back to search]"), "click[b000000001]"),
        ((*OPEN, "click[description]"), "click[features]"),
        ((*OPEN, "click[description]"), "click[buy now]"),
    ],
)
def test_what_another_page_offers_is_not_followed(
    shop_of: Make, before: Sequence[str], action: str
) -> None:
    environment = shop_of([SHIRT], observation="text")
    environment.reset(environment.goal_task(0), seed=0)
    observation = ""
    for each in before:
        observation = environment.step(each)[0]
    after, _, terminated, _, info = environment.step(action)
    assert (after, terminated, info["invalid_action"]) == (observation, False, True)


def test_a_product_stays_marked_in_later_searches_until_the_start_page(shop_of: Make) -> None:
    environment = shop_of([SHIRT], observation="text_rich")
    environment.reset(environment.goal_task(0), seed=0)
    marked = "[clicked button] B000000001 [clicked button_]"
    for action in OPEN:
        environment.step(action)
    assert marked in environment.step("search[odd]")[0]
    environment.step("click[back to search]")
    assert marked not in environment.step("search[odd]")[0]
