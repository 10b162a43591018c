"""Any text environment as a `gymnasium.Env`, and the ids under which Gymnasium finds them.

    gymnasium.make("ragen_apo.environments.gymnasium:ragen_apo/Shop-v0", split="test", max_turns=5)

Observations and actions are text. Keyword arguments that the adapter does not know are options of
the environment. `action_space.sample()` is noise; the scripted policy `random` plays at random.
"""

import string
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from ragen_apo.environments.base import (
    TaskFinder,
    TextEnvironment,
    close_environment,
    make_environment,
    task_at,
    tasks_of,
)
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task

MAX_TEXT_CHARACTERS = 100_000
_MAX_SAMPLED_CHARACTERS = 100
_RESET_OPTIONS = ("split", "task_id", "task_index")

REGISTERED = {
    "ragen_apo/Bandit-v0": "bandit",
    "ragen_apo/Countdown-v0": "countdown",
    "ragen_apo/FrozenLake-v0": "frozen_lake",
    "ragen_apo/Mixture-v0": "mixture",
    "ragen_apo/Questions-v0": "questions",
    "ragen_apo/Shop-v0": "shop",
    "ragen_apo/Sokoban-v0": "sokoban",
    "ragen_apo/TextWorld-v0": "textworld",
    "ragen_apo/WebShop-v0": "webshop",
}
"""Gymnasium ids and the environments they stand for."""


class FreeText(Text):
    """Contains every text up to a length, and samples short printable ones."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(_MAX_SAMPLED_CHARACTERS, min_length=0, charset=string.printable, seed=seed)

    def contains(self, x: Any) -> bool:
        """True for any text; Gymnasium's own text space knows a fixed alphabet only."""
        return isinstance(x, str) and len(x) <= MAX_TEXT_CHARACTERS


class GymnasiumTextEnv(gymnasium.Env[str, str]):
    """Plays tasks of one split, each chosen with the adapter's seeded generator.

    The environment is given by name or as what makes it, with its options, or made already.

    `reset(options=...)` takes `split` for this and later episodes' choice, and one particular task
    by `task_id`, whatever its split, or by `task_index`, its number in the split from 0. `info` of
    a reset holds `task_id`, `split` and `category`.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium reads a plain dict here

    def __init__(
        self,
        environment: TextEnvironment | Callable[..., TextEnvironment] | str = "shop",
        *,
        split: str = "train",
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(environment, str) or callable(environment):
            environment = make_environment(environment, options)
        elif options:
            raise ConfigError(
                f"got the options {', '.join(options)} beside an environment that exists already; "
                "expected options only beside an environment's name"
            )
        self.text_environment = environment
        self._finder = TaskFinder(environment)
        self.render_mode = render_mode
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self.task: Task | None = None
        """That of the present episode."""
        self._split = split
        self._page = ""
        self._is_closed = False
        tasks_of(self.text_environment, split)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts an episode of a task drawn from the split, or of the one asked for."""
        super().reset(seed=seed)
        self.task = task = self._choose_task(options or {})
        episode_seed = int(self.np_random.integers(2**62))
        self._page, info = self.text_environment.reset(task, seed=episode_seed)
        identity = {"task_id": task.task_id, "split": task.split, "category": task.category}
        return self._page, {**info, **identity}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._page, reward, terminated, truncated, info = self.text_environment.step(action)
        return self._page, reward, terminated, truncated, info

    def close(self) -> None:
        """Closes the text environment. As Gymnasium has it, a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            close_environment(self.text_environment)

    def render(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The text that the environment showed last, in render mode `ansi`."""
        return self._page if self.render_mode == "ansi" else None

    def _choose_task(self, options: dict[str, Any]) -> Task:
        unknown = [key for key in options if key not in _RESET_OPTIONS]
        if unknown:
            raise ConfigError(
                f"reset got the unknown options {', '.join(map(str, unknown))}; expected "
                f"{' or '.join(_RESET_OPTIONS)}"
            )
        split = options.get("split", self._split)
        if "task_id" in options:
            splits = [split] if "split" in options else None
            task = self._finder.find(options["task_id"], splits)
        else:
            index = options.get("task_index")
            if index is None:
                index = self.np_random.integers(len(tasks_of(self.text_environment, split)))
            task = task_at(self.text_environment, split, int(index), named="task_index")
        self._split = split
        return task


def register_environments() -> None:
    """Makes the ids known to Gymnasium; calling it again changes nothing."""
    for gymnasium_id, name in REGISTERED.items():
        if gymnasium_id not in gymnasium.registry:
            gymnasium.register(
                id=gymnasium_id,
                entry_point="ragen_apo.environments.gymnasium:GymnasiumTextEnv",
                kwargs={"environment": name},
            )


register_environments()
