"""Actions as tools: a call and its action text stand for each other."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.contract import first_split, play
from ragen_apo.environments.tools import Tool, call_of, tool_of

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
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
    [float, dict, list, list[list[str]], str | None, Literal["a", 1], Literal[True], [int]],
)
def test_a_parameter_of_another_type_is_refused_by_name(annotation: Any) -> None:
    def odd(thing: Any) -> None:
        """Odd."""

    odd.__annotations__["thing"] = annotation
    with pytest.raises(ValueError, match="odd: the parameter 'thing' has the type .*expected str"):
        tool_of(odd)


class Adds:
    """Adds."""

    def __call__(self, number: int) -> int:
        return number + 1


def test_what_no_call_could_reach_is_refused() -> None:
    def all_of(*numbers: int) -> int:
        """A sum."""
        return sum(numbers)

    def named(**numbers: int) -> int:
        """A sum."""
        return sum(numbers.values())

    def placed(number: int, /) -> int:
        """Itself."""
        return number

    async def later(number: int) -> int:
        """Itself, later."""
        return number

    def each(number: int) -> Iterator[int]:
        """Several."""
        yield number

    def unknown(number: "Decimal") -> int:  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        """Of a type that is imported for type checkers alone."""
        return int(number)

    by_name = "cannot be given by name; expected none with '\\*' or before '/'"
    for function, words in (
        (all_of, f"all_of: the parameter 'numbers' {by_name}"),
        (named, f"named: the parameter 'numbers' {by_name}"),
        (placed, f"placed: the parameter 'number' {by_name}"),
        (later, "later is async or a generator"),
        (each, "each is async or a generator"),
        (unknown, "unknown: its parameters or their types cannot be read .*'Decimal' is not def"),
        (partial(search, "mug"), "partial.* has no name; expected a function that `def` defines"),
        (Adds(), "Adds object.* has no name"),
        (int, "int: its parameters or their types cannot be read"),
    ):
        with pytest.raises(ValueError, match=words):
            tool_of(function)
