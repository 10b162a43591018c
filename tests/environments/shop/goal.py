"""A shop whose goal is known by name, for tests."""

from typing import Any

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.types import Task

GOAL_ID, OTHER_ID = 23, 24
"""The products History Atlas and another one."""


def shop_with_goal(**options: Any) -> ShopEnvironment:
    """A shop at the start of the episode whose goal is the History Atlas."""
    shop = ShopEnvironment(**options)
    shop.reset(goal_task(shop), seed=0)
    return shop


def goal_task(shop: ShopEnvironment) -> Task:
    return next(task for task in shop.tasks("all") if task.payload["product_id"] == GOAL_ID)
