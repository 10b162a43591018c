"""What a file of tensors has to hold: names, shapes and formats, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError, naming a tensor, if one is missing, too many, or of another form."""
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"tensor {missing[0]} is missing{_and_more(missing)}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise ValueError(f"tensor {unknown[0]} is not expected here{_and_more(unknown)}")
    for name, tensor in expected.items():
        for what, got, wanted in (
            ("shape", tuple(found[name].shape), tuple(tensor.shape)),
            ("format", found[name].dtype, tensor.dtype),
        ):
            if got != wanted:
                raise ValueError(f"tensor {name} has {what} {got}, expected {wanted}")


def _and_more(names: list[str]) -> str:
    return f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
