"""Scripted policies of text adventures."""

import re
from collections import Counter

from ragen_apo.environments.base import Reply
from ragen_apo.environments.textworld.engine import Engine
from ragen_apo.environments.textworld.games import Games
from ragen_apo.seeding import generator
from ragen_apo.types import Task

POSSIBLE, SEPARATOR = "Possible: ", "; "
"""How an observation ends: with the commands that do something."""
_COMMON = {"a", "an", "and", "from", "go", "in", "into", "of", "on", "the", "to", "with", "you"}


class Player:
    """Plays a second copy of the game beside the first.

    With probability `expert_share` it says what an expert would, otherwise a random command. The
    expert of a game of TextWorld knows a solution from where the game stands, or only a
    walkthrough, with which it goes on where it can. That of ALFWorld is the package's own, which
    looks for things as an agent has to.
    """

    def __init__(self, games: Games, *, expert_share: float) -> None:
        self._games, self._expert_share = games, expert_share

    def begin(self, task: Task, *, seed: int) -> None:
        path = self._games.path(task)
        self._engine = Engine(path, seed=seed, has_expert=self._expert_share > 0)
        self._scene = self._engine.scene()
        self._generator = generator(seed, "textworld-player")

    def act(self, observation: str) -> Reply:
        """A random command among expert ones is a mistake: shown, not imitated."""
        scene = self._scene
        follows = bool(self._generator.random() < self._expert_share)
        command = scene.advice if follows else None
        if command is None:
            pick = int(self._generator.integers(len(scene.commands)))
            command = scene.commands[pick]
        if not scene.over:
            self._scene = self._engine.step(command)
        is_mistake = self._expert_share > 0 and command != scene.advice
        return Reply(thought=f"Next: {command}", action=command, is_mistake=is_mistake)


class Matcher:
    """Of the possible commands one that it has said least often, with most of the task's words."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._task_words = set(re.findall(r"[a-z]+", task.instruction.lower())) - _COMMON
        self._said: Counter[str] = Counter()

    def act(self, observation: str) -> Reply:
        """`look` where the observation lists no commands."""
        _, _, possible = observation.rpartition(POSSIBLE)
        commands = possible.split(SEPARATOR) if POSSIBLE in observation else ["look"]
        command = min(commands, key=lambda one: (self._said[one], -self._matches(one)))
        self._said[command] += 1
        return Reply(thought=f"Next: {command}", action=command)

    def _matches(self, command: str) -> int:
        return len(self._task_words.intersection(command.split()))
