"""A game as a text environment.

A game is one episode: it shows a first observation and answers texts. `GameEnvironment` adds tasks,
turn limit and the answer after the end. Other worlds implement `TextEnvironment` themselves.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import BaseModel

from ragen_apo.environments.base import EnvironmentProperties, ScriptedPolicy
from ragen_apo.environments.policy_calls import is_of_the_call
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.printable import shortened
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task

_METHODS = ("first_observation", "play", "key")
EPISODE_OVER = "The episode is over."


def no_episode(environment: str) -> str:
    """The message for a step before the first reset."""
    return f"{environment} has no episode yet; call reset(task, seed=...) before step"


@dataclass(frozen=True)
class Answer:
    """The answer of a game to one text."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """A limit of the game's own is reached, such as the number of actions."""
    success: bool = False
    invalid: bool = False
    """The text, or a part of it, was no action."""
    flags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, besides the reward, for curves and tables. The last of an episode counts."""


class Game(Protocol):
    """One episode in progress.

    It may also have `close()`, called once, before the next episode or at the end of all.
    """

    def first_observation(self) -> str:
        """The text before the first turn."""
        ...

    def play(self, text: str) -> Answer:
        """One turn. No text makes it raise; not called after the end."""
        ...

    def key(self) -> str:
        """Identifies the state; the task and the number of turns need not be in it."""
        ...


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or shortened(repr(function), 80)


class GameEnvironment:
    """A `TextEnvironment` that plays one game after another.

    `start(task, seed)` sets up the game of a task; it raises KeyError, TypeError or ValueError for
    a task that does not fit the options. Tasks of another environment are refused before it. To be
    picklable, `start` and the policies have to be.
    """

    def __init__(
        self,
        *,
        properties: EnvironmentProperties,
        tasks: Mapping[str, Sequence[Task]],
        start: Callable[[Task, int], Game],
        policies: Mapping[str, Callable[[], ScriptedPolicy]],
        max_turns: int,
    ) -> None:
        self.properties = replace(properties, max_turns=max_turns)
        self._tasks = tasks
        self._start = start
        self._policies = policies
        self._max_turns = max_turns
        self._task: Task | None = None
        self._game: Game | None = None
        self._num_turns = 0
        self._terminated = self._truncated = self._success = False

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._tasks:
            raise ConfigError(
                f"the environment {self.properties.name} has no split {split!r}; expected one of "
                f"{', '.join(self._tasks)}"
            )
        return self._tasks[split]

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._close_game()
        try:
            game = self._started(task, seed)
            self._task, self._game = task, game
            self._num_turns = 0
            self._terminated = self._truncated = self._success = False
            return game.first_observation(), {}
        except BaseException:
            self._close_game()
            self._game = None  # neither this episode nor the one before it can be gone on with
            raise

    def _started(self, task: Task, seed: int) -> Game:
        name = self.properties.name
        if task.environment != name:
            raise ConfigError(
                f"{name} cannot set up task {task.task_id}, which is of the environment "
                f"{task.environment!r}; expected a task of {name!r}, the name in its properties"
            )
        try:
            game = self._start(task, seed)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, TypeError) and is_of_the_call(error):
                raise EnvironmentFaultError(
                    f"{name}: start, {_named(self._start)}, cannot be called with a task and a "
                    f"seed ({error}); expected start(task, seed), such as a class whose __init__ "
                    "takes self, task and seed"
                ) from error
            raise ConfigError(
                f"{name} cannot set up task {task.task_id} ({error}); expected a task of {name} "
                "with the same options"
            ) from error
        if missing := [method for method in _METHODS if not hasattr(game, method)]:
            raise EnvironmentFaultError(
                f"{name}: the game {type(game).__name__} has no {', no '.join(missing)}; expected "
                "the methods first_observation(), play(text) and key()"
            )
        return game

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Executes any text; after the end nothing changes and nothing is earned."""
        if self._game is None:
            raise RuntimeError(no_episode(self.properties.name))
        if self._terminated or self._truncated:
            info = {"success": self._success}
            return EPISODE_OVER, 0.0, self._terminated, self._truncated, info
        answer = self._game.play(action)
        if not isinstance(answer, Answer):
            raise EnvironmentFaultError(
                f"{self.properties.name}: {type(self._game).__name__}.play returned "
                f"{type(answer).__name__}; expected an Answer, such as "
                "Answer(observation, reward=0.0)"
            )
        self._num_turns += 1
        self._terminated, self._success = answer.terminated, bool(answer.success)
        at_limit = answer.truncated or self._num_turns >= self._max_turns
        self._truncated = at_limit and not answer.terminated
        info: dict[str, Any] = {}
        if answer.invalid:
            info["invalid_action"] = True
        if answer.flags:
            info["flags"] = answer.flags
        if answer.metrics:
            info["metrics"] = answer.metrics
        if self._terminated or self._truncated:
            info["success"] = self._success
        return answer.observation, float(answer.reward), self._terminated, self._truncated, info

    def state_key(self) -> str:
        """Task, turns used, and the game's own state."""
        if self._task is None or self._game is None:
            return "none"
        phase = "terminated" if self._terminated else "truncated" if self._truncated else "open"
        won = ":success" if self._success else ""
        return f"{self._task.task_id}:{self._num_turns}:{phase}{won}:{self._game.key()}"

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        return self._policies

    def close(self) -> None:
        """Closes the present game. A subclass that holds more closes that as well."""
        self._close_game()

    def _close_game(self) -> None:
        """Closes the present game, if it can be closed; it is not played on then."""
        if close := getattr(self._game, "close", None):
            self._game = None
            close()


def digest_of_options(options: BaseModel, *, without: Sequence[str] = ()) -> str:
    """Equal exactly for equal options, those in `without` left out: a part of a version."""
    text = options.model_dump_json(exclude=set(without))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def chance(seed: int, *purpose: int | str) -> float:
    """A uniform number from 0 to 1, a function of seed and purpose.

    For stochastic worlds: draws depend on the state and the episode's seed only, so equal state
    keys have equal futures under one seed.
    """
    return derive_seed(seed, *purpose) / 2**63
