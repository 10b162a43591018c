"""One person's episode in a shop.

Consumes actions as text, those behind the buttons of a page or typed ones; keeps what a recording
needs. Not for several threads at once: a visit has a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragen_apo.environments.answers import turn_limit
from ragen_apo.environments.base import TextEnvironment
from ragen_apo.environments.human.play import PlayedEpisode, PlayedTurn
from ragen_apo.environments.human.recordings import Recording
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task
from ragen_apo.web.shop.catalogue_front import CatalogueFront
from ragen_apo.web.shop.display import RewardPart, ShopPage
from ragen_apo.web.shop.webshop_front import WebShopFront

PLAY_SEED = 0
"""Seeds the environment's draws, as in `ragen-apo play`."""


def front_of(environment: TextEnvironment) -> CatalogueFront | WebShopFront:
    """What makes the pages of this environment; raises ConfigError for one that is no shop."""
    if isinstance(environment, ShopEnvironment):
        return CatalogueFront(environment)
    if isinstance(environment, WebShopEnvironment):
        return WebShopFront(environment)
    raise ConfigError(
        f"the environment {environment.properties.name} is no shop; expected shop or webshop. In "
        "the terminal `ragen-apo play` plays every environment"
    )


@dataclass(frozen=True)
class Bill:
    """How an episode has ended."""

    is_success: bool
    verdict: str
    episode_return: float
    parts: tuple[RewardPart, ...]


class Episode:
    """An episode from its reset on."""

    def __init__(self, environment: TextEnvironment, task: Task) -> None:
        self._front = front_of(environment)
        self._environment = environment
        self._last_info: Mapping[str, Any] = {}
        self.task = task
        self.max_turns = turn_limit(environment.properties)
        self.turns: list[PlayedTurn] = []
        self.terminated = self.truncated = False
        self.observation, _ = environment.reset(task, seed=PLAY_SEED)
        """What an agent reads now."""

    @property
    def is_over(self) -> bool:
        """Bought, cut off by the environment, or longer than any episode may be."""
        return self.terminated or self.truncated or len(self.turns) >= self.max_turns

    @property
    def was_refused(self) -> bool:
        """Whether the last action was none that the environment could execute."""
        return bool(self.turns) and self.turns[-1].invalid

    def page(self) -> ShopPage:
        return self._front.page(is_over=self.is_over)

    def search(self, words: str) -> None:
        """Searches for words that a person has typed."""
        self.act(self._front.search(" ".join(words.split())))

    def act(self, action: str) -> None:
        """Executes any text as the environment does; after the end nothing happens."""
        if self.is_over:
            return
        before, action = self.observation, action.strip()
        self.observation, reward, self.terminated, self.truncated, self._last_info = (
            self._environment.step(action)
        )
        invalid = bool(self._last_info.get("invalid_action", False))
        self.turns.append(PlayedTurn(before, action, reward, invalid))

    def bill(self) -> Bill:
        """The return of the finished episode and its parts."""
        if self._played.success:
            verdict = "Exactly what was asked for"
        elif self.terminated:
            verdict = "Not what was asked for"
        else:
            verdict = "No turns left, and nothing was bought"
        parts = self._front.bill(self.turns, self._last_info)
        return Bill(self._played.success, verdict, self._played.episode_return, parts)

    def recording(self) -> Recording:
        """The finished episode as `ragen-apo play --record` keeps one."""
        return Recording(self._environment.properties.version, PLAY_SEED, self._played)

    @property
    def _played(self) -> PlayedEpisode:
        return PlayedEpisode(
            task=self.task,
            turns=tuple(self.turns),
            terminated=self.terminated,
            truncated=self.truncated,
            success=bool(self._last_info.get("success", False)),
            final_observation=self.observation,
        )
