"""Actions as tools: a call and its action text stand for each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.contract import first_split, play
from ragen_apo.environments.tools import Tool, call_of, tool_of

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
CLICK = Tool("click", "Follow a link.", "click[{target}]", {"target": STRING})
PUT = Tool("put", "Put a thing.", "put {thing} on {place}", {"thing": STRING, "place": INTEGER})
MOVE = Tool(
    "move",
    "Move.",
    "{steps}",
    {"steps": {"type": "array", "items": {"type": "string", "enum": ["Up", "Down"]}}},
    separator=" || ",
)


@pytest.mark.parametrize(
    ("tool", "arguments", "action"),
    [
        (CLICK, {"target": "buy now"}, "click[buy now]"),
        (CLICK, {"target": "a]\nb{c}"}, "click[a]\nb{c}]"),
        (PUT, {"thing": "a cup on 2", "place": -3}, "put a cup on 2 on -3"),
        (MOVE, {"steps": ["Up", "Down"]}, "Up || Down"),
        (Tool("look", "Look.", "look", {}), {}, "look"),
        (Tool("wait", "Wait.", "wait {time} s", {"time": NUMBER}), {"time": 2.5}, "wait 2.5 s"),
        (Tool("wait", "Wait.", "wait {time} s", {"time": NUMBER}), {"time": 2}, "wait 2 s"),
    ],
)
def test_a_call_stands_for_its_action_and_back(
    tool: Tool, arguments: dict[str, Any], action: str
) -> None:
    assert tool.action_of(arguments) == action
    assert tool.arguments_of(action) == arguments


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (CLICK, {}),
        (CLICK, {"target": "a", "speed": "b"}),
        (CLICK, {"goal": "a"}),
        (CLICK, {"target": 3}),
        (CLICK, {"target": None}),
        (CLICK, {"target": "\ud800"}),
        (PUT, {"thing": "cup", "place": "3"}),
        (PUT, {"thing": "cup", "place": True}),
        (PUT, {"thing": "cup", "place": 3.0}),
        (MOVE, {"steps": "Up"}),
        (MOVE, {"steps": ["Up", "Left"]}),
        (MOVE, {"steps": [["Up"]]}),
    ],
)
def test_arguments_that_do_not_fit_make_no_action(tool: Tool, arguments: dict[str, Any]) -> None:
    assert tool.action_of(arguments) is None


@pytest.mark.parametrize("action", ["", "click", "click[]", "click[a", "search[a]", " click[a]"])
def test_another_text_is_no_call(action: str) -> None:
    assert CLICK.arguments_of(action) is None
    assert call_of([CLICK, PUT], action) is None


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_every_text_survives_as_an_argument(text: str) -> None:
    action = CLICK.action_of({"target": text})
    assert action is not None
    assert CLICK.arguments_of(action) == {"target": text}


def test_the_schema_and_the_signature_are_what_a_model_reads() -> None:
    assert CLICK.schema == {
        "type": "function",
        "function": {
            "name": "click",
            "description": "Follow a link.",
            "parameters": {
                "type": "object",
                "properties": {"target": {"type": "string"}},
                "required": ["target"],
            },
        },
    }
    assert MOVE.signature == "move(steps: list of Up | Down)"
    assert PUT.signature == "put(thing: string, place: integer)"


@pytest.mark.parametrize(
    ("action", "parameters", "problem"),
    [
        ("go {where}", {}, r"each of its parameters \(none\)"),
        ("go", {"where": STRING}, r"each of its parameters \(where\)"),
        ("{a} {a}", {"a": STRING}, "once in braces"),
        ("go {where}", {"where": {"type": "object"}}, "the type of 'where' is 'object'"),
        ("go {where}", {"where": {"type": "array"}}, "the type of 'where' is None"),
        ("go {where}", {"where": {}}, "the type of 'where' is None"),
    ],
)
def test_a_tool_that_could_not_be_written_is_refused(
    action: str, parameters: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        Tool("go", "Go.", action, parameters)
    with pytest.raises(ValueError, match="no name of a function"):
        Tool("go there", "Go.", "go", {})


WITH_TOOLS = [
    ("shop", {"num_products": 24}),
    ("webshop", {"data": "generated:200", "observation": "compact"}),
    ("webshop", {"data": "generated:200", "observation": "text"}),
    ("bandit", {}),
    ("bandit", {"kind": "bernoulli"}),
    ("bandit", {"kind": "bernoulli", "max_actions_per_turn": 3}),
    ("countdown", {}),
    ("sokoban", {}),
    ("sokoban", {"max_actions_per_turn": 1}),
    ("frozen_lake", {}),
]


@pytest.mark.parametrize(("name", "options"), WITH_TOOLS)
def test_whatever_a_scripted_policy_does_is_a_call_of_a_tool(
    name: str, options: dict[str, Any]
) -> None:
    environment = make_environment(name, options)
    called = set()
    for task in environment.tasks(first_split(environment))[:3]:
        for make_policy in environment.scripted_policies().values():
            for step in play(environment, task, make_policy()).steps:
                found = call_of(environment.properties.tools, step.reply.action)
                assert found is not None, step.reply.action
                assert found[0].action_of(found[1]) == step.reply.action
                called.add(found[0].name)
    rare = {"click"} if name == "shop" else set()
    assert called | rare == {tool.name for tool in environment.properties.tools}


def search(
    words: Annotated[str, "what to look for"],
    sites: list[str],
    number: int = 3,
    order: Literal["old", "new"] = "new",
) -> str:
    """Search
    the web.

    Not for the model.
    """
    return f"{words}{sites}{number}{order}"


def test_a_function_is_a_tool_with_its_docstring_and_types() -> None:
    assert tool_of(search).schema["function"] == {
        "name": "search",
        "description": "Search the web.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "what to look for"},
                "sites": {"type": "array", "items": {"type": "string"}},
                "number": {"type": "integer"},
                "order": {"type": "string", "enum": ["old", "new"]},
            },
            "required": ["words", "sites", "number", "order"],
        },
    }


@given(st.text(st.characters(codec="utf-8")), st.lists(st.text(max_size=9)), st.integers())
def test_a_call_of_a_function_stands_for_its_arguments_whatever_they_are(
    words: str, sites: list[str], number: int
) -> None:
    tool = tool_of(search)
    arguments = {"words": words, "sites": sites, "number": number, "order": "old"}
    action = tool.action_of(arguments)
    if any("\ud800" <= letter <= "\udfff" for site in sites for letter in site):
        assert action is None
    else:
        assert action is not None
        assert tool.arguments_of(action) == arguments


@pytest.mark.parametrize(
    "annotation",
    [dict, list, list[list[str]], str | None, Literal["a", 1], Literal[True, 1], [int]],
)
def test_a_parameter_of_another_type_is_refused_by_name(annotation: Any) -> None:
    def odd(thing: Any) -> None:
        """Odd."""

    odd.__annotations__["thing"] = annotation
    with pytest.raises(ValueError, match="odd: the parameter 'thing' has the type .*expected str"):
        tool_of(odd)


def test_a_truth_value_is_written_as_in_json_and_read_as_in_python_too() -> None:
    def sort(word: str, upwards: bool, others: list[bool]) -> None:
        """Sort."""

    tool = tool_of(sort)
    assert tool.parameters["upwards"] == {"type": "boolean"}
    arguments = {"word": 'as "True" as True', "upwards": True, "others": [False, True]}
    action = tool.action_of(arguments)
    assert action == r'sort("as \"True\" as True", true, [false, true])'
    assert tool.arguments_of(action) == arguments
    assert tool.arguments_of(action.replace("true,", "True,")) == arguments
    for other in ('"true"', "1", "null"):
        assert tool.arguments_of(f'sort("a", {other}, [])') is None
    plain = Tool("sort", "Sort.", "sort[{upwards}]", {"upwards": {"type": "boolean"}})
    assert plain.action_of({"upwards": True}) == "sort[true]"
    assert plain.arguments_of("sort[true]") == {"upwards": True}
    assert plain.arguments_of("sort[1]") is None


def test_a_function_that_no_call_could_reach_is_refused_with_the_reason() -> None:
    def several(*things: str) -> None:
        """Any number of them."""

    def by_place(thing: str, /) -> None:
        """By its place."""

    async def later(thing: str) -> None:
        """Some time."""

    def piece_by_piece(thing: str) -> Iterator[str]:
        """Yields."""
        yield thing

    def untyped(thing) -> None:
        """Anything."""

    def unknown(thing: Nowhere) -> None:  # noqa: F821  # pyright: ignore
        """Its type is imported for the checker only."""

    for function, words in (
        (several, "several: the parameter 'things' is variadic positional; expected one that"),
        (by_place, "by_place: the parameter 'thing' is positional-only; expected one that"),
        (later, "later is asynchronous or a generator"),
        (piece_by_piece, "piece_by_piece is asynchronous or a generator"),
        (untyped, "untyped: the parameter 'thing' has no type; expected str, int, float, bool, "),
        (unknown, "unknown: its parameters or their types cannot be read .*'Nowhere' is not def"),
        (partial(search, "red"), "got functools.partial.*; expected functions that `def` has made"),
    ):
        with pytest.raises(ValueError, match=words):
            tool_of(function)


def test_a_function_that_keeps_its_results_is_a_tool() -> None:
    assert tool_of(lru_cache(search)).schema == tool_of(search).schema


def test_a_number_may_have_decimals_and_is_finite() -> None:
    def half(number: float) -> float:
        """Half of a number."""
        return number / 2

    tool = tool_of(half)
    assert tool.signature == "half(number: number)"
    for number, action in (
        (2.5, "half(2.5)"),
        (-3, "half(-3)"),
        (1e30, "half(1e+30)"),
        (10**400, f"half({10**400})"),
    ):
        assert tool.action_of({"number": number}) == action
        assert tool.arguments_of(action) == {"number": number}
    for text in ("half(NaN)", "half(1e999)", "half(-Infinity)", "half(true)", 'half("2")'):
        assert tool.arguments_of(text) is None


def test_the_section_args_of_a_docstring_describes_parameters() -> None:
    def find(name: str, year: Annotated[int, "of the census"], order: str, rest: str) -> str:
        """Find a
        country.
        Args:
            name (str): The country's name,
                such as "Peru": in English.
            year: Not this.
            order: How
              to sort.

            rest: Behind an empty line: no more of it.

        Returns:
            name: The country.
        """
        return name

    assert tool_of(find).description == "Find a country."
    parameters = tool_of(find).parameters
    assert {name: schema.get("description") for name, schema in parameters.items()} == {
        "name": 'The country\'s name, such as "Peru": in English.',
        "year": "of the census",
        "order": "How to sort.",
        "rest": None,
    }
