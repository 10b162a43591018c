"""A shop in which no two episodes have the same context, and no two of a group the same return.

So a server whose draws are a function of the context (`fake_vllm.content_seed`) answers each
episode the same, whenever it is played. It is taken by its path, so its folder comes onto
`sys.path`. Nothing else is in that folder: `tests/vllm` would pass for vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.types import Task

SECTION = {
    "name": f"{Path(__file__).resolve()}:TicketedShop",
    "num_products": 12,
    "max_turns": 2,
}
"""For the configuration."""


class TicketedShop(ShopEnvironment):
    """Shows a number that is the episode's own, and pays for it."""

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(task, seed=seed)
        self._worth = seed % 97 / 97
        return f"{observation}\nTicket: {seed % 10**9}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        worth, self._worth = self._worth, 0.0
        return observation, reward + worth, terminated, truncated, info
