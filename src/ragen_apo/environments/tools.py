"""An environment's actions as tools: functions that a model calls by name, with arguments.

A `Tool` is the JSON schema that the model reads, and the action text that a call stands for:

    Tool("click", "Follow a link.", "click[{target}]", {"target": {"type": "string"}})
    click(target="buy now")   <->   click[buy now]

So an environment executes and records texts, whoever writes them.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SLOT = re.compile(r"\{(\w+)\}")
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
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
    """The JSON schema of each parameter; all are required. Its `type` is `string` or `integer`,
    perhaps with an `enum`, or `array` with the schema of its `items`."""
    separator: str = ", "
    """Stands between the items of an array in the action text."""

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
            if kind not in ("string", "integer"):
                raise ValueError(
                    f"tool {self.name!r}: the type of {name!r} is {kind!r}; expected string or "
                    "integer, or array of these"
                )

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
        return self.separator.join(map(str, value)) if isinstance(value, list) else str(value)

    def _value(self, text: str, schema: Mapping[str, Any]) -> Any:
        if _is_list(schema):
            return [self._value(part, schema["items"]) for part in text.split(self.separator)]
        is_number = schema["type"] == "integer" and _INTEGER.fullmatch(text)
        return int(text) if is_number else text


def call_of(tools: Sequence[Tool], action: str) -> tuple[Tool, dict[str, Any]] | None:
    """The first tool that writes this action text, and the arguments; None if none does."""
    for tool in tools:
        arguments = tool.arguments_of(action)
        if arguments is not None:
            return tool, arguments
    return None


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
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
    return fits and value in schema.get("enum", (value,))


def _in_words(schema: Mapping[str, Any]) -> str:
    if _is_list(schema):
        return f"list of {_in_words(schema['items'])}"
    return " | ".join(map(str, schema["enum"])) if "enum" in schema else schema["type"]
