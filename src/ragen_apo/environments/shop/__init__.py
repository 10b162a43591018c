"""The catalogue shop, the environment `shop`."""

from ragen_apo.environments.shop.environment import ShopEnvironment

__all__ = ["ShopEnvironment"]
