"""The result of Stage 1 that Stage 2 reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReferenceValues:
    """V* under the reference; empty for algorithms without V*."""

    tasks: Mapping[str, float] = field(default_factory=dict)
    """V* by task id."""
    states: Mapping[str, float] = field(default_factory=dict)
    """V* by state key, of states that were visited often enough."""
