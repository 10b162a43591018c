"""What upstream's three files may hold: a record of each, checked field by field.

`check_record` consumes a JSON value and raises EnvironmentDataError with the number of the record,
the field, what it holds and what is wrong with it. Fields that nothing reads may hold anything.
"""

import reprlib
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    ValidationError,
)

from ragen_apo.errors import EnvironmentDataError

NO_ATTRIBUTE: Final = "DUMMY_ATTR"


def _printable(text: str) -> str:
    if not text or not text.isprintable():  # products are shown and opened by it
        raise ValueError("expected printable text")
    return text


_Text = Annotated[str, Field(min_length=0)]
"""Any constraint makes pydantic refuse half a surrogate pair, which JSON can spell and no page can
show."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


_RecordT = TypeVar("_RecordT", bound=BaseModel)


class OptionValue(_Record):
    """One of the values that an option can have."""

    value: _Text


class ItemRecord(_Record):
    """An entry of `items_shuffle*.json`."""

    asin: Annotated[str, AfterValidator(_printable)]
    name: _Text | None
    full_description: _Text | None = None
    small_description: Annotated[
        list[_Text | None],
        BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    ] = [None]
    pricing: _Text | None = None
    customization_options: Annotated[
        dict[_Text, list[OptionValue] | None], BeforeValidator(lambda value: value or {})
    ] = {}
    category: _Text | None
    query: _Text
    product_category: _Text | None


class LabelRecord(_Record):
    """A value of `items_ins_v2*.json`."""

    attributes: list[_Text] = [NO_ATTRIBUTE]
    instruction: _Text | None = None
    instruction_attributes: list[_Text] | None = None


class HumanRecord(_Record):
    """An entry of a value of `items_human_ins.json`."""

    instruction: _Text
    instruction_attributes: list[_Text]
    instruction_options: list[_Text]


class HumanRecords(RootModel[dict[str, list[HumanRecord]]]):
    """The whole of `items_human_ins.json`, by asin."""


def check_record(model: type[_RecordT], value: Any, *, path: Path, location: str) -> _RecordT:
    """The record in a value; `location` says which one of the file it is, `record 7`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        where = f"{location}, field {field!r:.80}" if field else location
        raise malformed(
            path, f"{where}: got {shown(problem['input'])}. {problem['msg']}"
        ) from error


def malformed(path: Path, problem: str) -> EnvironmentDataError:
    """The error for a file that is not what upstream publishes under its name."""
    return EnvironmentDataError(f"{path} is malformed: {problem}; repair the file or get it anew")


def shown(value: Any) -> str:
    """A JSON value of any size and depth on half a line."""
    text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
