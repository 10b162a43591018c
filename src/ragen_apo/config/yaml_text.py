"""YAML as configurations use it: duplicate keys are found, and `1e-4` is a number.

PyYAML follows YAML 1.1, where a float needs a point and a sign in its exponent. The loader and the
dumper here share one more rule for floats. So what is dumped loads back to equal values.

Aliases and merge keys are refused, because with them a few lines can become gigabytes. So are texts
that are longer or deeper than any configuration.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from ragen_apo.config.messages import shown

MAX_LENGTH: Final = 1 << 18
"""Of a text in characters, of a file in bytes; the longest that is shipped has 4,000."""
MAX_DEPTH: Final = 50
MAX_NUMBER_CHARACTERS: Final = 100
"""Reading a number takes time with the square of its length."""

_FLOAT_WITHOUT_POINT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_TOO_LONG: Final = f"is too long, expected {MAX_LENGTH:,} bytes at most"
_TAGS = "tag:yaml.org,2002:"
_FLOAT_TAG, _INT_TAG, _MERGE_TAG = f"{_TAGS}float", f"{_TAGS}int", f"{_TAGS}merge"


class _RefusedError(yaml.MarkedYAMLError):
    """Good YAML that no configuration needs."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(
                f"the alias *{event.anchor} repeats another place, which is not supported; write "
                "out what it stands for",
                event.start_mark,
            )
        if self._depth == MAX_DEPTH:
            raise _RefusedError(f"nested more than {MAX_DEPTH} deep", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML's constructors raise whatever Python does with `!!bool foo` or `2020-99-99`."""
        if node.tag in (_INT_TAG, _FLOAT_TAG) and len(node.value) > MAX_NUMBER_CHARACTERS:
            raise _RefusedError(
                f"a number of more than {MAX_NUMBER_CHARACTERS} characters", node.start_mark
            )
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, str):
                value.encode()  # half a surrogate pair could not be written back
        except yaml.YAMLError:
            raise
        except Exception as error:
            what = shown(node.value) if isinstance(node, yaml.ScalarNode) else "a collection"
            why = f" ({error})" if isinstance(error, ValueError) else ""
            problem = f"{what} cannot be read as {node.tag.replace(_TAGS, '!!')}{why}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key, line = key_node.value, key_node.start_mark.line + 1
            if key_node.tag == _MERGE_TAG:
                raise _RefusedError(
                    "the merge key << is not supported; write out the keys that it stands for",
                    key_node.start_mark,
                )
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key in lines:
                self.duplicates.append(
                    f"line {line}: the key {key} is already set in line {lines[key]}; remove one"
                )
            lines.setdefault(key, line)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Writes out what stands in two places: aliases are not read."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """PyYAML folds these line breaks into spaces unless the text is in double quotes."""
        quoted = any(character in data for character in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if quoted else None)


_Dumper.add_representer(str, _Dumper.represent_str)


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITHOUT_POINT, list("-+0123456789"))


def read_yaml(path: Path) -> str:
    """The text of a YAML file; raises OSError, or ValueError for one that is too long or no text.

    What has no end, such as a device, is read no further than `parse_yaml` accepts.
    """
    with path.open("rb") as stream:
        content = stream.read(MAX_LENGTH + 1)
    if len(content) > MAX_LENGTH:
        raise ValueError(_TOO_LONG)
    return content.decode("utf-8")


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML document and one sentence for each duplicate key.

    Raises ValueError that says of the text what it is, with line and column where known: `is not
    YAML: line 1, column 4: ...`.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(_TOO_LONG)
    try:
        loader = _Loader(text)
        return loader.get_single_data(), loader.duplicates
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = " ".join(part for part in (error.context, error.problem) if part)
        verdict = "cannot be used" if isinstance(error, _RefusedError) else "is not YAML"
        raise ValueError(f"{verdict}: {where}{reason}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two are what Python says to escapes such as "\UFFFFFFFF".
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error


def dump_yaml(value: Any) -> str:
    """YAML text, keys in the order given, that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
