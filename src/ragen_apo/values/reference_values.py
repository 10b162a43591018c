"""What Stage 1 says about a reference, as Stage 2 reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReferenceValues:
    """What Stage 1 says about the reference; empty for algorithms that do not ask."""

    tasks: Mapping[str, float] = field(default_factory=dict)
    """V* by task id."""
    states: Mapping[str, float] = field(default_factory=dict)
    """V* by state key, of states that were visited often enough."""
