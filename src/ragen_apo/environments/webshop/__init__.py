"""WebShop, faithful to the original program, without Java and without global state."""

from ragen_apo.environments.webshop.environment import WebShopEnvironment, WebShopOptions

__all__ = ["WebShopEnvironment", "WebShopOptions"]
