import copy
import dataclasses
import functools
import gc
import pickle
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.environments.human.play import play
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.visit import Page, parse_action, parse_plain_action
from ragen_apo.errors import ConfigError, EnvironmentDataError

Make = Callable[..., WebShopEnvironment]
MODES = ("compact", "text", "text_rich")


def to_item(environment: WebShopEnvironment, number: int = 0) -> str:
    """Opens the item page of a goal's own product and returns it."""
    task = environment.goal_task(number)
    environment.reset(task, seed=0)
    wanted = environment.catalog.product(environment.catalog.number_of(task.payload["asin"]))
    environment.step(f"search[{wanted.title}]")
    for _ in range(5):
        item, _, _, _, info = environment.step(f"click[{wanted.asin}]")
        if not info["invalid_action"]:
            return item
        environment.step("click[next >]")
    raise AssertionError("the product's own title does not find it")


def clickables(environment: WebShopEnvironment) -> tuple[str, ...]:
    available = environment.available_actions()
    return available["clickables"] if available else ()


def with_options(environment: WebShopEnvironment) -> int:
    """The number of a goal with at least two options."""
    return next(
        i
        for i in range(environment.num_goals)
        if len(environment.goal_task(i).payload["options"]) >= 2
    )


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ("search[red shoe]", ("search", "red shoe")),
        ("click[Buy Now]", ("click", "buy now")),
        ("click[Buy Now] and more", ("click", "buy now")),
        ("click[]", None),
        ("click[Buy Now", None),
        ("[x]", None),
        ("", None),
        ("search[a[b]]", ("search[a", "b]")),  # upstream's greedy pattern reads it so
        ("search[a]b]", ("search", "a]b")),
        ("x[]]", ("x", "]")),
        ("search[a\nb]", None),
        ("search[a]\n]", ("search", "a")),
    ],
)
def test_actions_are_read_as_upstreams_pattern_reads_them(
    action: str, parsed: tuple[str, str] | None
) -> None:
    assert parse_action(action) == parsed


@given(st.text(alphabet="ab[]\n ", max_size=12))
def test_parsing_equals_upstreams_pattern(action: str) -> None:
    import re

    match = re.match(r"(.+)\[(.+)\]", action)
    expected = None if match is None else (match.group(1), match.group(2).lower())
    assert parse_action(action) == expected


@pytest.mark.parametrize("action", ["CLICK[Buy Now]", "click[ buy now ]", "click [buy now]"])
def test_upstreams_modes_are_strict_where_the_default_mode_is_not(make: Make, action: str) -> None:
    for mode in MODES:
        environment = make(observation=mode)
        to_item(environment)
        _, _, terminated, _, info = environment.step(action)
        assert (terminated, info["invalid_action"]) == (mode == "compact", mode != "compact")


def test_a_task_that_asks_for_less_than_its_product_costs_is_of_another_price_seed(
    make: Make,
) -> None:
    environment = make()
    for number in range(0, environment.num_goals, 7):
        environment.reset(environment.goal_task(number), seed=0)
    task = environment.goal_task(0)
    price = environment.prices()[task.payload["asin"]]
    cheaper = dataclasses.replace(task, payload={**task.payload, "price_limit": price - 0.01})
    with pytest.raises(ConfigError, match="of another price seed than 0"):
        environment.reset(cheaper, seed=0)


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_from_search_to_purchase(make: Make, mode: str) -> None:
    environment = make(observation=mode, nouns="words")
    number = with_options(environment)
    to_item(environment, number)
    for _, value in environment.goal_task(number).payload["options"]:
        observation, reward, terminated, _, info = environment.step(f"click[{value}]")
        assert not info["invalid_action"]
        assert (reward, terminated) == (0.0, False)
        assert value in observation
    observation, reward, terminated, truncated, info = environment.step("click[buy now]")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["reward_parts"]["r_option"] == 1.0
    assert set(info["metrics"].values()) == {1.0}
    assert info["available_actions"] is None


def test_the_price_that_counts_is_that_of_what_was_bought(make: Make) -> None:
    environment = make()
    prices = environment.prices()
    limit_of = {
        number: environment.goal_task(number).payload["price_limit"]
        for number in range(environment.num_goals)
    }
    number = min(limit_of, key=lambda each: limit_of[each])
    goal = environment.goal_task(number)
    asin = max(prices, key=lambda each: prices[each])
    assert prices[asin] > limit_of[number]
    title = environment.catalog.product(environment.catalog.number_of(asin)).title
    environment.reset(goal, seed=0)
    environment.step(f"search[{title}]")
    assert not environment.step(f"click[{asin}]")[4]["invalid_action"]
    parts = environment.step("click[buy now]")[4]["reward_parts"]
    assert parts["r_price"] is False


def test_after_a_purchase_the_next_episode_begins_anew(make: Make) -> None:
    environment = make()
    to_item(environment)
    assert environment.step("click[buy now]")[2]
    environment.reset(environment.goal_task(0), seed=0)
    _, reward, terminated, truncated, info = environment.step("search[x]")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert set(info["metrics"].values()) == {0.0}


def test_an_episode_that_buys_nothing_has_a_score_of_0_wherever_it_ends(make: Make) -> None:
    """So the mean over episodes is that over all of them, as WebShop's papers report it."""
    environment = make()
    parts = {"score", "type_match", "attribute_match", "price_match"}
    numbers = range(environment.num_goals)
    without = next(n for n in numbers if not environment.goal_task(n).payload["options"])
    for number, expected in (
        (with_options(environment), {*parts, "option_match"}),
        (without, parts),
    ):
        environment.reset(environment.goal_task(number), seed=0)
        metrics = environment.step("search[shoe]")[4]["metrics"]
        assert metrics == dict.fromkeys(expected, 0.0)


def test_going_back_leads_where_it_says(make: Make) -> None:
    environment = make()
    task = environment.goal_task(0)
    start, _ = environment.reset(task, seed=0)
    results = environment.step("search[made]")[0]
    second = environment.step("click[next >]")[0]
    assert second != results
    link = clickables(environment)[-1]
    item = environment.step(f"click[{link}]")[0]
    for name in ("description", "features", "reviews"):
        assert environment.step(f"click[{name}]")[0].lower().startswith(name)
        assert environment.step("click[< prev]")[0] == item
    marked = environment.step("click[< prev]")[0]
    assert marked != second
    rows = marked.split("\n")
    assert rows.pop(-2).startswith("Opened: ")
    assert "\n".join(rows) == second
    assert environment.step("click[< prev]")[0] == results
    assert environment.step("click[back to search]")[0] == start


def test_compact_says_which_results_were_opened(make: Make) -> None:
    """Upstream's `text_rich` marks them, too, until the next visit of the start page."""
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    results = environment.step("search[made]")[0]
    assert "Opened" not in results
    environment.step("click[4]")
    environment.step("click[< prev]")
    environment.step("click[2]")
    rows = environment.step("click[< prev]")[0].split("\n")
    assert rows[-2] == "Opened: 2, 4"
    assert [*rows[:-2], rows[-1]] == results.split("\n")
    title = " ".join(rows[2].split(" | ")[1].split()[:6])
    item = environment.step("click[2]")[0]
    environment.step("click[< prev]")
    assert environment.step(f"click[{title}]")[0] == item
    environment.step("click[back to search]")
    assert environment.step("search[made]")[0] == results


def test_past_the_last_page_the_list_is_empty_and_next_is_still_offered(make: Make) -> None:
    environment = make(observation="text")
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search[made]")
    for _ in range(5):
        environment.step("click[next >]")
    observation, _, _, _, info = environment.step("click[next >]")
    assert "Page 7 (Total results: 50)" in observation
    assert info["available_actions"]["clickables"] == ("back to search", "< prev", "next >")


def test_selections_are_kept_on_sub_pages_and_lost_among_results(make: Make) -> None:
    environment = make()
    number = with_options(environment)
    to_item(environment, number)
    name, value = environment.goal_task(number).payload["options"][0]
    environment.step(f"click[{value}]")
    environment.step("click[features]")
    assert f"Selected: {name} = {value}" in environment.step("click[< prev]")[0]
    environment.step("click[< prev]")
    assert environment.visit.selected == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("action", ["", "buy now", "click[]", "think[x]", "click[search]", "click"])
def test_what_is_no_action_changes_nothing_and_costs_a_turn(
    make: Make, mode: str, action: str
) -> None:
    environment = make(observation=mode, max_turns=3)
    before, _ = environment.reset(environment.goal_task(0), seed=0)
    observation, reward, terminated, truncated, info = environment.step(action)
    assert info["invalid_action"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    if mode == "compact":
        assert observation == f"That is not possible here.\n{before.splitlines()[-1]}"
    else:
        assert observation == before
    environment.step(action)
    assert environment.step(action)[3]
    assert environment.step("search[shoe]")[4]["invalid_action"]


def test_a_binary_payoff_pays_success_only(make: Make) -> None:
    environment = make(payoff="binary")
    number = with_options(environment)
    to_item(environment, number)
    _, reward, terminated, _, info = environment.step("click[buy now]")
    assert terminated
    assert (reward, info["success"]) == (0.0, False)
    assert 0 < info["metrics"]["score"] < 1


@pytest.mark.parametrize("mode", MODES)
def test_a_pickled_environment_goes_on_where_it_was(make: Make, mode: str) -> None:
    environment = make(observation=mode, price_seed=4)
    number = with_options(environment)
    to_item(environment, number)
    data = pickle.dumps(environment)
    assert len(data) < 20_000
    copy = pickle.loads(data)
    assert copy.catalog is environment.catalog
    assert copy.state_key() == environment.state_key()
    value = environment.goal_task(number).payload["options"][0][1]
    for action in (f"click[{value}]", "click[description]", "click[< prev]", "click[buy now]"):
        assert copy.step(action) == environment.step(action)


def test_equal_states_have_equal_keys_and_other_states_others(make: Make) -> None:
    environment = make()
    number = with_options(environment)
    to_item(environment, number)
    options = environment.goal_task(number).payload["options"]
    keys = [environment.state_key()]
    for _, value in options:
        environment.step(f"click[{value}]")
        keys.append(environment.state_key())
    to_item(environment, number)
    for _, value in reversed(options):
        environment.step(f"click[{value}]")
    assert environment.state_key() == keys[-1]
    assert len(set(keys)) == len(keys)
    environment.step("nonsense")
    assert environment.state_key() == keys[-1]


def test_similar_states_forget_the_way_and_keep_what_can_be_bought(make: Make) -> None:
    exact, similar = make(max_turns=15), make(max_turns=15, states="similar")
    number = with_options(exact)
    for environment in (exact, similar):
        to_item(environment, number)
    assert similar.visit.product is not None
    product = similar.catalog.product(similar.visit.product)
    value = similar.goal_task(number).payload["options"][0][1]

    def keys(*actions: str) -> tuple[str, str]:
        for action in actions:
            exact.step(action)
            similar.step(action)
        return exact.state_key(), similar.state_key()

    exact_key, first = keys()
    on_results, results = keys("click[< prev]")
    with_other_words = (f"search[{product.title} {product.title}]", f"click[{product.asin}]")
    other_exact, again = keys(*with_other_words)
    assert again == first and other_exact != exact_key
    selected = keys(f"click[{value}]")
    assert selected[1] != first
    assert keys("click[description]")[1] not in (first, selected[1])
    anew = f"search[{product.title}]"
    assert keys("click[back to search]", anew)[1] != results  # nothing was opened
    assert keys(f"click[{product.asin}]", "click[< prev]")[1] == results
    assert exact.state_key() != on_results  # the turn is another one
    assert keys("search[shoe]")[1] != results
    # The episodes are the same: a recording under one is a demonstration under the other. Stored
    # returns have all options of the environment in their key.
    assert exact.properties.version == similar.properties.version


def test_similar_states_tell_a_page_behind_the_last_one_from_a_search_without_results(
    make: Make,
) -> None:
    environment = make(states="similar")
    environment.reset(environment.goal_task(0), seed=0)

    def key_after(*actions: str) -> str:
        for action in actions:
            environment.step(action)
        assert environment.visit.page is Page.RESULTS
        return environment.state_key()

    nothing = key_after("search[xyzzyx]")
    assert environment.visit.results == ()
    assert key_after("search[yxyzzy]") == nothing
    last = key_after("search[shoe]")
    while environment.visit.shown:
        last, behind = environment.state_key(), key_after("click[next >]")
    assert len({nothing, last, behind}) == 3
    assert key_after("click[next >]") == behind
    assert key_after("click[< prev]", "click[< prev]") == last


def test_the_version_names_data_and_text_and_the_reward_version_the_reward(make: Make) -> None:
    base = make()
    assert make().properties == base.properties
    for change in ({"price_seed": 1}, {"observation": "text"}, {"data": "generated:201"}):
        assert make(**change).properties.version != base.properties.version
        assert make(**change).properties.reward_version == base.properties.reward_version
    for change in ({"reward": "upstream"}, {"payoff": "binary"}, {"nouns": "words"}):
        assert make(**change).properties.version == base.properties.version
        assert make(**change).properties.reward_version != base.properties.reward_version


def test_a_noun_rule_of_ones_own_is_used(make: Make) -> None:
    environment = make(nouns=no_nouns)
    to_item(environment)
    parts = environment.step("click[buy now]")[4]["reward_parts"]
    assert parts["title_score"] == 0.2
    assert "no_nouns" in environment.properties.reward_version


def test_a_noun_rule_without_a_name_of_its_own_is_refused(make: Make) -> None:
    def local(title: str) -> tuple[str, ...]:
        return (title,)

    for rule in (lambda title: (title,), functools.partial(no_nouns), local):
        with pytest.raises(ConfigError, match=r"environment.nouns: .* function that a module"):
            make(nouns=rule)


def test_spacy_is_missing_when_the_environment_is_made_not_at_the_first_purchase(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(EnvironmentDataError, match="spacy download en_core_web_sm"):
        make(nouns="spacy")


def test_a_player_is_told_which_data_the_tasks_are_made_of(make: Make) -> None:
    environment = make(data="generated:200")
    assert environment.properties.data == "200 generated products"
    said: list[str] = []
    play(environment, environment.tasks("test")[0], read=lambda _: "quit", write=said.append)
    assert said[0] == "webshop: 200 generated products\n"


@pytest.mark.slow
def test_it_says_where_real_products_come_from_when_it_found_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path, real_data: Path
) -> None:
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path))
    data = WebShopEnvironment().properties.data
    assert data == "1,000 generated products (`ragen-apo data webshop` gets real ones)"
    real = WebShopEnvironment(data=real_data, store=store)
    assert real.properties.data == f"1,000 products of {real_data}"


def no_nouns(_: str) -> tuple[str, ...]:
    return ()


@pytest.mark.parametrize("options", [{"nouns": "verbs"}, {"observation": "html"}, {"sead": 1}])
def test_unusable_options_are_config_errors(make: Make, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make(**options)


HOSTILE = [
    *("search[<r>]", "search[<a> x]", "search[<a>]", "search[<c>]", "search[<c> x]", "search[<q>]"),
    *("search[" + "x" * 100_000 + "]", "[" * 100_000, "click[" * 20_000 + "]" * 20_000),
    *("search[\x00\x1b[31m]", "search[\ud800]", "click[\udfff]", "search[\u202e\ufeff]", "\n\n[a]"),
    *("search[' OR 1=1 --]", 'search["navy" "small"]', "search[{{7*7}}]", "click[../../etc]"),
    *("search[\u0301" * 50 + "]", "search[" + "\U0001f468\u200d" * 500 + "]", "click[%s%n]"),
    *(" search[x]", "search[ ]", "search[]]", "click[[]"),
]


@pytest.mark.parametrize("mode", MODES)
def test_hostile_texts_raise_nothing_on_any_page(make: Make, mode: str) -> None:
    environment = make(observation=mode)
    for text in HOSTILE:
        for way in (
            [],
            ["search[shirt]"],
            ["search[shirt]", "click"],
            ["search[x]", "click[next >]"],
        ):
            environment.reset(environment.goal_task(0), seed=0)
            for action in way:
                last = f"click[{clickables(environment)[-1]}]"
                environment.step(last if action == "click" else action)
            observation, reward, terminated, _, _ = environment.step(text)
            assert isinstance(observation, str)
            assert (reward, terminated) == (0.0, False)
            assert environment.state_key()


ARGUMENTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["buy now", "< prev", "next >", "back to search", "description", "shirt"]),
)
ACTIONS = st.one_of(
    st.text(max_size=40),
    st.builds("{}[{}]".format, st.sampled_from(["search", "click", "buy", ""]), ARGUMENTS),
    st.integers(0, 100),
)


@pytest.mark.slow
@given(st.sampled_from(MODES), st.lists(ACTIONS, max_size=15))
@settings(max_examples=80)
def test_no_sequence_of_actions_raises(make: Make, mode: str, actions: list[str | int]) -> None:
    environment = make(observation=mode)
    environment.reset(environment.goal_task(1), seed=0)
    for action in actions:
        targets = clickables(environment) or ("x",)
        text = f"click[{targets[action % len(targets)]}]" if isinstance(action, int) else action
        observation, reward, terminated, truncated, info = environment.step(text)
        assert isinstance(observation, str)
        assert 0 <= reward <= 1
        assert not truncated
        assert ("success" in info) <= terminated


def test_what_is_offered_can_be_clicked(make: Make) -> None:
    environment = make()
    draws = random.Random(0)
    for number in range(40):
        environment.reset(environment.goal_task(number), seed=0)
        environment.step("search[with]" if number % 5 == 0 else "search[cotton shirt]")
        terminated = False
        while not terminated and clickables(environment) != ("search",):
            target = draws.choice(clickables(environment))
            *_, terminated, _, info = environment.step(f"click[{target.upper()}]")
            assert not info["invalid_action"], target


@pytest.mark.slow
def test_memory_does_not_grow_with_episodes(make: Make) -> None:
    environment = make(observation="text_rich")
    policies = environment.scripted_policies()
    tasks = environment.tasks("test")[:20]

    def play(rounds: int) -> None:
        for number in range(rounds):
            policy = policies["random"]()
            policy.begin(tasks[number % 20], seed=number % 20)
            observation, _ = environment.reset(tasks[number % 20], seed=0)
            for _ in range(10):
                observation = environment.step(policy.act(observation).action)[0]

    play(60)
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    play(120)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 50_000  # 1,200 steps; a session kept per episode would be 140 kB


def test_rich_text_marks_what_upstreams_page_address_holds_in_quotes(one_product: Make) -> None:
    values = ["red", '5" thick', "café"]
    environment = one_product({"Style": values}, observation="text_rich")
    to_item(environment)
    marked = environment.step("click[red]")[0]
    assert marked.startswith("You have clicked red.\nInstruction:\n")
    assert "  [clicked button] red [clicked button_]\n" in marked
    # JSON writes these two differently, so upstream never marks them.
    assert "clicked" not in environment.step('click[5" thick]')[0]
    assert "clicked" not in environment.step("click[café]")[0]
    assert environment.visit.selected == {"style": "café"}
    # The address holds the query too.
    environment.step('search[odd "red" shirt]')
    assert environment.step("click[b000000001]")[0].startswith("You have clicked red.")


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ("click b07hrfsnl4", ("click", "b07hrfsnl4")),
        ("  Search Red [wool] Shirt \nclick x", ("search", "red [wool] shirt")),
        ("click[< prev]", ("click", "< prev")),
        ("Search[red shoe]", ("search", "red shoe")),
        (" CLICK [ 3 ] ", ("click", "3")),
        ("search [red] shoe", ("search", "red")),
        ("click", None),
        ("buy now", None),
        ("search[ ]", None),
        ("search ", None),
    ],
)
def test_the_compact_mode_reads_actions_with_and_without_brackets(
    action: str, parsed: tuple[str, str] | None
) -> None:
    assert parse_plain_action(action) == parsed


def test_results_of_the_compact_mode_are_opened_by_the_first_words_of_their_title(
    make: Make,
) -> None:
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search shoe")
    num_named = 0
    for rank, product in enumerate(environment.visit.shown, start=1):
        words = environment.catalog.product(product).title.split()
        alike = [
            other
            for other in environment.visit.shown
            if environment.catalog.product(other).title.lower().split()[:5]
            == [word.lower() for word in words[:5]]
        ]
        name = environment.product_name(product)
        if len(alike) == 1 and not set("[]") & set("".join(words[:5])):
            assert name == " ".join(words[:5]).lower()
            num_named += 1
        else:
            assert name == str(rank) or len(name.split()) > 5
        _, _, _, _, info = environment.step(f"click {name}")
        assert not info["invalid_action"] and environment.visit.product == product
        environment.step("click < prev")
    assert num_named >= 5


def test_a_title_that_is_not_clear_or_not_there_opens_nothing(make: Make) -> None:
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search cream")
    shown = environment.visit.shown
    title = environment.catalog.product(shown[0]).title
    first = title.split()[0].lower()
    alike = [n for n in shown if environment.catalog.product(n).title.lower().split()[0] == first]
    page = environment.observation
    assert environment.step(f"click {first}")[4]["invalid_action"] == (len(alike) > 1)
    environment.step("search cream")
    for target in (f"{title} of another kind", "...", "1 |", title[: len(title) - 1]):
        assert environment.step(f"click {target}")[4]["invalid_action"], target
    assert environment.observation == page
    environment.step("click next >")
    assert environment.step(f"click {title}")[4]["invalid_action"], "it is on the other page"
    upstream = make(observation="text")
    upstream.reset(upstream.goal_task(0), seed=0)
    upstream.step("search[cream]")
    assert upstream.step(f"click[{title}]")[4]["invalid_action"]


def test_results_of_the_compact_mode_are_opened_by_their_number(make: Make) -> None:
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search cream")
    by_number = {}
    for first in (1, 11):
        page = environment.observation
        shown = environment.visit.shown
        assert clickables(environment)[-len(shown) :] == tuple(
            str(first + rank) for rank in range(len(shown))
        )
        for rank, product in enumerate(shown, start=first):
            title = environment.catalog.product(product).title[:30].lower()
            assert any(line.startswith(f"{rank} | {title[:20]}") for line in page.splitlines()), (
                rank,
                title,
            )
            by_number[rank] = product
        environment.step("click next >")
    for rank, product in by_number.items():
        environment.step("search cream")
        for _ in range((rank - 1) // 10):
            environment.step("click next >")
        assert not environment.step(f"click {rank}")[4]["invalid_action"]
        assert environment.visit.product == product


@pytest.mark.parametrize("number", ["0", "11", "01", "+1", "1.", "-1", "\u0661", "99999999999"])
def test_a_number_that_the_page_does_not_show_opens_nothing(make: Make, number: str) -> None:
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search shoe")
    assert environment.step(f"click {number}")[4]["invalid_action"]
    assert environment.visit.product is None


def test_numbers_open_nothing_in_upstreams_modes_and_on_other_pages(make: Make) -> None:
    environment = make(observation="text")
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search[shoe]")
    assert environment.step("click[1]")[4]["invalid_action"]
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    assert environment.step("click 1")[4]["invalid_action"]


@pytest.mark.parametrize("title", ["Next >", "back to search", "< prev", "2", "B000000002"])
def test_a_title_that_means_something_else_is_clicked_by_its_number(
    title: str, shop_of: Callable[..., WebShopEnvironment]
) -> None:
    """The oracle would have paged or gone back until the end of its turns."""
    about = {"small_description": ["an odd thing"]}
    products = [{"asin": "B000000001", "name": title}, {"asin": "B000000002", "name": "Odd hat"}]
    environment = shop_of([about | product for product in products])
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search odd")
    wanted, other = sorted(environment.visit.shown)
    name = environment.product_name(wanted)
    assert name == str(environment.visit.shown.index(wanted) + 1)
    environment.step(f"click {name}")
    assert environment.visit.product == wanted
    environment.step("click < prev")
    environment.step(f"click {environment.product_name(other)}")
    assert environment.visit.product == other


def test_a_number_opens_its_product_where_two_ids_differ_in_case_only(
    shop_of: Callable[..., WebShopEnvironment],
) -> None:
    environment = shop_of(
        [{"asin": "abc", "name": "Odd shirt"}, {"asin": "ABC", "name": "Odd hat"}]
    )
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search odd")
    for rank, product in enumerate(environment.visit.shown, start=1):
        environment.step(f"click {rank}")
        assert environment.visit.product == product
        environment.step("click < prev")


def test_a_step_before_a_reset_is_an_error_and_one_after_the_end_says_how_it_ended(
    make: Make,
) -> None:
    environment = make(max_turns=1)
    with pytest.raises(RuntimeError, match=r"webshop has no episode yet; call reset"):
        environment.step("search cream")
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search cream")
    *_, info = environment.step("search cream")
    assert info["success"] is False


def test_a_copy_goes_its_own_way(make: Make) -> None:
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search cream")
    page, key = environment.observation, environment.state_key()
    copy.copy(environment).step("click 1")
    assert (environment.observation, environment.state_key()) == (page, key)
