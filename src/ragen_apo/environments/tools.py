"""An environment's actions as tools: functions that a model calls by name, with arguments.

A `Tool` is the JSON schema that the model reads, and the action text that a call stands for:

    Tool("click", "Follow a link.", "click[{target}]", {"target": {"type": "string"}})
    click(target="buy now")   <->   click[buy now]

So an environment executes and records texts, whoever writes them.
"""

import contextlib
import functools
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ragen_apo.files import parse_json
from ragen_apo.printable import exception_in_words

Arguments = Mapping[str, Any]

_TYPES: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SLOT = re.compile(r"\{(\w+)\}")
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_TEXT_OR_TRUTH = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:True|False)\b')
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Tool:
    """An action that a model may call. Raises ValueError for one that could not be written."""

    name: str
    description: str
    """What a call does, for the model."""
    action: str
    """The action text of a call, with each parameter once in braces: `click[{target}]`."""
    parameters: Mapping[str, Mapping[str, Any]]
    """The JSON schema of each parameter; all are required. Its `type` is `string`,
    `integer`, `number` or `boolean`, perhaps with an `enum`, or `array` with the
    schema of its `items`."""
    separator: str = ", "
    """Stands between the items of an array in the action text."""
    is_joinable: bool = False
    """Several calls of such tools may be one action. Their texts, which have no line breaks, stand
    in lines of their own."""
    is_message: bool = False
    """A response without a call is one of this tool, and its text is the one parameter, a string.
    No model is shown such a tool, and an environment has one at most."""

    def __post_init__(self) -> None:
        for name in (self.name, *self.parameters):
            if not _NAME.fullmatch(name):
                raise ValueError(f"tool {self.name!r}: {name!r} is no name of a function")
        if sorted(_SLOT.findall(self.action)) != sorted(self.parameters):
            raise ValueError(
                f"tool {self.name!r}: the action {self.action!r} must hold each of its parameters "
                f"({', '.join(self.parameters) or 'none'}) once in braces"
            )
        for name, schema in self.parameters.items():
            kind = (
                (schema.get("items") or {}).get("type") if _is_list(schema) else schema.get("type")
            )
            if kind not in _TYPES.values():
                raise ValueError(
                    f"tool {self.name!r}: the type of {name!r} is {kind!r}; expected string, "
                    "integer, number or boolean, or array of these"
                )
        if self.is_message and [each["type"] for each in self.parameters.values()] != ["string"]:
            raise ValueError(f"tool {self.name!r}: a message has one parameter of the type string")

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's chat completions take it."""
        parameters = {
            "type": "object",
            "properties": {name: dict(schema) for name, schema in self.parameters.items()},
            "required": list(self.parameters),
        }
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}

    @property
    def signature(self) -> str:
        """The call in a few words: `move(direction: Up | Down)`."""
        words = (f"{name}: {_in_words(schema)}" for name, schema in self.parameters.items())
        return f"{self.name}({', '.join(words)})"

    def action_of(self, arguments: Arguments) -> str | None:
        """The action text of a call; None if an argument is missing, unknown or does not fit."""
        if arguments.keys() != self.parameters.keys():
            return None
        if not all(_fits(arguments[name], schema) for name, schema in self.parameters.items()):
            return None
        return _SLOT.sub(lambda slot: self._text(arguments[slot[1]]), self.action)

    def arguments_of(self, action: str) -> dict[str, Any] | None:
        """The arguments of the call that stands for this action text, if there is one."""
        found = _pattern(self.action).fullmatch(action)
        if found is None:
            return None
        arguments = {
            name: self._value(found[name], schema) for name, schema in self.parameters.items()
        }
        return arguments if self.action_of(arguments) == action else None

    def _text(self, value: Any) -> str:
        if isinstance(value, list):
            return self.separator.join(map(self._text, value))
        return json.dumps(value) if isinstance(value, bool) else str(value)

    def _value(self, text: str, schema: Mapping[str, Any]) -> Any:
        if _is_list(schema):
            return [self._value(part, schema["items"]) for part in text.split(self.separator)]
        if schema["type"] == "boolean":
            return {"true": True, "false": False}.get(text, text)
        if schema["type"] != "string" and _INTEGER.fullmatch(text):
            return int(text)
        if schema["type"] == "number":
            with contextlib.suppress(ValueError):
                return float(text)
        return text


class FunctionTool(Tool):
    """A Python function. A call is written as in Python: `search("red mug", 3)`.

    Truth values are `true` and `false`, and may also be written as Python's.
    """

    def action_of(self, arguments: Arguments) -> str | None:
        if super().action_of(arguments) is None:
            return None
        written = (json.dumps(arguments[name], ensure_ascii=False) for name in self.parameters)
        return f"{self.name}({', '.join(written)})"

    def arguments_of(self, action: str) -> dict[str, Any] | None:
        if not (action.startswith(f"{self.name}(") and action.endswith(")")):
            return None
        try:
            values = parse_json(f"[{_as_json(action[len(self.name) + 1 : -1])}]")
        except ValueError:
            return None
        if not isinstance(values, list) or len(values) != len(self.parameters):
            return None
        arguments = dict(zip(self.parameters, values, strict=True))
        return None if super().action_of(arguments) is None else arguments


def _as_json(arguments: str) -> str:
    """With `true` and `false` for Python's truth values, but for those inside of texts."""
    truths = {"True": "true", "False": "false"}
    return _TEXT_OR_TRUTH.sub(lambda found: truths.get(found[0], found[0]), arguments)


def tool_of(function: Callable[..., Any]) -> FunctionTool:
    """The tool that a Python function is.

    Its description is the first paragraph of the docstring. Parameters are of the types `str`,
    `int`, `float`, `bool`, `Literal` of one of these, or `list` of these; `Annotated[int,
    "a year"]` or the section `Args:` of the docstring describes one. All are required, also where
    the function has a default. Raises ValueError, with the reason, for a function that the
    model could not call.
    """
    name = getattr(function, "__name__", None)
    if name is None:
        raise ValueError(f"got {function!r:.80}; expected functions that `def` has made")
    docstring = inspect.getdoc(function) or ""
    description = " ".join(re.split(r"\n\n|\nArgs:\n", docstring)[0].split())
    if not description:
        raise ValueError(
            f"{name} has no docstring; expected one, which tells the model what it does"
        )
    if any(is_other(function) for is_other in _RETURNS_NO_RESULT):
        raise ValueError(
            f"{name} is asynchronous or a generator; expected a function that returns its result"
        )
    parameters = _parameters_of(function, name=name, described=_described(docstring))
    slots = ", ".join(f"{{{parameter}}}" for parameter in parameters)
    return FunctionTool(name, description, f"{name}({slots})", parameters)


def _parameters_of(
    function: Callable[..., Any], *, name: str, described: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The JSON schema of each parameter, with what the docstring says of it."""
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: its parameters or their types cannot be read ({exception_in_words(error)})"
        ) from error
    parameters: dict[str, dict[str, Any]] = {}
    for parameter in signature.parameters.values():
        where = f"{name}: the parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = parameter.kind.description
            raise ValueError(f"{where} is {kind}; expected one that is passed by its name")
        if parameter.name not in hints:
            raise ValueError(f"{where} has no type; expected {_EXPECTED_TYPE}")
        words = described.get(parameter.name)
        parameters[parameter.name] = {
            **({"description": words} if words else {}),
            **_schema_of(hints[parameter.name], where=where),
        }
    return parameters


_EXPECTED_TYPE = "str, int, float, bool, Literal of one of these, or list of these"
_RETURNS_NO_RESULT = (
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    inspect.isgeneratorfunction,
)


def _described(docstring: str) -> dict[str, str]:
    """What the section `Args:` of a docstring says of parameters, each in one line."""
    section = re.search(r"^Args:\n((?:[ \t]+.*(?:\n|$))+)", docstring, re.MULTILINE)
    if section is None:
        return {}
    lines = textwrap.dedent(section[1])
    entries = re.findall(r"^(\w+)[^:\n]*:(.*(?:\n[ \t]+.*)*)", lines, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def _schema_of(hint: object, *, where: str) -> dict[str, Any]:
    """The JSON schema of a parameter's type."""
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        words = {"description": of[1]} if isinstance(of[1], str) else {}
        return {**_schema_of(of[0], where=where), **words}
    if origin is list and of and get_origin(of[0]) is not list:
        return {"type": "array", "items": _schema_of(of[0], where=where)}
    kinds = list({type(value) for value in of}) if origin is Literal else [hint]
    kind = kinds[0] if len(kinds) == 1 else None
    if kind not in list(_TYPES):  # a list, which has no hash, may stand for list[...]
        raise ValueError(
            f"{where} has the type {getattr(hint, '__name__', hint)!s}; expected {_EXPECTED_TYPE}"
        )
    return {"type": _TYPES[kind], **({"enum": list(of)} if origin is Literal else {})}


def called(tools: Sequence[Tool]) -> list[Tool]:
    """Those that a model is shown, to call."""
    return [tool for tool in tools if not tool.is_message]


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """What a model is shown of them."""
    return [tool.schema for tool in called(tools)]


def message_of(tools: Sequence[Tool]) -> Tool | None:
    """The one that a response without a call stands for, if there is one."""
    return next((tool for tool in tools if tool.is_message), None)


def call_of(tools: Sequence[Tool], action: str) -> tuple[Tool, dict[str, Any]] | None:
    """The first tool that writes this action text, and the arguments; None if none does."""
    for tool in tools:
        arguments = tool.arguments_of(action)
        if arguments is not None:
            return tool, arguments
    return None


def calls_of(tools: Sequence[Tool], action: str) -> list[tuple[Tool, dict[str, Any]]]:
    """The calls that this action text stands for, in their order; none if no tool writes it.

    Several lines that are calls each are no text of one call, unless no tool is joinable.
    """
    joinable = [tool for tool in tools if tool.is_joinable]
    lines = [line.strip() for line in action.split("\n") if line.strip()]
    if joinable and len(lines) > 1 and all(call_of(tools, line) for line in lines):
        calls = [call_of(joinable, line) for line in lines]
        return [call for call in calls if call] if all(calls) else []
    found = call_of(tools, action)
    return [] if found is None else [found]


def _is_list(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "array"


@functools.lru_cache(maxsize=256)
def _pattern(action: str) -> re.Pattern[str]:
    """The action text as a pattern with a group for each parameter."""
    parts = _SLOT.split(action)
    texts, names = parts[::2], [*parts[1::2], ""]
    groups = (f"(?P<{name}>.+)" if name else "" for name in names)
    return re.compile(
        "".join(re.escape(text) + group for text, group in zip(texts, groups, strict=True)),
        re.DOTALL,
    )


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if _is_list(schema):
        return isinstance(value, list) and all(_fits(item, schema["items"]) for item in value)
    if schema["type"] == "string":
        fits = isinstance(value, str) and not _SURROGATE.search(value)
    elif schema["type"] == "boolean":
        fits = isinstance(value, bool)
    else:
        numbers = (int, float) if schema["type"] == "number" else int
        fits = isinstance(value, numbers) and not isinstance(value, bool) and abs(value) < math.inf
    return fits and value in schema.get("enum", (value,))


def _in_words(schema: Mapping[str, Any]) -> str:
    if _is_list(schema):
        return f"list of {_in_words(schema['items'])}"
    return " | ".join(map(str, schema["enum"])) if "enum" in schema else schema["type"]
