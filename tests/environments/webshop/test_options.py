"""Options in the mode `compact`: their numbers, what these select, and who clicks them."""

from collections.abc import Callable

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment

Make = Callable[..., WebShopEnvironment]
MODES = ("compact", "text", "text_rich")
ODD = {"Style": ["Reviews", "search", "red", "a[b"]}
GROUPS = {"Style": ["Small", "Large"], "Color": ["Red", "Dark Blue", "Small"]}


def to_item(environment: WebShopEnvironment) -> str:
    """Opens the item page of the only product and returns it."""
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search[shirt]")
    return environment.step("click[b000000001]")[0]


def clickables(environment: WebShopEnvironment) -> tuple[str, ...]:
    available = environment.available_actions()
    return available["clickables"] if available else ()


def test_options_are_numbered_through_all_groups_and_keep_their_numbers(one_product: Make) -> None:
    environment = one_product(GROUPS)
    item = to_item(environment)
    of_style, of_color = "style: small #1 | large #2", "color: red #3 | dark blue #4 | small #5"
    assert f"\n{of_style}\n{of_color}\nSelected: nothing\nActions: " in item
    numbers = ("#1", "#2", "#3", "#4", "#5")
    assert clickables(environment)[-6:] == ("buy now", *numbers)
    page = environment.step("click #2")[0].splitlines()
    assert page[:-1] == ["Selected: style = large", of_color]
    assert page[-1] == "Actions: click buy now, click #<option>, click < prev, search <words>"
    assert clickables(environment)[-5:] == numbers
    environment.step("click[#4]")
    assert environment.visit.selected == {"style": "large", "color": "dark blue"}
    environment.step("click #1")  # its group is hidden, and its selection can still be changed
    environment.step("click red")
    assert environment.visit.selected == {"style": "small", "color": "red"}


def test_the_order_of_selection_changes_nothing_that_is_seen_or_known(one_product: Make) -> None:
    seen = []
    for selections in (("#2", "#3"), ("#3", "#2"), ("#3", "#1", "#2")):
        environment = one_product(GROUPS, max_turns=None)
        to_item(environment)
        for number in selections:
            environment.step(f"click {number}")
        page = environment.observation
        seen.append((environment.state_key(), page, environment.step("click buy now")[0]))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1].startswith("Selected: style = large, color = red\n")
    assert " with style = large, color = red. " in seen[0][2]


def test_a_number_selects_a_shared_value_in_its_own_group(one_product: Make) -> None:
    environment = one_product(GROUPS)
    to_item(environment)
    environment.step("click #1")
    assert environment.visit.selected == {"style": "small"}
    environment.step("click small")  # by name it is the last group's
    assert environment.visit.selected == {"style": "small", "color": "small"}
    to_item(environment)
    environment.step("click #5")
    assert environment.visit.selected == {"color": "small"}
    assert environment.option_targets()["style", "small"] == "#1"
    assert environment.option_targets()["color", "small"] == "small"


def test_a_number_of_the_page_comes_before_a_value_that_looks_like_one(one_product: Make) -> None:
    environment = one_product({"Style": ["#2", "#1", "#7"]})
    to_item(environment)
    for action, value in (("click #1", "#2"), ("click #2", "#1"), ("click #7", "#7")):
        environment.step(action)
        assert environment.visit.selected == {"style": value}


@pytest.mark.parametrize("number", ["#0", "#6", "#01", "# 1", "1", "#", "#-1", "#\u0661", "#99999"])
def test_a_number_that_no_option_has_selects_nothing(one_product: Make, number: str) -> None:
    environment = one_product(GROUPS)
    to_item(environment)
    assert environment.step(f"click {number}")[4]["invalid_action"]
    assert environment.visit.selected == {}


def test_options_have_numbers_on_item_pages_of_the_compact_mode_only(one_product: Make) -> None:
    environment = one_product(GROUPS)
    to_item(environment)
    for way in (["click features"], ["click < prev"] * 2, ["click back to search"]):
        for action in way:
            assert not environment.step(action)[4]["invalid_action"]
        assert environment.step("click #1")[4]["invalid_action"]
        assert environment.visit.selected == {}


@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_options_have_no_numbers_in_upstreams_modes(one_product: Make, mode: str) -> None:
    environment = one_product(GROUPS, observation=mode)
    assert "#" not in to_item(environment) + environment.properties.rules
    assert clickables(environment)[-5:] == ("buy now", "small", "large", "red", "dark blue")
    assert environment.step("click[#1]")[4]["invalid_action"]
    assert environment.option_targets() == {
        ("color", "small"): "small", ("style", "large"): "large", ("color", "red"): "red",
        ("color", "dark blue"): "dark blue",
    }  # fmt: skip


def test_the_rules_of_the_compact_mode_say_that_options_have_numbers(make: Make) -> None:
    assert "an option or its number (click #3)" in make().properties.rules


def test_a_value_named_like_a_button_is_selected_by_its_number_only(one_product: Make) -> None:
    environment = one_product(ODD)
    item = to_item(environment)
    assert "style: reviews #1 | search #2 | red #3 | a[b #4\n" in item
    assert environment.step("click search")[4]["invalid_action"]
    assert environment.step("click reviews")[0].startswith("Reviews: none")
    environment.step("click < prev")
    for number, value in enumerate(ODD["Style"], start=1):
        page, *_, info = environment.step(f"click #{number}")
        assert not info["invalid_action"]
        assert page.startswith(f"Selected: style = {value.lower()}\n")
    assert environment.visit.selected == {"style": "a[b"}


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_chooses_no_value_that_it_cannot_click(one_product: Make, mode: str) -> None:
    environment = one_product(ODD, observation=mode)
    for task in environment.tasks("test"):
        for name in ("heuristic", "teacher", "oracle"):
            policy = environment.scripted_policies()[name]()
            policy.begin(task, seed=0)
            observation, _ = environment.reset(task, seed=0)
            terminated = False
            for _ in range(6):
                observation, _, terminated, _, info = environment.step(
                    policy.act(observation).action
                )
                assert not info["invalid_action"]
                if terminated:
                    break
            assert terminated


def test_the_oracle_selects_a_value_that_two_groups_share_in_both(one_product: Make) -> None:
    environment = one_product({"Style": ["Small"], "Color": ["Small"]})
    task = environment.tasks("test")[0]
    oracle = environment.scripted_policies()["oracle"]()
    oracle.begin(task, seed=0)
    observation, _ = environment.reset(task, seed=0)
    actions: list[str] = []
    for _ in range(5):
        actions.append(oracle.act(observation).action)
        observation = environment.step(actions[-1])[0]
    # By its name it is the last group's.
    assert sorted(actions[2:4]) == ["click #1", "click small"]
    assert actions[4] == "click buy now"
