"""Multi-turn A*-PO: reinforcement learning for language-model agents with one rollout per task.

From Python: `ragen_apo.train` and the other names of `ragen_apo.api` below, which is imported when
one of them is first asked for, and `RagenApoError`. (`ragen_apo.report` and `ragen_apo.warm_start`
are subpackages.)
"""

import importlib
import os
from typing import Any

__version__ = "0.2.0"
SPIN_COUNT = 20_000
"""How often a thread of torch asks whether the others are done before it sleeps. libgomp's own
300,000 make two threads two to four times slower still where another process uses a core
(`benchmarks/busy_cores.py`)."""
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)  # read when torch is imported
_INTERFACE = (
    "RagenApoError",
    "Run",
    "compare",
    "episodes",
    "estimate_values",
    "evaluate",
    "evaluate_api",
    "open_run",
    "push_to_hub",
    "train",
    "write_report",
)


def __getattr__(name: str) -> Any:
    if name in _INTERFACE:
        module = "errors" if name.endswith("Error") else "api"
        return getattr(importlib.import_module(f"ragen_apo.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTERFACE})
