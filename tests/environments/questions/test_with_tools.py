"""Questions with tools: functions become calls, calls become texts; what the page shows trains."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from ragen_apo.agent.assembly import build_environments
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.agent.tool_calls import ToolCalls
from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.contract import check_environment, episodes_in_threads_are_as_one_by_one
from ragen_apo.environments.questions.environment import make_questions
from ragen_apo.environments.questions.with_tools import questions_with_tools
from ragen_apo.environments.toolkit.game import GameEnvironment
from ragen_apo.errors import ConfigError, EnvironmentFaultError, EnvironmentRaisedError
from ragen_apo.files import read_json_lines
from ragen_apo.policy.call_form import CallForm
from tests import factories

PAGE = Path(__file__).resolve().parents[3] / "docs" / "questions.md"
PRODUCTS = {"operations": ["*"], "max_terms": 2, "max_number": 99, "num_train_tasks": 40,
            "num_test_tasks": 10}  # fmt: skip


def multiply(a: int, b: int) -> int:
    """The product of two whole numbers.

    For people: it never overflows.
    """
    return a * b


def word(number: int, language: Literal["en", "fr"]) -> str:
    """A number in words."""
    if not 0 <= number <= 1:
        raise ValueError("only 0 and 1 are known")
    return {"en": ("zero", "one"), "fr": ("zéro", "un")}[language][number]


def say(first: str, second: str) -> str:
    """Says both."""
    return f"{first}|{second}"


def products(*functions: Callable[..., Any] | type, **options: Any) -> GameEnvironment:
    return questions_with_tools(functions or (multiply, word, say), **{**PRODUCTS, **options})


def begun(environment: TextEnvironment) -> str:
    """The right answer of the episode that has begun."""
    task = environment.tasks("train")[0]
    environment.reset(task, seed=0)
    return str(task.payload["answer"])


def test_calls_are_answered_until_the_question_is() -> None:
    environment = products()
    right = begun(environment)
    said, reward, terminated, truncated, info = environment.step(" multiply(12, -3) ")
    assert (said, reward, terminated, truncated) == ("-36", 0.0, False, False)
    assert info == {"metrics": {"num_calls": 1}}
    assert environment.step('word(1,"fr")')[0] == "un"
    said, reward, terminated, _, info = environment.step(f"answer({right})")
    assert (said, reward, terminated) == ("Right.", 1.0, True)
    assert info == {"metrics": {"num_calls": 2}, "success": True}


def test_an_answer_may_stand_in_quotes_as_the_rules_say() -> None:
    environment = products()
    assert environment.step(f'answer("{begun(environment)}")')[4]["success"]
    begun(environment)
    assert environment.step("answer(nothing)")[4]["success"] is False


@pytest.mark.parametrize(
    "text",
    [
        "multiply(3)",
        "multiply(3, 4, 5)",
        "multiply(3, 4.5)",
        "multiply(3, true)",
        'multiply(3, "4")',
        "multiply(a, b)",
        "multiply(3, 4",
        "divide(3, 4)",
        'word(1, "de")',
        "answer()",
        "",
        "__import__('os')",
    ],
)
def test_a_text_that_is_no_call_is_answered_with_the_calls_that_there_are(text: str) -> None:
    environment = products()
    begun(environment)
    said, reward, terminated, _, info = environment.step(text)
    assert said.startswith("No such call. Call one of multiply(a: integer, b: integer), word(")
    assert (reward, terminated, info["invalid_action"]) == (0.0, False, True)


def test_several_calls_in_one_turn_are_made_in_their_order() -> None:
    environment = products()
    begun(environment)
    said, *_, info = environment.step(' multiply(3, 4)\n\n word(1, "fr") \nmultiply(5, 6)')
    assert said == 'multiply(3, 4): 12\nword(1, "fr"): un\nmultiply(5, 6): 30'
    assert info == {"metrics": {"num_calls": 3}}
    key = environment.state_key()
    begun(environment)
    for text in ("multiply(3, 4)", 'word(1, "fr")', "multiply(5, 6)"):
        environment.step(text)
    assert environment.state_key() != key  # fewer turns are left


def test_a_refusal_among_several_calls_keeps_the_others() -> None:
    environment = products()
    begun(environment)
    said, *_, info = environment.step('word(7, "en")\nmultiply(5, 6)')
    assert said == (
        'word(7, "en"): word refused its arguments: only 0 and 1 are known\nmultiply(5, 6): 30'
    )
    assert info == {"invalid_action": True, "metrics": {"num_calls": 1}}


@pytest.mark.parametrize("text", ["answer(12)\nmultiply(3, 4)", "answer(6)\nanswer(7)"])
def test_an_answer_stands_alone(text: str) -> None:
    environment = products()
    begun(environment)
    said, _, terminated, *_ = environment.step(text)
    assert said.startswith("No such call.")
    assert not terminated


@pytest.mark.parametrize("last", ["multiply(5)", "answer(12)", "Done."])
def test_of_several_calls_none_is_made_if_one_cannot_be(last: str) -> None:
    environment = products()
    begun(environment)
    said, _, terminated, _, info = environment.step(f"multiply(3, 4)\n{last}")
    assert said.startswith("No such call.")
    assert (terminated, info["metrics"]) == (False, {"num_calls": 0})


def test_a_function_may_refuse_its_arguments_and_the_agent_reads_why() -> None:
    environment = products()
    begun(environment)
    before = environment.state_key().split(":", 3)[3]
    said, _, terminated, _, info = environment.step('word(7, "en")')
    assert said == "word refused its arguments: only 0 and 1 are known"
    assert info == {"invalid_action": True, "metrics": {"num_calls": 0}}
    assert not terminated
    assert environment.state_key().split(":", 3)[3] == before


@pytest.mark.parametrize(
    ("numerator", "said"),
    [
        (1, "ZeroDivisionError('division by zero')"),
        (2, "KeyError('nothing')"),
        (3, "?abcdefgh ... (3 more characters)"),
    ],
)
def test_a_refusal_that_python_makes_is_one_too_and_is_short(numerator: int, said: str) -> None:
    def over(numerator: int) -> float:
        """Refuses everything."""
        if numerator == 3:
            raise ValueError("\ud800abcdefghijk")
        return {}["nothing"] if numerator == 2 else numerator / 0

    environment = products(over, max_result_characters=40 if numerator < 3 else 9)
    begun(environment)
    found, _, _, _, info = environment.step(f"over({numerator})")
    assert found == f"over refused its arguments: {said}"
    assert info["invalid_action"]


def dirty(expression: str) -> str:
    """Evaluates an expression."""
    if expression != "1 + 1":
        raise TypeError(expression)
    return "2"


def test_a_function_that_raises_something_else_is_named_with_what_to_do() -> None:
    environment = products(dirty)
    begun(environment)
    assert environment.step('dirty("1 + 1")')[0] == "2"
    words = r"^dirty raised TypeError\('2 \+ 2'\) in .*test_with_tools.py, line \d+; to refuse"
    with pytest.raises(RuntimeError, match=words) as raised:
        environment.step('dirty("2 + 2")')
    assert isinstance(raised.value.__cause__, TypeError)


def test_in_a_run_it_is_named_as_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from ragen_apo.environments.questions.with_tools import questions_with_tools\n"
        "def go() -> str:\n    'Goes.'\n    raise TypeError('broken')\n"
        "def make_calc(**options): return questions_with_tools([go], **options)\n"
    )
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig.model_validate("./mine.py:make_calc")
    manager = build_environments(config, AgentConfig())
    environment, _ = manager.start(manager.tasks("train")[0], seed=0)
    with pytest.raises(EnvironmentRaisedError, match=r"^the environment '.*/mine.py:make_calc': "):
        manager.step(environment, ParsedResponse("", "go()", is_valid=True))


@pytest.mark.slow
def test_a_check_calls_functions_that_no_scripted_policy_calls() -> None:
    draws = itertools.count()

    def draw(number: int, order: Literal["up", "down"], names: list[str]) -> int:
        """Another number each time."""
        return next(draws)

    found = check_environment(partial(products, dirty))
    assert "the text 'dirty(\"\")' made step raise" in str(found["any text is answered"])
    assert [text for text in found.values() if text] == [found["any text is answered"]]
    found = check_environment(partial(products, draw))
    said = str(found["equal environments write equal texts"])
    assert said.startswith(
        "the call 'draw(0, \"up\", [])' was answered by [('0', 0.0, False, False)]"
    )


def test_texts_are_asked_for_in_quotes_where_a_function_takes_any() -> None:
    for functions, ends in ((say, "texts in double quotes."), (multiply, "answer(text: string).")):
        environment = products(functions)
        begun(environment)
        assert environment.step("say(a, b)")[0].endswith(ends)


def test_two_texts_with_commas_and_quotes_stay_two_in_the_form_of_a_models_own_calls() -> None:
    environment = products()
    begun(environment)
    calls = ToolCalls(environment.properties.tools, CallForm("<tool_call>", "</tool_call>"))
    text = (
        '<tool_call>{"name": "say", "arguments": {"first": "a, \\"b", "second": "c)"}}</tool_call>'
    )
    parsed = calls.parse(text)
    assert parsed == ParsedResponse("", 'say("a, \\"b", "c)")', is_valid=True)
    assert environment.step(parsed.action)[0] == 'a, "b|c)'
    assert calls.parse(calls.render(thought="", action=parsed.action)) == parsed


def test_a_long_result_is_cut_and_one_that_no_file_can_hold_is_mended() -> None:
    def long() -> str:
        """Much text."""
        return "x" * 30

    def odd() -> str:
        """Odd text."""
        return "a\ud800b"

    def refusing() -> str:
        """Refuses at length."""
        raise ValueError("x" * 30 + "\ud800")

    environment = products(long, odd, refusing, max_result_characters=10)
    begun(environment)
    refused = "refusing refused its arguments: xxxxxxxxxx ... (21 more characters)"
    assert environment.step("refusing()")[0] == refused
    assert environment.step("long()")[0] == "xxxxxxxxxx ... (20 more characters)"
    assert environment.step("odd()")[0] == "a?b"


def test_the_rules_and_the_version_say_what_the_functions_are() -> None:
    properties = products(multiply).properties
    assert (
        "- multiply(a: integer, b: integer): The product of two whole numbers.\n"
        in properties.rules
    )
    assert properties.max_turns == 8
    assert [tool.name for tool in properties.tools] == ["multiply", "answer"]
    for change in ({"version": "2"}, {"max_result_characters": 9}, {"max_turns": 3}):
        assert products(multiply, **change).properties.version != properties.version
    assert products(multiply, say).properties.version != properties.version
    assert products(multiply).properties.version == properties.version
    assert products(multiply, compare="text").properties.reward_version != properties.reward_version


def test_the_rules_have_what_annotations_say_of_parameters() -> None:
    def find(name: Annotated[str, "of a country"], year: int) -> str:
        """Find it."""
        return name

    lines = products(find).properties.rules.splitlines()
    assert lines[1:3] == ["- find(name: string, year: integer): Find it.", "  name: of a country"]


def test_functions_that_cannot_be_tools_are_refused() -> None:
    def answer(text: str) -> str:
        """Takes the name of the answer."""
        return text

    def silent(text: str) -> str:
        return text

    def half(number: complex) -> complex:
        """Half of a number."""
        return number / 2

    for functions, words in (
        ([answer], "got answer; expected different names, none of them answer"),
        ([multiply, multiply], "got multiply, multiply; expected different names"),
        ([silent], "silent has no docstring; expected one"),
        (
            [half],
            "half: the parameter 'number' has the type complex; expected str, int, float, bool, ",
        ),
        ([lambda: 1], "<lambda> has no docstring"),
        ([partial(multiply, 2)], "got functools.partial("),
    ):
        with pytest.raises(ConfigError, match=f"functions: {re.escape(words)}"):
            products(*functions)


def test_an_object_and_a_function_alone_are_refused_with_what_to_write() -> None:
    class Desk:
        def look(self) -> str:
            """What lies there."""
            return "a pen"

    with pytest.raises(ConfigError, match="got an object of Desk; .* such as Desk itself, without"):
        products(Desk())  # pyright: ignore[reportArgumentType]
    for given, name in ((multiply, "multiply"), (Desk, "Desk")):
        with pytest.raises(ConfigError, match=rf"got {name}; expected a list, such as \[{name}\]"):
            questions_with_tools(given)  # pyright: ignore[reportArgumentType]


class Desk:
    """Notes of one episode."""

    closed: ClassVar[list[str]] = []
    """The notes of desks that were closed."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def reset(self, question: str, answer: str, **row: Any) -> str:
        self._notes.append(f"asked {question}")
        return f"A hint: it ends with {answer[-1]}."

    def note(self, text: str) -> int:
        """Writes a note."""
        self._notes.append(text)
        return len(self._notes)

    def notes(self) -> list[str]:
        """Reads the notes."""
        return self._notes

    def close(self) -> None:
        Desk.closed.append("; ".join(self._notes))

    def _private(self) -> None:
        """Nothing to call."""


def test_each_episode_has_an_object_of_a_class_and_its_methods_are_called() -> None:
    environment = products(multiply, Desk)
    names = [tool.name for tool in environment.properties.tools]
    assert names == ["multiply", "note", "notes", "answer"]
    first, second = environment.tasks("train")[:2]
    Desk.closed.clear()
    for task in (first, second):
        said, _ = environment.reset(task, seed=0)
        hint = f"A hint: it ends with {task.payload['answer'][-1]}."
        assert said == f"QUESTION: {task.instruction}\n{hint}"
        key = environment.state_key()
        assert environment.step('note("a, b")')[0] == "2"
        assert environment.state_key() != key
        assert environment.step("multiply(2, 3)")[0] == "6"
        assert environment.step("notes()")[0] == str([f"asked {task.instruction}", "a, b"])
        assert environment.step("reset()")[4]["invalid_action"]
    assert Desk.closed == [f"asked {first.instruction}; a, b"]
    environment.close()
    assert Desk.closed[1:] == [f"asked {second.instruction}; a, b"]


class Board:
    """Says what it was told."""

    def look(self) -> str:
        """Looks."""
        return "a board"

    def reset(self, **row: Any) -> str:
        return json.dumps(row, sort_keys=True)


def test_a_class_is_told_the_whole_row_of_its_file(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"What is {number}?",
            "answer": f"By halves. #### {number}",
            "category": "easy",
            "id": f"q{number}",
            "board": {"cells": [number, None]},
            "target": number / 2,
        }
        for number in range(1, 13)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    asked = {"data": str(path), "test_share": 0.3}
    environment = questions_with_tools([Board], **asked)
    task = environment.tasks("train")[0]
    number = float(task.payload["answer"])
    question, told = environment.reset(task, seed=0)[0].split("\n")
    assert question == f"QUESTION: What is {number:g}?"
    assert json.loads(told) == {
        **rows[int(number) - 1],
        "answer": f"{number:g}",
        "solution": "By halves.",
    }
    plain = questions_with_tools([multiply], **asked)
    assert set(plain.tasks("train")[0].payload) == {"answer", "solution", "id"}
    ids = [task.task_id for task in plain.tasks("train")]
    assert ids == [task.task_id for task in make_questions(**asked).tasks("train")]
    for make in (make_questions, products):
        with pytest.raises(ConfigError, match="keep_columns"):
            make(keep_columns=True)


def test_a_copy_with_a_class_has_objects_of_its_own() -> None:
    one = products(Desk)
    begun(one)
    other = pickle.loads(pickle.dumps(products(Desk)))
    begun(other)
    assert [each.step('note("a")')[0] for each in (one, other, one)] == ["2", "2", "3"]


@pytest.mark.slow
def test_a_class_keeps_the_promises_of_every_environment_also_in_threads() -> None:
    make = partial(products, Desk, say)
    assert set(check_environment(make).values()) == {None}
    episodes_in_threads_are_as_one_by_one(make)


def test_a_class_whose_methods_cannot_be_tools_is_refused() -> None:
    class Empty:
        """Nothing to call."""

        def close(self) -> None:
            """Ends it."""

    class Untyped:
        def look(self, where) -> str:
            """Looks."""
            return where

    for kind, words in (
        (Empty, "the class Empty has no public methods to call"),
        (Untyped, "look: the parameter 'where' has no type; expected str"),
    ):
        with pytest.raises(ConfigError, match=f"functions: {re.escape(words)}"):
            products(kind)
    with pytest.raises(ConfigError, match="got note, notes, note, notes; expected different names"):
        products(Desk, Desk)


@pytest.mark.parametrize("said", [3, ("a", "b")])
def test_a_reset_says_a_text_or_nothing(said: object) -> None:
    class Odd(Counter):
        def reset(self, **row: Any) -> Any:
            return said

    with pytest.raises(
        EnvironmentFaultError, match=r"^Odd\.reset\(\) returned .*; expected a text"
    ):
        begun(products(Odd))


def test_a_reset_that_raises_is_a_fault_of_the_environment() -> None:
    class Narrow(Desk):
        def reset(self, question: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            return question

    words = r"^Narrow\.reset\(question, category, answer\) raised TypeError\("
    with pytest.raises(RuntimeError, match=words):
        begun(products(Narrow))


class Counter:
    """As for TRL's `environment_factory`: it is to count to three."""

    def reset(self, **row: Any) -> None:
        self.number = 0

    @property
    def broken(self) -> int:
        raise AssertionError("nobody asks for it")

    def count(self) -> int:
        """Counts one more."""
        self.number += 1
        return self.number

    def get_reward(self) -> float:
        return min(self.number, 3) / 3


def test_a_class_may_decide_what_the_episode_was_worth() -> None:
    environment = products(Counter, max_turns=4)
    assert [tool.name for tool in environment.properties.tools] == ["count", "answer"]
    right = begun(environment)
    steps = [environment.step(text) for text in ("count()", f"answer({right})")]
    assert steps[0][:2] == ("1", 0.0)
    said, reward, terminated, _, info = steps[1]
    assert (said, reward, terminated, info["success"]) == ("Thank you.", 1 / 3, True, False)
    begun(environment)
    answers = [environment.step(text) for text in ("count()", "count()", "what?", "count()")]
    assert [answer[1] for answer in answers] == [0.0, 0.0, 0.0, 1.0]
    assert answers[-1][2:4] == (False, True), "it has no turn left"
    assert answers[-1][4]["success"] is True


@pytest.mark.parametrize("name", ["answer", "text"])
def test_a_reward_function_is_told_the_answer_and_needs_no_methods(name: str) -> None:
    told: list[str | None] = []

    class Judge:
        if name == "answer":

            def get_reward(self, answer: str | None = "none") -> float:
                told.append(answer)
                return 0.5

        else:

            def get_reward(self, text: str | None, /) -> float:
                told.append(text)
                return 0.5

    environment = products(Judge, max_turns=2)
    assert [tool.name for tool in environment.properties.tools] == ["answer"]
    begun(environment)
    assert environment.step('answer("so and so")')[1:3] == (0.5, True)
    begun(environment)
    rewards = [environment.step("what?")[1] for _ in range(2)]
    assert (rewards, told) == ([0.0, 0.5], ["so and so", None])


@pytest.mark.parametrize("reward", [1.5, -0.1, float("nan"), None, "1"])
def test_a_reward_that_is_no_number_from_0_to_1_is_a_fault(reward: object) -> None:
    class Odd(Counter):
        def get_reward(self) -> Any:
            return reward

    environment = products(Odd)
    begun(environment)
    with pytest.raises(EnvironmentFaultError, match=r"^Odd\.get_reward\(\) returned ") as raised:
        environment.step("answer(1)")
    assert not isinstance(raised.value, EnvironmentRaisedError), "no other attempt is better"


@pytest.mark.parametrize(
    ("paid", "reward"),
    [
        (0.7 + 0.2 + 0.1, 1.0),
        (1 + 1e-7, 1.0),
        (-1e-9, 0.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(1), 1.0),
        (1 - 1e-5, 1 - 1e-5),
    ],
)
def test_a_reward_is_a_number_of_any_kind_and_may_be_rounded(paid: Any, reward: float) -> None:
    class Paying(Counter):
        def get_reward(self) -> Any:
            return paid

    environment = products(Paying)
    begun(environment)
    _, got, _, _, info = environment.step("answer(1)")
    assert (got, info["success"]) == (reward, reward == 1)


class Holding:
    """Holds what `reset` opened, and closes it."""

    made = 0

    def __init__(self) -> None:
        Holding.made += 1

    def reset(self, **row: Any) -> None:
        self.held = ["open"]

    @staticmethod
    def name() -> str:
        """Says its name."""
        return "holding"

    @classmethod
    def kind(cls) -> str:
        """Says its class."""
        return cls.__name__

    @functools.lru_cache  # noqa: B019
    def look(self, at: int) -> str:
        """Looks."""
        return f"{self.held[0]} {at}"

    def close(self) -> None:
        self.held.pop()


def test_objects_are_made_for_episodes_alone_and_closed_once_they_have_begun() -> None:
    before = Holding.made
    environment = products(Holding)
    names = [tool.name for tool in environment.properties.tools]
    assert names == ["kind", "look", "name", "answer"]
    environment.close()
    assert Holding.made == before
    begun(environment)
    said = [environment.step(call)[0] for call in ("kind()", "look(3)", "name()")]
    assert said == ["Holding", "open 3", "holding"]
    begun(environment)
    environment.close()
    assert Holding.made == before + 2


def test_an_object_that_cannot_be_closed_keeps_no_other_open() -> None:
    class Stuck:
        def look(self) -> str:
            """Looks."""
            return "x"

        def close(self) -> None:
            raise OSError("gone")

    environment = products(Desk, Stuck)
    begun(environment)
    Desk.closed.clear()
    with pytest.raises(OSError, match="gone"):
        environment.close()
    assert len(Desk.closed) == 1
    environment = products(Stuck, Desk)
    begun(environment)
    with pytest.raises(OSError, match="gone"):
        environment.close()
    assert len(Desk.closed) == 2


def test_a_call_that_an_object_refused_is_part_of_the_state() -> None:
    class Mutable(Counter):
        def count(self) -> int:
            """Counts, and refuses each first time."""
            super().count()
            if self.number == 1:
                raise ValueError("not yet")
            return self.number

    environment = products(Mutable)
    keys = []
    for text in ("count()", "what?"):
        begun(environment)
        metrics = environment.step(text)[4]["metrics"]
        assert metrics == {"num_calls": 0}
        keys.append(environment.state_key())
    assert keys[0] != keys[1]


@pytest.mark.slow
def test_a_check_asks_for_the_reward_after_calls() -> None:
    class Over(Counter):
        def get_reward(self) -> float:
            return float(self.number)

    found = check_environment(partial(products, Over))
    problem = "the text 'count()': Over.get_reward() returned 8.0; expected a number from 0 to 1"
    assert problem in str(found["any text is answered"])


def test_the_version_of_a_reward_is_that_of_who_gives_it() -> None:
    versions = {
        products(Counter, **options).properties.reward_version
        for options in ({}, {"version": "2"}, {"compare": "text"})
    }
    assert versions == {"Counter-1", "Counter-2"}
    other = type("Other", (Desk,), {})
    assert products(other).properties.version != products(Desk).properties.version
    with pytest.raises(ConfigError, match="Counter, Other have get_reward; expected one class"):
        products(Counter, type("Other", (), {"get_reward": Counter.get_reward, "go": say}))


@pytest.mark.slow
def test_a_class_that_decides_keeps_the_promises_of_every_environment() -> None:
    make = partial(products, Counter, max_turns=3)
    assert set(check_environment(make).values()) == {None}
    episodes_in_threads_are_as_one_by_one(make)


def test_a_copy_plays_as_the_environment_itself() -> None:
    environment = pickle.loads(pickle.dumps(products()))
    right = begun(environment)
    assert environment.step("multiply(2, 3)")[0] == "6"
    assert environment.step(f"answer({right})")[0] == "Right."


@pytest.mark.slow
def test_it_keeps_the_promises_of_every_environment_also_in_threads() -> None:
    assert set(check_environment(products).values()) == {None}
    episodes_in_threads_are_as_one_by_one(products)


def blocks(language: str) -> list[str]:
    section = PAGE.read_text("utf-8").split("\n## With tools\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the page's two files."""
    (tmp_path / "products.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "products.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_documented_file_keeps_the_promises_and_its_teacher_calls_at_times(
    folder: Path,
) -> None:
    make = partial(make_environment, "./products.py:make_products", PRODUCTS)
    assert set(check_environment(make).values()) == {None}
    environment = make()
    assert "teacher" in environment.scripted_policies()


@pytest.mark.slow
def test_the_documented_counter_measures_refusals_and_keeps_the_promises(folder: Path) -> None:
    (folder / "counted.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    make = partial(make_environment, "./counted.py:make_counted", PRODUCTS)
    assert set(check_environment(make).values()) == {None}
    environment = make()
    begun(environment)
    metrics = [environment.step(text)[4]["metrics"] for text in ("multiply()", "multiply(2, 3)")]
    assert metrics == [{"num_calls": 0, "num_refused": 1}, {"num_calls": 1, "num_refused": 1}]


@pytest.mark.slow
def test_the_documented_class_counts_in_one_episode_and_keeps_the_promises(folder: Path) -> None:
    (folder / "sums.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    make = partial(make_environment, "./sums.py:make_sums", {"num_test_tasks": 10})
    assert set(check_environment(make).values()) == {None}
    environment = make()
    for _ in range(2):
        begun(environment)
        assert [environment.step(text)[0] for text in ("move(7)", "move(-3)")] == ["7", "4"]


def test_the_documented_reward_function_pays_what_answers_share(folder: Path) -> None:
    (folder / "own.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    environment = make_environment("./own.py:make_overlap", PRODUCTS)
    right = begun(environment)
    assert environment.step(f'answer("{right} or so")')[1] == pytest.approx(1 / 3)
    begun(environment)
    assert environment.step(f"answer({right})")[4]["success"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("num_wrong", "reward"), [(0, 1.0), (1, 0.5), (2, 0.0)])
def test_the_documented_attempts_earn_less_the_second_time(
    num_wrong: int, reward: float, folder: Path
) -> None:
    (folder / "own.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    make = partial(make_environment, "./own.py:make_attempts", PRODUCTS)
    if num_wrong == 0:
        assert set(check_environment(make).values()) == {None}
    environment = make()
    right = begun(environment)
    said = [environment.step('attempt("0")')[0] for _ in range(num_wrong)]
    said.append(environment.step(f'attempt("{right}")')[0])
    assert said[:2] == ["wrong"] * num_wrong + ["right"] * (num_wrong < 2)
    *_, info = answer = environment.step("answer(done)")
    assert (answer[1], info["success"]) == (reward, reward == 1)


@pytest.mark.slow
def test_the_documented_calculator_refuses_what_it_cannot_compute(folder: Path) -> None:
    (folder / "own.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    make = partial(make_environment, "./own.py:make_calculator", PRODUCTS)
    assert set(check_environment(make).values()) == {None}
    environment = make()
    asked = re.findall(r"^(calculate\(.*\)) {3,}(.*)$", PAGE.read_text("utf-8"), re.M)
    assert len(asked) == 3
    odd = ["1e308 * 10 / 1e-308", "9" * 400 + " / 3", "(" * 900, "-" * 9000 + "1", "2 ** 9", "x"]
    for text, said in [*asked, *((f'calculate("{each}")', "") for each in odd)]:
        begun(environment)
        assert environment.step(text)[0].startswith(said)


@pytest.mark.slow
def test_the_documented_interpreter_ends_programs_and_keeps_the_promises(folder: Path) -> None:
    written = "\n\n".join(blocks("python"))
    assert written.count("SECONDS = 5") == 1
    hurried = written.replace("SECONDS = 5", "SECONDS = 2")
    (folder / "programs.py").write_text(hurried, encoding="utf-8")
    make = partial(make_environment, "./programs.py:make_programs", PRODUCTS)
    assert set(check_environment(make).values()) == {None}
    environment = make()
    begun(environment)
    asked = re.findall(r"^(run_python\(.*\)) {3,}(.*)$", PAGE.read_text("utf-8"), re.M)
    assert len(asked) == 3
    for text, said in asked:
        observation = environment.step(text)[0].strip()
        assert observation == said.replace("5 seconds", "2 seconds")
    for greedy in ("x = bytearray(2**31)", "while True: print(10**1000)"):
        observation, *_, info = environment.step(f'run_python("{greedy}")')
        assert info["invalid_action"]
        assert "seconds" not in observation


@pytest.mark.slow
def test_the_documented_configuration_trains(folder: Path) -> None:
    run = factories.shipped_run(
        folder / "products.yaml",
        folder / "run",
        "--warm_start.copy.max_steps=2",
        "--warm_start.demonstrations.num_steps=2",
    )
    rows = read_json_lines(run.metrics)
    assert [row["num_episodes"] for row in rows] == [4, 4]
    assert all("environment/num_calls" in row for row in rows)
