"""Who is in the shop. Each visit has an environment of its own, a lock, and an end."""

from __future__ import annotations

import copy
import itertools
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragen_apo.environments.base import TextEnvironment
from ragen_apo.environments.human.recordings import SUFFIX
from ragen_apo.errors import ConfigError
from ragen_apo.files import write_json_lines_atomically
from ragen_apo.types import Task
from ragen_apo.web import sessions
from ragen_apo.web.shop.episode import Episode
from ragen_apo.web.shop.goals import AgentEpisodes, goals_of

MAX_VISITS = 500


@dataclass(frozen=True)
class Shop:
    """What all visits share: the goals, the agent's episodes, and where demonstrations go."""

    environment: TextEnvironment
    """Never stepped: each episode has a copy, which shares what is large and never changes."""
    split: str
    goals: Sequence[Task]
    agent: AgentEpisodes
    demonstrations: Path

    def begin(self, number: int) -> Episode:
        """An episode on goal `number`, counted from 0."""
        return Episode(copy.copy(self.environment), self.goals[number])


def open_shop(
    environment: TextEnvironment, *, split: str, agent: AgentEpisodes, demonstrations: Path
) -> Shop:
    """The shop of an environment; raises ConfigError for one that is none, or no such split."""
    goals = goals_of(environment, split, agent)
    shop = Shop(environment, split, goals, agent, demonstrations)
    shop.begin(0)  # a wrong environment is refused now, not at the first visit
    return shop


class Visit(sessions.Visit):
    """One visitor: the goal and the episode."""

    def __init__(self, visit_id: str, shop: Shop, number: int) -> None:
        super().__init__(visit_id)
        self._shop = shop
        self.num_goals = 0
        """The number of goals begun in this visit."""
        self.go_to(number)

    def go_to(self, number: int) -> None:
        """Begins an episode on goal `number`, counted from 0."""
        self.number = number % len(self._shop.goals)
        self.episode = self._shop.begin(self.number)
        self.num_goals += 1
        self.kept: Path | None = None

    @property
    def page_number(self) -> str:
        return f"{self.num_goals}-{len(self.episode.turns)}-{'kept' if self.kept else 'open'}"

    def why_not_kept(self) -> str:
        """Why this episode cannot be a demonstration; empty if it can."""
        if not self.episode.is_over:
            return "An episode is kept when it has come to its end."
        if not (self.episode.terminated or self.episode.truncated):
            return "The environment has not ended this episode, so it is no demonstration."
        if self.episode.task.split != "train":
            return (
                f"This goal is for evaluation (split {self.episode.task.split}), and a policy is "
                "not trained on those. To record demonstrations, start the shop with --split train."
            )
        return ""

    def keep(self) -> None:
        """Writes the episode as a file of its own into the folder of demonstrations, once.

        Raises ConfigError where it is none, or the folder cannot be written.
        """
        if reason := self.why_not_kept():
            raise ConfigError(reason)
        if self.kept is None:
            # The task may come from the file of a run that somebody else made.
            task_id = re.sub(r"[^\w-]+", "-", self.episode.task.task_id)[:80]
            name = f"{task_id}-{secrets.token_hex(6)}{SUFFIX}"
            path = self._shop.demonstrations / name
            try:
                write_json_lines_atomically(path, [self.episode.recording().to_row()])
            except OSError as error:
                raise ConfigError(f"The episode could not be kept: {error}.") from error
            self.kept = path

    def discard(self) -> None:
        """Takes the kept episode out again."""
        if self.kept is not None:
            self.kept.unlink(missing_ok=True)
            self.kept = None


class Visits(sessions.Sessions[Visit]):
    """All visits. For any number of threads."""

    def __init__(
        self,
        shop: Shop,
        *,
        max_visits: int = MAX_VISITS,
        max_idle_seconds: float = sessions.MAX_IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            cookie="visit", max_visits=max_visits, max_idle_seconds=max_idle_seconds, clock=clock
        )
        self.shop = shop
        self._next_goal = itertools.count()

    def next_goal(self) -> int:
        """The number of the first goal that nobody has had yet; then from the beginning."""
        return next(self._next_goal) % len(self.shop.goals)

    def open(self) -> Visit:
        """A new visit on the next goal; raises FullError where there are too many."""
        return self.add(lambda visit_id: Visit(visit_id, self.shop, self.next_goal()))
