"""Overrides from the command line, `--values.beta1 0.1` or `--seed=3`, as nested mappings.

The result is laid over the YAML file's mapping before anything is validated, so that an override is
checked by the same rules as a line of the file. `differences` tells two nested mappings apart.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ragen_apo.config.messages import Key, shown, suggestion
from ragen_apo.config.section import NAMED_SECTIONS, as_section
from ragen_apo.config.yaml_text import MAX_DEPTH, parse_yaml
from ragen_apo.errors import ConfigError

OPEN = ("environment.", "agent.template_options.")
"""Where the names of keys are somebody else's."""
LABELLED = "environment.parts"
"""Where they are free labels."""
FLAGS = ("--no-evaluate", "--resume", "--trust-remote-code")
"""What the commands that take overrides take besides, without a value."""
MAX_CHANGES = 5
"""Of those that a message names."""


def parse_overrides(
    tokens: Sequence[str], *, keys: Mapping[str, Key]
) -> tuple[dict[str, Any], list[str]]:
    """The overrides as nested mappings, and one sentence for each token that cannot be used.

    `keys` are the known keys written with dots; below those of `OPEN` every key is accepted. Of
    two overrides of one key the last counts. Values are YAML, except where the key holds text:
    there whatever YAML would read as something else is taken as it stands.
    """
    changes: dict[str, Any] = {}
    problems: list[str] = []
    remaining = list(tokens)
    while remaining:
        token = remaining.pop(0)
        name, equals, text = token.removeprefix("--").partition("=")
        path = _path_of(name)
        if not token.startswith("--") or not name:
            of_flags = (
                f". Flags take no value: {', '.join(FLAGS)}" if token in ("true", "false") else ""
            )
            problems.append(
                f"{token}: unexpected; an override is written --section.key VALUE{of_flags}"
            )
            continue
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                close = difflib.get_close_matches(token, () if path in keys else FLAGS, n=1)
                meant = f" (or did you mean {close[0]}?)" if close else ""
                problems.append(f"{token}: no value; write {token} VALUE{meant}")
                continue
            text = remaining.pop(0)
        if path not in keys and not path.startswith(OPEN):
            problems.append(f"--{name}: unknown key; {suggestion(path, list(keys))}")
            continue
        if path.count(".") >= MAX_DEPTH:
            problems.append(f"--{name[:60]}...: more than {MAX_DEPTH} names in one key")
            continue
        try:
            value, duplicates = parse_yaml(text)
        except ValueError as error:
            value, duplicates = text, []
            if not (path in keys and keys[path].holds_text) or _has_lone_surrogates(text):
                problems.append(f"--{name}: {shown(text)} {error}")
                continue
        problems += [f"--{name}: {duplicate}" for duplicate in duplicates]
        if path in keys and keys[path].holds_text and not isinstance(value, str | None):
            value = text
        section = as_section(value) if path in NAMED_SECTIONS else value
        changes = merge(changes, nested(path, section))
    return changes, problems


def _path_of(name: str) -> str:
    """The key that is meant: `training.max-steps` is max_steps. Labels stay as they are written."""
    names: list[str] = []
    for each in name.split("."):
        names.append(each if ".".join(names) == LABELLED else each.replace("-", "_"))
    return ".".join(names)


def parse_options(tokens: Sequence[str]) -> dict[str, Any]:
    """Options of an environment, `--max_turns 5`; raises ConfigError for anything else."""
    prefixed = [
        token.replace("--", "--environment.", 1) if token[:2] == "--" else token for token in tokens
    ]
    changes, problems = parse_overrides(prefixed, keys={})
    if problems:
        raise ConfigError("\n".join(problems).replace("--environment.", "--"))
    return changes.get("environment", {})


def _has_lone_surrogates(text: str) -> bool:
    """True for bytes on the command line that are not UTF-8: no file could keep them."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def nested(path: str, value: Any) -> dict[str, Any]:
    """The sections in which a key written with dots stands."""
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the changes laid over it, key by key in every section that both have."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and (below is None or isinstance(below, Mapping)):
            merged[key] = merge(below or {}, value)
        else:
            merged[key] = value
    return merged


class Change(NamedTuple):
    """A key, written with dots, and its two values; null where it is absent."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        old, new = (json.dumps(each, default=str) for each in self[1:])
        return f"{self.key} was {old} and is {new}"


def changes_in_words(changes: Sequence[Change]) -> str:
    """The first of these changes."""
    return "; ".join(map(str, changes[:MAX_CHANGES]))


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "", *, absent: Any = None
) -> Iterator[Change]:
    """What has changed between two configurations; a key that one lacks has the value `absent`."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name, absent), after.get(name, absent)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.", absent=absent)
        elif old != new:
            yield Change(f"{prefix}{name}", old, new)
