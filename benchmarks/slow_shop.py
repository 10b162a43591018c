"""A shop whose resets and steps take their time, found by its file."""

from __future__ import annotations

import time
from typing import Any

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.types import Task


class SlowShop(ShopEnvironment):
    """Waits as if it were far away, and computes in Python as if it simulated something."""

    def __init__(self, *, wait: float = 0.0, compute: float = 0.0, **options: Any) -> None:
        """Seconds of each reset and step; computing counts time of the thread."""
        super().__init__(**options)
        self._wait, self._compute = wait, compute

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._take_time()
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._take_time()
        return super().step(action)

    def _take_time(self) -> None:
        time.sleep(self._wait)
        end = time.thread_time() + self._compute
        while time.thread_time() < end:
            sum(range(1000))
