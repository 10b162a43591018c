"""Names of environments that say where the code is: `path.py:function` and `module:function`.

A configuration holds files by their absolute path, so that a run can be resumed from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME, PARTS = "name", "parts"
"""Keys of a mixture (`environments.mixture`)."""


def is_reference(name: str) -> bool:
    """Whether a name says where the code is; other names are looked up."""
    return ":" in name or name.endswith(".py")


def file_of(name: str) -> Path | None:
    """The file of `path.py:function`, made absolute from the current directory; else None."""
    path = name if name.endswith(".py") else name.rpartition(":")[0]
    return Path(os.path.expanduser(path)).absolute() if path.endswith(".py") else None


def with_absolute_path(name: str) -> str:
    """`path.py:function` with the absolute path; any other name as it is."""
    file = file_of(name)
    return name if file is None else f"{file}{name.rpartition('.py')[2]}"


def with_absolute_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an environment with absolute paths in the names of a mixture's parts."""
    parts = options.get(PARTS)
    if not isinstance(parts, Mapping):
        return dict(options)
    return {**options, PARTS: {label: _absolute_part(part) for label, part in parts.items()}}


def _absolute_part(part: Any) -> Any:
    if not (isinstance(part, Mapping) and isinstance(part.get(NAME), str)):
        return part
    return {**part, NAME: with_absolute_path(part[NAME])}


def names_of(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """The name of an environment, and those of its parts where it is a mixture."""
    yield name
    parts = options.get(PARTS)
    if isinstance(parts, Mapping):
        for label, part in parts.items():
            given = part.get(NAME) if isinstance(part, Mapping) else None
            yield str(environment_of_part(label, given))


def code_named_by(name: str, options: Mapping[str, Any]) -> list[str]:
    """The names among these that say where code is: whoever did not write them has to trust it."""
    return [each for each in names_of(name, options) if is_reference(each)]


def environment_of_part(label: Any, name: Any) -> Any:
    """What a part of a mixture plays: its name, or where it has none, what it is labelled."""
    return name or label
