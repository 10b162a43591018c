"""Text adventures: an agent walks through rooms and does there what a task asks for.

TextWorld (Côté et al. 2018, arXiv 1806.11532) makes games; ALFWorld (Shridhar et al. 2021, arXiv
2010.03768) has household tasks in the same engine. Both are deterministic: seeds are not used.
"""

import functools
import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ragen_apo.config.section import AtHome, Section
from ragen_apo.environments.base import EnvironmentProperties, validate_options
from ragen_apo.environments.textworld.engine import Engine
from ragen_apo.environments.textworld.games import NAME, Games, games_in
from ragen_apo.environments.textworld.packages import package_versions
from ragen_apo.environments.textworld.scripted import POSSIBLE, SEPARATOR, Matcher, Player
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment, digest_of_options
from ragen_apo.plural import counted
from ragen_apo.types import Task

TEXT_VERSION = 1
"""Raise it whenever the words of an observation, the dynamics or the keys of states change."""
TEACHER_EXPERT_SHARE = 0.8


class TextWorldOptions(Section):
    """The options of the environment `textworld`."""

    model_config = ConfigDict(strict=False)

    data: Annotated[Path, AtHome]
    """A folder whose subfolders are splits with games: `~/.cache/alfworld/json_2.1.1`, as
    `alfworld-download` makes it. A relative path starts in the current directory."""
    max_turns: int = Field(default=50, ge=1, le=1000)
    """Truncates an episode after this many commands."""
    commands: bool = True
    """Whether an observation ends with the commands that do something."""
    reward: Literal["score", "win"] = "score"
    """What a turn pays: the share of the game's points that it brings, or 1 for winning. Games of
    ALFWorld have one point, for winning."""


class Adventure:
    """One game in progress.

    It hears the commands that do something, and no others: Frotz knows `undo`, takes several in a
    line, and crashes where a text is long.
    """

    def __init__(self, options: TextWorldOptions, path: Path, task: Task) -> None:
        self._options, self._instruction = options, task.instruction
        self._engine = Engine(path)
        self._scene = self._engine.scene()
        self._scored: list[str] = []

    def first_observation(self) -> str:
        return f"TASK: {self._instruction}\n{self._view()}"

    def play(self, text: str) -> Answer:
        said = {command.lower(): command for command in self._scene.commands}
        command = said.get(" ".join(text.lower().split()))
        if command is None:
            return Answer(f"Nothing happens.{self._possible()}", invalid=True)
        before, self._scene = self._scene, self._engine.step(command)
        gain = self._scene.score - before.score
        if gain > 0:
            self._scored.append(f"{command}:{gain}:{self._scene.state}")
        return Answer(
            self._view(),
            reward=float(self._scene.won) if self._options.reward == "win" else gain,
            terminated=self._scene.over,
            success=self._scene.won,
        )

    def key(self) -> str:
        """What is true and seen, and what has scored: a quest pays once."""
        return f"{self._scene.state}:{hashlib.sha256(''.join(self._scored).encode()).hexdigest()}"

    def close(self) -> None:
        self._engine.close()

    def _view(self) -> str:
        return f"{self._scene.text}{self._possible()}"

    def _possible(self) -> str:
        if not self._options.commands or self._scene.over:
            return ""
        return f"\n{POSSIBLE}{SEPARATOR.join(self._scene.commands)}"


def make_textworld(**options: object) -> GameEnvironment:
    """The environment `textworld`; raises ConfigError for options it does not accept, and where
    textworld is not installed, and EnvironmentDataError for games that cannot be used.
    """
    checked = validate_options(TextWorldOptions, options)
    version = package_versions()
    games = games_in(checked.data.absolute())
    sizes = ", ".join(
        f"{counted(len(tasks), 'game')} in {split}" for split, tasks in games.tasks.items()
    )
    properties = EnvironmentProperties(
        name=NAME,
        version=f"{NAME}-{TEXT_VERSION}-{version}-{digest_of_options(checked, without=['data'])}",
        reward_version=f"{checked.reward}-{version}",
        deterministic=True,
        return_range=(0.0, 1.0),
        splits=tuple(games.tasks),
        rules=(
            "You play a text adventure. Each turn you say one command, such as: look; inventory; "
            "go to desk 1; go north; open drawer 1; take mug 1 from desk 1. Do what the task asks "
            "for."
        ),
        data=f"{sizes} of {checked.data}",
    )
    return GameEnvironment(
        properties=properties,
        tasks=games.tasks,
        start=functools.partial(_start, checked, games),
        policies={
            "teacher": functools.partial(Player, games, expert_share=TEACHER_EXPERT_SHARE),
            "oracle": functools.partial(Player, games, expert_share=1.0),
            "random": functools.partial(Player, games, expert_share=0.0),
            "heuristic": Matcher,
        },
        max_turns=checked.max_turns,
    )


def _start(options: TextWorldOptions, games: Games, task: Task, seed: int) -> Adventure:
    del seed
    return Adventure(options, games.path(task), task)
