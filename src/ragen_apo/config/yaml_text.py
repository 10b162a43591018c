"""YAML as configurations use it: duplicate keys are found, and `1e-4` is a number.

PyYAML follows YAML 1.1, where a float needs a point and a sign in its exponent; the loader and the
dumper here share one more rule for floats, so that what is dumped loads back to equal values.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_FLOAT_WITHOUT_POINT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_FLOAT_TAG = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key in lines:
                self.duplicates.append(
                    f"line {line}: the key {key} is already set in line {lines[key]}; remove one"
                )
            lines.setdefault(key, line)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """PyYAML folds these line breaks into spaces unless the text is in double quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        quoted = any(character in data for character in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if quoted else None)


_Dumper.add_representer(str, _Dumper.represent_str)


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITHOUT_POINT, list("-+0123456789"))


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML document and one sentence for each duplicate key.

    Raises ValueError, with line and column where known, for text that is not YAML.
    """
    try:
        loader = _Loader(text)
        return loader.get_single_data(), loader.duplicates
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{place}{reason}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def dump_yaml(value: Any) -> str:
    """YAML text, keys in the order given, that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
