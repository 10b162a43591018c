"""The front of a shop: from the state of its environment to the page that people see.

Consumes the environments `shop` and `webshop` as they are after a reset or a step, and reads their
public state, never their text; produces `ShopPage` and the actions behind its buttons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ragen_apo.environments.base import TextEnvironment
from ragen_apo.environments.human.play import PlayedTurn
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.errors import ConfigError
from ragen_apo.web.shop.catalogue_front import CatalogueFront
from ragen_apo.web.shop.display import RewardPart, ShopPage
from ragen_apo.web.shop.webshop_front import WebShopFront


class Front(Protocol):
    """The pages of one environment in one episode."""

    @property
    def environment(self) -> TextEnvironment: ...

    def page(self, *, is_over: bool) -> ShopPage:
        """The open page; `is_over` after a purchase or the last turn."""
        ...

    def search(self, words: str) -> str:
        """The action that searches these words."""
        ...

    def bill(self, turns: Sequence[PlayedTurn], info: Mapping[str, Any]) -> tuple[RewardPart, ...]:
        """What the return of a finished episode is made of; `info` is that of the last turn."""
        ...


def front_of(environment: TextEnvironment) -> Front:
    """The front of this environment; raises ConfigError for one that is no shop."""
    if isinstance(environment, ShopEnvironment):
        return CatalogueFront(environment)
    if isinstance(environment, WebShopEnvironment):
        return WebShopFront(environment)
    raise ConfigError(
        f"the environment {environment.properties.name} is no shop; expected shop or webshop. In "
        "the terminal `ragen-apo play` plays every environment"
    )
