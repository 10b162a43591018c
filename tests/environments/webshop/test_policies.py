import re
from collections.abc import Callable

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.policies import instruction_queries, mentioned_value
from ragen_apo.environments.webshop.session import Page, parse_plain_action

Make = Callable[..., WebShopEnvironment]


def scores(environment: WebShopEnvironment, name: str, num_tasks: int = 40) -> list[float]:
    earned: list[float] = []
    for task in environment.tasks("test")[:num_tasks]:
        policy = environment.scripted_policies()[name]()
        policy.begin(task, seed=3)
        observation, _ = environment.reset(task, seed=3)
        total = 0.0
        for _ in range(15):
            reply = policy.act(observation)
            observation, reward, terminated, _, info = environment.step(reply.action)
            assert reply.is_mistake or not info["invalid_action"], (name, task)
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
    assert by_name["oracle"] >= 0.95


@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_a_policy_plays_every_mode_alike(make: Make, mode: str) -> None:
    assert scores(make(observation=mode), "teacher", 10) == scores(make(), "teacher", 10)


def test_the_oracle_reaches_one_on_the_real_data(make_real: Make) -> None:
    assert success(scores(make_real(reward="corrected"), "oracle", 60)) >= 0.95


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
    assert instruction_queries(text, goal)[:2] == [
        "slim fit men's jeans",
        "slim fit men's jeans navy 32w",
    ]


def test_the_teacher_goes_wrong_on_purpose_and_finds_back(make: Make) -> None:
    environment = make()
    mistakes: set[str] = set()
    for task in environment.tasks("test")[:60]:
        policy = environment.scripted_policies()["teacher"]()
        policy.begin(task, seed=0)
        observation, _ = environment.reset(task, seed=0)
        wrong_at = None
        for _ in range(25):
            before = environment.session.page
            reply = policy.act(observation)
            observation, _, terminated, _, info = environment.step(reply.action)
            opened = environment.session.product
            if reply.is_mistake and before is Page.RESULTS:
                mistakes.add("product")
                wrong_at = opened
                assert opened != environment.catalog.number_of(task.payload["asin"])
            elif reply.is_mistake:
                mistakes.add("value")
                assert info["invalid_action"]
            elif wrong_at is not None:
                assert reply.action == "click < prev"
                wrong_at = None
            if terminated:
                break
        assert terminated
    assert mistakes == {"product", "value"}
    oracle = environment.scripted_policies()["oracle"]()
    for task in environment.tasks("test")[:20]:
        oracle.begin(task, seed=0)
        observation, _ = environment.reset(task, seed=0)
        for _ in range(3):
            reply = oracle.act(observation)
            assert not reply.is_mistake
            observation = environment.step(reply.action)[0]
