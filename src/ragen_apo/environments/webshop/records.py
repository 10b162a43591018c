"""What upstream's three files may hold: a record of each, checked field by field.

`check_record` consumes a JSON value and raises EnvironmentDataError with the number of the record,
the field, what it holds and what is expected. Fields that nothing reads may hold anything. Text is
text everywhere: half a surrogate pair, which JSON can spell, cannot be shown, searched or stored.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ragen_apo.errors import EnvironmentDataError

NO_ATTRIBUTE: Final = "DUMMY_ATTR"


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text of whole characters, no lone surrogates") from None
    return text


def _printable(text: str) -> str:
    if not text or not text.isprintable():  # products are shown and opened by it
        raise ValueError("printable text")
    return text


_Text = Annotated[str, AfterValidator(_whole)]
_TextOrNull = Annotated[_Text | None, Field(description="text or null")]
_Texts = Annotated[list[_Text], Field(description="a list of text")]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


_RecordT = TypeVar("_RecordT", bound=_Record)


class OptionValue(_Record):
    """One of the values that an option can have."""

    value: _Text


class ItemRecord(_Record):
    """An entry of `items_shuffle*.json`; the descriptions say what is expected."""

    asin: Annotated[str, AfterValidator(_printable)] = Field(description="printable text")
    name: _TextOrNull
    full_description: _TextOrNull = None
    small_description: list[_Text | None] | _Text | None = Field(
        default=None, description="a list of text, text or null"
    )
    pricing: _TextOrNull = None
    customization_options: Annotated[
        dict[_Text, list[OptionValue] | None], BeforeValidator(lambda value: value or {})
    ] = Field(
        default={},
        description="an object with a list of {value: text} or null for each name of an option",
    )
    category: _TextOrNull
    query: _Text = Field(description="text")
    product_category: _TextOrNull


class LabelRecord(_Record):
    """A value of `items_ins_v2*.json`."""

    attributes: _Texts = [NO_ATTRIBUTE]
    instruction: _TextOrNull = None
    instruction_attributes: list[_Text] | None = Field(
        default=None, description="a list of text or null"
    )


class HumanRecord(_Record):
    """An entry of a value of `items_human_ins.json`."""

    instruction: _Text = Field(description="text")
    instruction_attributes: _Texts
    instruction_options: _Texts


def check_record(model: type[_RecordT], value: Any, *, path: Path, location: str) -> _RecordT:
    """The record in a value; `location` says which one of the file it is, `record 7`."""
    if not isinstance(value, Mapping):
        raise malformed(path, f"{location} is {shown(value)}, expected an object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        within = "".join(f"[{part}]" for part in problem["loc"][1:] if isinstance(part, int))
        expected = model.model_fields[name].description
        if problem["type"] == "missing" and len(problem["loc"]) == 1:
            raise malformed(path, f"{location} has no field {name}, expected {expected}") from error
        got = shown(problem["input"])
        if problem["type"] == "value_error":
            expected = str(problem.get("ctx", {})["error"])
        raise malformed(
            path, f"{location}, field {name}{within}: got {got}, expected {expected}"
        ) from error


def malformed(path: Path, problem: str) -> EnvironmentDataError:
    """The error for a file that is not what upstream publishes under its name."""
    return EnvironmentDataError(f"{path} is malformed: {problem}; repair the file or get it anew")


def shown(value: Any) -> str:
    """A JSON value of any size and depth on half a line."""
    text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
