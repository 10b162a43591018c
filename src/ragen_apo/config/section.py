"""What all sections of the configuration share: the base class, and the ranges of numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def whole_number(value: Any) -> Any:
    """Reads 8.0 and 1e3 as whole numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def one_or_more(value: Any) -> Any:
    """Reads a single text as a list of one."""
    return [value] if isinstance(value, str) else value


def at_home(value: Any) -> Any:
    """Reads a path that begins with ~ as one in the user's folder, as a shell does."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))  # Path.expanduser raises where there is no such user
    return os.path.expanduser(value) if isinstance(value, str) else value


AtHome = BeforeValidator(at_home)
"""For options that are paths."""
PathText = Annotated[str, AtHome]
"""A path, or the name of something that may be one."""

NAMED_SECTIONS = {"environment", "algorithm"}
"""Sections that may be a name alone: `environment: shop`."""


def as_section(values: Any) -> Any:
    """A name alone, `grpo`, written out as `{name: grpo}`; null means defaults."""
    if values is None:
        return {}
    return {"name": values} if isinstance(values, str) else values


def require_json(values: Any) -> None:
    """Raises ValueError for what no file of a run could keep."""
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            "options must be made of text, finite numbers, true, false, null, lists and mappings: "
            f"{error}"
        ) from error


LARGEST = 1_000_000_000
"""No count and no weight has a use beyond it; far larger ones overflow or never end."""
LARGEST_SIZE = 1_000_000
"""Of what is in memory at once."""
Count = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=LARGEST)]
Size = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=LARGEST_SIZE)]
GroupSize = Annotated[int, BeforeValidator(whole_number), Field(ge=2, le=LARGEST_SIZE)]
"""Of what is compared with each other."""
SizeOrZero = Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=LARGEST_SIZE)]
Seed = Annotated[int, BeforeValidator(whole_number), Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Penalty = Annotated[float, Field(ge=-LARGEST, le=0)]
LearningRate = Annotated[float, Field(gt=0, le=10)]


class Section(BaseModel):
    """A part of the configuration; immutable, finite numbers only, no conversion between types.

    The docstring of a field is its line in docs/configuration.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section_means_defaults(cls, values: Any) -> Any:
        return {} if values is None else values
