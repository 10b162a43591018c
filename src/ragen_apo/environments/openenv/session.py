"""One client's session: an environment of its own, and tasks by split and index, id, or seed.

Consumes a function that makes a text environment; produces what OpenEnv's server calls.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openenv.core.env_server.interfaces import (  # pyright: ignore[reportMissingImports]
    Environment,
)
from openenv.core.env_server.types import (  # pyright: ignore[reportMissingImports]
    EnvironmentMetadata,
)
from pydantic import BaseModel, ConfigDict, Field

from ragen_apo.config.named_code import FOREIGN_FAILURES
from ragen_apo.environments.answers import checked_step, problem_with_text
from ragen_apo.environments.base import (
    TaskFinder,
    TextEnvironment,
    close_environment,
    task_at,
    tasks_of,
    validate_options,
)
from ragen_apo.environments.openenv.records import TextAction, TextObservation, TextState
from ragen_apo.errors import ConfigError, EnvironmentFaultError, RagenApoError
from ragen_apo.printable import exception_in_words
from ragen_apo.seeding import generator
from ragen_apo.types import Task

NO_EPISODE = "No episode is under way. Reset to begin one."
MAX_LISTED_TASKS = 1_000
MAX_SEED = 2**63 - 1


class Start(BaseModel):
    """What `reset` takes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Of the environment's draws, and of the task where none is named."""
    split: str | None = None
    index: int | None = Field(default=None, ge=0)
    """Which task of the split, counted from 0."""
    task_id: str | None = None


class World:
    """What all sessions share: the tasks, and whose turn it is. Safe for threads."""

    def __init__(self, make: Callable[[], TextEnvironment], *, split: str = "train") -> None:
        self.make = make
        self.split = split
        self._prototype = make()
        """Never stepped."""
        self.properties = self._prototype.properties
        self._finder = TaskFinder(self._prototype)
        self._unnamed, self._unseeded = itertools.count(), itertools.count()
        self.tasks(split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split; raises ConfigError for one that has none."""
        return tasks_of(self._prototype, split)

    def choose(self, start: Start) -> tuple[Task, int]:
        """The task of a reset and the seed of its episode; raises ConfigError if there is none.

        Without a name and a seed, tasks come in the order of the split, over all sessions.
        """
        number = next(self._unseeded) if start.seed is None else start.seed
        if start.task_id is not None:
            if start.index is not None or start.split is not None:
                raise ConfigError(
                    "reset got task_id beside split or index; expected one of the two"
                )
            return self._finder.find(start.task_id), number
        split, index = start.split or self.split, start.index
        if index is None:
            num_tasks = len(self.tasks(split))
            drawn = generator(number, "openenv-task").integers(num_tasks)
            index = int(drawn) if start.seed is not None else next(self._unnamed) % num_tasks
        return task_at(self._prototype, split, index, named="index"), number


class Session(Environment[TextAction, TextObservation, TextState]):
    """One client's episodes, one after the other."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._environment: TextEnvironment | None = None
        self._state = TextState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> TextObservation:
        """Begins an episode; raises ConfigError for options that are no `Start`."""
        start = validate_options(Start, {"seed": seed, **options}, where="reset")
        task, seed = self._world.choose(start)
        self._state = TextState()
        with _in_words():
            if self._environment is None:
                self._environment = self._world.make()
            text, _ = self._environment.reset(task, seed=seed)
        _refuse(text)
        self._state = TextState(
            episode_id=episode_id or str(uuid.uuid4()), task_id=task.task_id, seed=seed, done=False
        )
        return TextObservation(
            text=text,
            metadata={"task_id": task.task_id, "split": task.split, "category": task.category},
        )

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        """Executes any text. Where no episode is under way, says so and changes nothing."""
        before = self._state
        if before.done or self._environment is None:
            return TextObservation(text=NO_EPISODE, reward=0.0, done=True, success=before.success)
        with _in_words():
            answer = checked_step(self._environment, action.text)
        text, reward, terminated, truncated, info = answer
        success = bool(info.get("success", False))
        self._state = before.model_copy(
            update={
                "step_count": before.step_count + 1,
                "episode_return": before.episode_return + float(reward),
                "done": terminated or truncated,
                "success": success,
            }
        )
        return TextObservation(
            text=text,
            reward=float(reward),
            done=terminated or truncated,
            success=success,
            invalid_action=bool(info.get("invalid_action", False)),
        )

    def close(self) -> None:
        """Closes the environment; called by the server at the end of the session."""
        environment, self._environment = self._environment, None
        if environment is not None:
            close_environment(environment)

    @property
    def state(self) -> TextState:
        """How far the present episode is."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Name and version of the environment, and its rules."""
        properties = self._world.properties
        return EnvironmentMetadata(
            name=properties.name, description=properties.rules, version=properties.version
        )

    # OpenEnv's task API (`openenv.core.env_server.interfaces.TaskProvider`).

    def list_splits(self) -> list[str]:
        return list(self._world.properties.splits)

    def num_tasks(self, split: str) -> int:
        return len(self._world.tasks(split))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """The first tasks of a split, at most MAX_LISTED_TASKS."""
        return self.get_task_range(split)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        tasks = self._world.tasks(split)
        if not 0 <= index < len(tasks):
            raise IndexError(index)
        return _described(tasks[index], index)

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        tasks = self._world.tasks(split)
        numbers = range(*slice(start, stop).indices(len(tasks)))[:MAX_LISTED_TASKS]
        return [_described(tasks[number], number) for number in numbers]


def _described(task: Task, index: int) -> dict[str, Any]:
    """What a client may know of a task: not its payload, which may hold the solution."""
    return {
        "task_id": task.task_id,
        "split": task.split,
        "index": index,
        "category": task.category,
        "instruction": task.instruction,
    }


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Turns a failure of an environment into an answer, which names it and keeps the server."""
    try:
        yield
    except RagenApoError:
        raise
    except FOREIGN_FAILURES as error:
        raise EnvironmentFaultError(
            f"the environment raised {exception_in_words(error)}; its code has to be repaired"
        ) from error


def _refuse(text: object) -> None:
    if problem := problem_with_text(text):
        raise EnvironmentFaultError(f"the environment's observation: {problem}")
