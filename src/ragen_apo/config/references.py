"""Names of environments and algorithms that say where the code is: `path.py:name`, `module:name`.

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
    return Path(os.path.abspath(os.path.expanduser(path))) if path.endswith(".py") else None


def with_absolute_path(name: str) -> str:
    """`path.py:function` with the absolute path; any other name as it is."""
    file = file_of(name)
    return name if file is None else f"{file}{name.rpartition('.py')[2]}"


def with_absolute_paths(section: Any) -> Any:
    """A section with absolute paths in its name, and in those of a mixture's parts."""
    if not isinstance(section, Mapping):
        return section
    values = dict(section)
    if isinstance(name := values.get(NAME), str):
        values[NAME] = with_absolute_path(name)
    if isinstance(parts := values.get(PARTS), Mapping):
        values[PARTS] = {label: with_absolute_paths(part) for label, part in parts.items()}
    return values


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


def asks_for_trust(sections: Mapping[str, Any]) -> bool:
    """Whether a run with this configuration does what whoever did not write it has to trust: run
    code that it names, or send a key to servers that it names.
    """
    environment, algorithm, policy, rollouts = (
        section if isinstance(section := sections.get(name), Mapping) else {}
        for name in ("environment", "algorithm", "policy", "rollouts")
    )
    names_code = bool(code_named_by(str(environment.get(NAME)), environment)) or is_reference(
        str(algorithm.get(NAME))
    )
    return names_code or policy.get("trust_remote_code") is True or sends_key(rollouts)


TRUST = (
    "a run may come from somebody else. Read it; if you trust it, give --trust-remote-code (in "
    "Python: trust_remote_code=True)"
)
"""What messages say of code, or a key, that a run names."""


def sends_key(rollouts: Mapping[str, Any]) -> bool:
    """Whether servers get a key, by the section `rollouts`."""
    return rollouts.get("engine") == "vllm" and rollouts.get("api_key_env") is not None


def environment_of_part(label: Any, name: Any) -> Any:
    """What a part of a mixture plays: its name, or where it has none, what it is labelled."""
    return name or label
