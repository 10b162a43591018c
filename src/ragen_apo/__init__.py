"""Multi-turn A*-PO: reinforcement learning for language-model agents with one rollout per task.

From Python: `ragen_apo.train` and the other names of `ragen_apo.api` below, which is imported when
one of them is first asked for. (`ragen_apo.report` and `ragen_apo.warm_start` are subpackages.)
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "Run",
    "compare",
    "episodes",
    "estimate_values",
    "evaluate",
    "open_run",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("ragen_apo.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
