"""Sentences about configuration keys: what is allowed, what was wrong, what was meant.

Everything is read from the pydantic models, so messages and docs/configuration.md cannot disagree
with what is checked. A key is written with dots: `optimizer.learning_rate`.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ragen_apo.config.moved import became
from ragen_apo.config.section import PathText

_BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    bool: "true or false",
    type(None): "null",
}


@dataclass(frozen=True)
class Key:
    """One line of the configuration."""

    path: str
    field: FieldInfo

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of a section, of one that may be null as well; None for a key with a value."""
        annotation: Any = self.field.annotation
        candidates = get_args(annotation) if self.may_be_null else (annotation,)
        return next((c for c in candidates if _is_section(c)), None)

    @property
    def may_be_null(self) -> bool:
        """Whether null is a value of its own, not another word for the default."""
        return type(None) in get_args(self.field.annotation)

    @property
    def has_value(self) -> bool:
        """Whether something other than keys may stand there."""
        return self.section is None or self.may_be_null

    @property
    def allowed(self) -> str:
        """What may stand there, in words: `a number greater than 0 or null`."""
        if self.section:
            return "a section of keys" + (" or null" if self.may_be_null else "")
        return _allowed(self.field.annotation, self.field.metadata)

    @property
    def holds_text(self) -> bool:
        """True where any text is valid."""
        annotation: Any = self.field.annotation
        if annotation is str:
            return True
        is_collection = get_origin(annotation) in (dict, list)
        return not is_collection and any(text in get_args(annotation) for text in (str, PathText))

    @property
    def maps_to_text(self) -> bool:
        """Whether what stands there has names of its own, each with a text."""
        of_name = self._of_own_names
        return of_name is str or get_args(of_name)[:1] == (str,)

    @property
    def maps_to_lists(self) -> bool:
        """Whether what stands there has names of its own, each with a list."""
        of_name = self._of_own_names
        return get_origin(of_name) is list or any(get_origin(a) is list for a in get_args(of_name))

    @property
    def _of_own_names(self) -> Any:
        """The type of what stands under names of its own; None where there are no such names."""
        annotation: Any = self.field.annotation
        return get_args(annotation)[1] if get_origin(annotation) is dict else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key of a model and of its sections, in order; `*` stands for a name or an index."""
    for name, field in model.model_fields.items():
        key = Key(f"{prefix}{field.alias or name}", field)
        yield key
        if key.section:
            yield from keys_of(key.section, f"{key.path}.")
        for item in filter(_is_section, get_args(field.annotation)):
            if get_origin(field.annotation) in (dict, list, tuple):
                yield from keys_of(item, f"{key.path}.*.")


def _allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        of_null = type(None)
        return " or ".join(_allowed(a, () if a is of_null else metadata) for a in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(member.value) for member in annotation)
    if origin is dict or _is_section(annotation):
        return "a section of keys"
    if origin is Callable:
        return "a function"
    if origin is list:
        return f"a list of {_allowed(arguments[0], ())}"
    if origin is Annotated:
        return _allowed(arguments[0], arguments[1:])
    bounds = [
        f"{words} {_number(getattr(constraint, bound))}"
        for item in metadata
        for constraint in (item.metadata if isinstance(item, FieldInfo) else [item])
        for bound, words in _BOUNDS.items()
        if getattr(constraint, bound, None) is not None
    ]
    return f"{_TYPE_NAMES[annotation]} {' and '.join(bounds)}".rstrip()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def suggestion(path: str, known: list[str]) -> str:
    """What a reader of an unknown key should do: the likeliest keys, or those of the section."""
    if what := became(path):
        return what
    parent, _, leaf = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    same_name = [key for key in known if key.rpartition(".")[2] == leaf]
    close = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=1)]
    # `lr` for `learning_rate`.
    close += [key for name, key in siblings.items() if leaf == _initials(name)]
    if close or same_name:
        return f"did you mean {' or '.join([*close, *same_name])}?"
    others = [key for key in known if not path.startswith(f"{key}.")]
    anywhere = difflib.get_close_matches(path, others, n=1)
    if anywhere:
        return f"did you mean {anywhere[0]}?"
    where = f"in {parent}" if parent else "here"
    return f"known {where}: {', '.join(siblings or known)}"


def _initials(name: str) -> str | None:
    """Of a name of several words."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else None


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return value if isinstance(value, str) else shown(value)


def shown(value: Any) -> str:
    """A value as it stood in the YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a section of keys" if value else "{}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe_problems(
    error: ValidationError, model: type[BaseModel], *, where: str = ""
) -> list[str]:
    """A sentence for each finding of pydantic in a model whose keys stand below `where`."""
    keys = {key.path: key for key in keys_of(model, f"{where}." if where else "")}
    found = error.errors(include_url=False)
    return list(dict.fromkeys(describe_problem(each, keys, where=where) for each in found))


def describe_problem(error: ErrorDetails, keys: Mapping[str, Key], *, where: str = "") -> str:
    """One finding of pydantic as a sentence: the key, what it got, what it expected."""
    parts = [*([where] if where else []), *(str(part) for part in error["loc"])]
    path = ".".join(parts)
    label = path or "configuration"
    if error["type"] in ("extra_forbidden", "invalid_key"):
        above = _known_path(parts[:-1], keys)
        written = ".".join(filter(None, [above, parts[-1]]))
        if "." in parts[-1] and written in keys:
            return f"{label}: unknown key; sections are nested: {_nested(written)}"
        meant = suggestion(written, list(keys))
        return f"{label}: unknown key; {meant.replace(above, '.'.join(parts[:-1]))}"
    if error["type"] == "value_error":
        said = error["msg"].removeprefix("Value error, ")
        got = f"got {shown(error['input'])}, " if said.startswith("expected") else ""
        return f"{label}: {got}{said}"
    if error["type"] == "missing":
        return f"{label}: missing; add this key"
    parent = keys.get(_known_path(parts[:-1], keys))
    # An item of a list, or a member of a union, is described by its key.
    key = parent if parent and parent.has_value and not parent.section else None
    key = key or keys.get(_known_path(parts, keys))
    expected = key.allowed if key else "a section of keys"
    if key is parent and key is not None and key.maps_to_text:
        expected = "text"
    if key is parent and key is not None and key.maps_to_lists:
        expected = "a list of values"
    if parts and parts[-1].isdecimal():
        expected = expected.removeprefix("a list of ")
    else:
        expected = re.sub(
            r"\ba list of an? ((?:whole )?number|section)", r"a list of \1s", expected
        )
    if expected == "a section of keys" and f"{path}.name" in keys:
        expected = f"a name or {expected}"
    if error["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    return f"{label}: got {shown(error['input'])}, expected {expected}"


def _nested(path: str) -> str:
    """How a file, and how a script, has a key that was written with dots."""
    section, *names = path.split(".")
    in_file, in_script = "...", "..."
    for name in reversed(names):
        in_file, in_script = f"{{{name}: {in_file}}}", f'{{"{name}": {in_script}}}'
    return f"{section}: {in_file}, or {section}={in_script} in Python"


def _known_path(parts: Sequence[str], keys: Mapping[str, Key]) -> str:
    """The path of a key as `keys` has it, with `*` for names and indices that are free."""
    path = ""
    for part in parts:
        exact = f"{path}.{part}" if path else part
        free = any(known.startswith(f"{path}.*.") for known in keys)
        path = exact if exact in keys or not free else f"{path}.*"
    return path


def key_table(keys: Iterable[Key], *, within: str = "", links: bool = False) -> list[str]:
    """A table in Markdown, a line for each key; names leave out the prefix `within`.

    With `links`, the line of a section leads to the heading that has the section's name.
    """
    rows = [_row(key, name=key.path.removeprefix(within), link=links) for key in keys]
    return ["| key | default | allowed | meaning |", "|---|---|---|---|", *rows]


def _row(key: Key, *, name: str, link: bool) -> str:
    default = ""
    if key.has_value:
        value = key.field.get_default(call_default_factory=True)
        default = "required" if key.field.is_required() else f"`{_plain(value)}`"
    meaning = " ".join((key.field.description or "").split())  # a line break would end the table
    meaning = meaning.replace("|", "\\|")
    if key.section and link:
        what = f"{meaning.removesuffix('.')}; " if meaning else ""
        anchor = key.path.replace(".", "")  # as GitHub names headings
        meaning = f"{what}see [{key.path}](#{anchor})"
    return f"| `{name}` | {default} | {key.allowed} | {meaning} |"
