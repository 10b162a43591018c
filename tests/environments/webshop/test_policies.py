import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.scripted import (
    HASTY_MAX_RETURNS,
    HASTY_RANKS,
    MAX_OPENED,
    asked_options,
    instruction_queries,
    mentioned_value,
    searchable,
)
from ragen_apo.environments.webshop.visit import Page, parse_plain_action
from ragen_apo.types import Task

Make = Callable[..., WebShopEnvironment]
READERS = ("careful", "hasty", "forgetful")
"""Those who try options that may not be there."""


def begun(
    environment: WebShopEnvironment, name: str, task: Task, *, seed: int = 0
) -> tuple[ScriptedPolicy, str]:
    """A policy and an environment at the start of the same episode, and what is read there."""
    policy = environment.scripted_policies()[name]()
    policy.begin(task, seed=seed)
    return policy, environment.reset(task, seed=seed)[0]


def scores(
    environment: WebShopEnvironment, name: str, tasks: Sequence[Task] | int = 40
) -> list[float]:
    """What a policy earns on these tasks, or on so many of the split `test`."""
    earned: list[float] = []
    for task in environment.tasks("test")[:tasks] if isinstance(tasks, int) else tasks:
        policy, observation = begun(environment, name, task, seed=3)
        total = 0.0
        for _ in range(15):
            reply = policy.act(observation)
            observation, reward, terminated, _, info = environment.step(reply.action)
            tries_option = name in READERS and reply.thought.startswith("I need one with ")
            may_fail = reply.is_mistake or tries_option
            assert may_fail or not info["invalid_action"], (name, task)
            total += reward
            if terminated:
                break
        earned.append(total)
    return earned


def success(earned: list[float]) -> float:
    return sum(score >= 1 for score in earned) / len(earned)


def test_those_who_know_the_goal_beat_the_rule_and_the_rule_beats_chance(make: Make) -> None:
    environment = make()
    by_name = {name: success(scores(environment, name)) for name in environment.scripted_policies()}
    assert by_name["oracle"] >= by_name["teacher"] > by_name["heuristic"] > by_name["random"]
    assert by_name["oracle"] >= by_name["careful"] > by_name["heuristic"]
    assert by_name["oracle"] >= 0.95


@pytest.mark.parametrize("mode", ["text", "text_rich"])
@pytest.mark.parametrize("name", ["careful", "hasty", "teacher", "forgetful"])
def test_a_policy_plays_every_mode_alike(make: Make, mode: str, name: str) -> None:
    assert scores(make(observation=mode), name, 10) == scores(make(), name, 10)


def test_the_forgetful_shopper_errs_in_no_request_that_reading_cannot_meet(make: Make) -> None:
    """What people write names no options in a form that `careful` reads."""
    environment = make(data="generated:1000", goals="human")
    assert scores(environment, "forgetful") == scores(environment, "teacher")


def test_the_oracle_reaches_one_on_the_real_data(make_real: Make) -> None:
    assert success(scores(make_real(reward="corrected"), "oracle", 60)) >= 0.95


@pytest.mark.slow
def test_knowing_the_goal_helps_on_the_real_data(make_real: Make) -> None:
    environment = make_real(reward="corrected")
    heuristic, careful, teacher = (
        success(scores(environment, name, 100)) for name in ("heuristic", "careful", "teacher")
    )
    assert teacher > careful + 0.05 > careful > heuristic + 0.1


def test_the_same_seed_gives_the_same_replies(make: Make) -> None:
    environment = make()
    assert scores(environment, "random", 10) == scores(environment, "random", 10)


def test_the_teacher_searches_words_of_the_instruction_only(make: Make) -> None:
    environment = make()
    for task in environment.tasks("test")[:30]:
        policy = environment.scripted_policies()["teacher"]()
        policy.begin(task, seed=0)
        parsed = parse_plain_action(policy.act("").action)
        assert parsed is not None
        assert parsed[0] == "search"
        assert words(parsed[1]) <= words(task.instruction.lower())


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_the_named_value_is_the_longest_whole_words() -> None:
    values = ("s", "red", "wine red", "")
    assert mentioned_value(values, "a dress in wine red, and size: large") == "wine red"
    assert mentioned_value(("s",), "a dress") is None


def test_queries_lose_opening_options_and_price(make: Make) -> None:
    from ragen_apo.environments.webshop.goals import Goal

    text = "Find me slim fit men's jeans with color: navy, and size: 32w"
    text += ", and price lower than 90.00 dollars"
    goal = Goal(0, text, (), (("color", "navy"), ("size", "32w")), 90.0)
    assert asked_options(text) == goal.options
    assert instruction_queries(text, goal.options)[:2] == [
        "slim fit men's jeans",
        "slim fit men's jeans navy 32w",
    ]


def test_the_teacher_opens_a_wrong_product_now_and_then_and_goes_back(make: Make) -> None:
    environment = make()
    num_mistakes = 0
    tasks = environment.tasks("test")[:100]
    for task in tasks:
        policy, observation = begun(environment, "teacher", task)
        wanted = environment.catalog.number_of(task.payload["asin"])
        mistakes: list[int | None] = []
        terminated = False
        for _ in range(25):
            before = environment.visit.page
            reply = policy.act(observation)
            if mistakes and environment.visit.product == mistakes[-1]:
                assert reply.action == "click < prev"
            observation, _, terminated, _, info = environment.step(reply.action)
            assert not info["invalid_action"]
            if reply.is_mistake:
                assert before is Page.RESULTS
                assert environment.visit.product not in (None, wanted)
                mistakes.append(environment.visit.product)
            if terminated:
                break
        assert terminated
        assert len(mistakes) <= 1
        num_mistakes += len(mistakes)
    assert 0 < num_mistakes <= 25  # a tenth of 100: mean 10, standard deviation 3
    oracle = environment.scripted_policies()["oracle"]()
    for task in environment.tasks("test")[:20]:
        oracle.begin(task, seed=0)
        observation, _ = environment.reset(task, seed=0)
        for _ in range(3):
            reply = oracle.act(observation)
            assert not reply.is_mistake
            observation = environment.step(reply.action)[0]


def test_the_forgetful_shopper_misnames_a_product_and_finds_it_by_reading(make: Make) -> None:
    environment = make()
    num_misnamed = 0
    tasks = environment.tasks("test")[:100]
    for task in tasks:
        policy, observation = begun(environment, "forgetful", task)
        reads_from: int | None = None
        reward = 0.0
        for turn in range(15):
            reply = policy.act(observation)
            if turn == reads_from:
                assert reply == Reply("I look at the first result.", "click 1")
            observation, reward, terminated, _, info = environment.step(reply.action)
            if reply.is_mistake and environment.visit.page is Page.RESULTS:
                assert info["invalid_action"]
                reads_from = turn + 1
            if terminated:
                break
        assert reads_from is None or reward == 1
        num_misnamed += reads_from is not None
    assert 5 <= num_misnamed <= 40  # two fifths of those where reading finds it


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Find me a shirt, and price lower than 5.00 dollars", ()),
        ("Find me a shirt with long sleeve with color: red", (("color", "red"),)),
        (
            "Find me shirts, tees with cotton with color: 2: a, b, and fit type: men with hat",
            (("color", "2: a, b"), ("fit type", "men with hat")),
        ),
    ],
)
def test_the_options_of_a_request_are_read_off_it(
    text: str, options: tuple[tuple[str, str], ...]
) -> None:
    assert asked_options(text) == options


@pytest.mark.slow
def test_the_options_of_every_goal_are_read_off_its_instruction(make_real: Make) -> None:
    environment = make_real()
    for number in range(environment.num_goals):
        task = environment.goal_task(number)
        options = tuple((name, value) for name, value in task.payload["options"])
        assert asked_options(task.instruction) == options


@pytest.mark.parametrize("name", ["careful", "hasty"])
def test_who_reads_the_request_knows_no_more_than_it_reads(make: Make, name: str) -> None:
    environment = make()
    tasks = environment.tasks("test")
    for task, other in zip(tasks[:40], tasks[40:80], strict=True):
        assert task.payload != other.payload
        disguised = replace(task, payload=other.payload)
        replies: list[list[Reply]] = []
        for known in (task, disguised):
            policy = environment.scripted_policies()[name]()
            policy.begin(known, seed=0)
            observation, _ = environment.reset(task, seed=0)
            replies.append([])
            terminated = False
            while not terminated:
                replies[-1].append(policy.act(observation))
                observation, _, terminated, _, _ = environment.step(replies[-1][-1].action)
        assert replies[0] == replies[1]


def test_the_careful_shopper_leaves_what_lacks_an_option_and_buys_the_first_that_lacks_none(
    make: Make,
) -> None:
    environment = make()
    num_left = 0
    for task in environment.tasks("test")[:120]:
        policy, observation = begun(environment, "careful", task)
        visit, was_possible, terminated = environment.visit, True, False
        opened: list[int] = []
        while not terminated:
            reply = policy.act(observation)
            if reply.action == "click < prev":
                assert not was_possible
                num_left += 1
            was_on_results = visit.page is Page.RESULTS
            observation, _, terminated, _, info = environment.step(reply.action)
            was_possible = not info["invalid_action"]
            if was_on_results and visit.product is not None:
                opened.append(visit.product)
        assert tuple(opened) == visit.results[: len(opened)]
        assert len(opened) <= MAX_OPENED
        options = dict(asked_options(task.instruction))
        for product in opened[:-1]:
            offered = environment.catalog.product(product).options
            assert any(value not in offered.get(name, ()) for name, value in options.items())
        assert len(opened) == MAX_OPENED or visit.selected == options
    assert num_left > 10


@pytest.mark.slow
def test_the_hasty_shopper_leaves_to_chance_what_it_searches_opens_selects_and_leaves(
    make: Make,
) -> None:
    environment = make()
    queries: Counter[int] = Counter()
    ranks: Counter[int] = Counter()
    selects: Counter[bool] = Counter()
    leaves: Counter[bool] = Counter()
    for task in environment.tasks("test"):
        options = asked_options(task.instruction)
        policy, observation = begun(environment, "hasty", task)
        visit, num_returns, missing, terminated = environment.visit, 0, "", False
        while not terminated:
            page, shown, selected = visit.page, visit.shown, dict(visit.selected)
            opened = set(visit.opened)
            observed = f"\n{observation}"
            reply = policy.act(observation)
            observation, _, terminated, _, info = environment.step(reply.action)
            if missing and num_returns < HASTY_MAX_RETURNS:
                leaves[reply == Reply(f"It has no {missing}.", "click < prev")] += 1
            num_returns += reply.action == "click < prev"
            if page is Page.START:
                known = [searchable(q) for q in instruction_queries(task.instruction, options)]
                queries[known.index(reply.action.removeprefix("search "))] += 1
            elif page is Page.RESULTS and shown:
                rank = shown.index(visit.product or 0)
                seen = {shown.index(product) for product in opened}
                if not seen:
                    ranks[rank] += 1
                elif left := {each for each in HASTY_RANKS if each < len(shown)} - seen:
                    assert rank == min(left)
                numbers = ", ".join(str(number + 1) for number in sorted(seen))
                before = f"Opened: {numbers}" if seen else ""
                assert before in observed.split("\n")
                assert reply.thought == f"{before}{'. ' if seen else ''}I look at {rank + 1}."
            elif terminated:
                offered = environment.catalog.product(visit.product or 0).options
                for name, value in options:
                    if value in offered.get(name, ()):
                        selects[name in selected] += 1
            missing = reply.thought.removeprefix("I need one with ")[:-1]
            missing = missing if info["invalid_action"] else ""
        assert num_returns <= HASTY_MAX_RETURNS
    assert ranks.keys() == set(HASTY_RANKS)
    assert queries.keys() == {0, 1, 2}
    assert [queries[n] / queries.total() for n in range(3)] == pytest.approx([1 / 3] * 3, abs=0.07)
    assert [ranks[n] / ranks.total() for n in range(4)] == pytest.approx(
        [1 / 3, 1 / 3, 1 / 6, 1 / 6], abs=0.07
    )
    assert selects[True] / selects.total() == pytest.approx(0.8, abs=0.06)
    assert leaves[True] / leaves.total() == pytest.approx(0.5, abs=0.07)


@pytest.mark.slow
def test_the_hasty_shopper_leaves_room_on_the_real_data(make_real: Make) -> None:
    environment = make_real(price_seed=0, reward="corrected", nouns="rule", max_turns=15)
    every_tenth = environment.tasks("train")[::10]
    earned = scores(environment, "hasty", every_tenth)
    assert success(earned) == pytest.approx(0.251, abs=0.03)
    assert sum(earned) / len(earned) == pytest.approx(0.576, abs=0.03)


@pytest.mark.parametrize("mode", ["compact", "text", "text_rich"])
@pytest.mark.parametrize("name", ["heuristic", "oracle"])
def test_options_are_clicked_as_the_mode_writes_them(make: Make, mode: str, name: str) -> None:
    environment = make(observation=mode)
    num_selected = 0
    for task in environment.tasks("test")[:30]:
        policy = environment.scripted_policies()[name]()
        policy.begin(task, seed=0)
        observation, _ = environment.reset(task, seed=0)
        terminated = False
        while not terminated:
            before = dict(environment.visit.selected)
            reply = policy.act(observation)
            observation, _, terminated, _, _ = environment.step(reply.action)
            chosen = set(environment.visit.selected.items()) - set(before.items())
            if not chosen:
                continue
            num_selected += 1
            (option,) = chosen
            click = f"click {option[1]}" if mode == "compact" else f"click[{option[1]}]"
            if mode == "compact" and option[1].startswith("#"):  # as the number of an option does
                number = environment.views(environment.visit.product).option_numbers[option]
                click = f"click {number}"
            assert reply.action == click
            if name == "oracle":
                assert reply.thought == f"I need one with {option[0]}: {option[1]}."
    assert num_selected > 20
