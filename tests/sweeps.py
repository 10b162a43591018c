"""Cases of one test that cost much together: the first is for every save, the others are `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(cases: Iterable[Any]) -> list[Any]:
    """For `pytest.mark.parametrize`: all cases in their order, marked from the second on."""
    first, *others = cases
    return [first, *map(_slow, others)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
