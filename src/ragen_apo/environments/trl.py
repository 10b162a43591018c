"""Any text environment for TRL's `GRPOTrainer`, as a tool that the model calls.

    from ragen_apo.environments.trl import environment_factory, task_rows

    trainer = GRPOTrainer(
        model,
        train_dataset=Dataset.from_list(task_rows("shop", split="train")),
        environment_factory=environment_factory("shop"),
        args=...,
    )

TRL makes the tool's description from `ToolEnvironment.act`, calls `reset` with the columns of a row
before each rollout and `get_reward` after it. TRL itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragen_apo.environments.base import (
    TaskFinder,
    TextEnvironment,
    make_environment,
    opened_environment,
    tasks_of,
)

OVER = "The episode is over. Do not act any more."


class ToolEnvironment:
    """One rollout at a time. All rollouts of a row play the same task with the same seed."""

    def __init__(
        self, environment: TextEnvironment, *, seed: int = 0, finder: TaskFinder | None = None
    ) -> None:
        """`finder` may be that of another environment with the same tasks."""
        self._environment = environment
        self._finder = finder or TaskFinder(environment)
        self._seed = seed
        self._return = 0.0
        self._over = True

    def reset(self, *, task_id: str, **_columns: Any) -> str:
        """Starts an episode of the task; returns the first observation, which ends the prompt.

        Raises ConfigError for a row that `task_rows` made of another environment.
        """
        task = self._finder.find(task_id)
        self._return, self._over = 0.0, False
        observation, _ = self._environment.reset(task, seed=self._seed)
        return observation

    def act(self, action: str) -> str:
        """Does one action and returns what can be seen after it.

        Args:
            action: The action as text, in the form that the task describes.

        Returns:
            What can be seen now, or that the episode is over.
        """
        if self._over:
            return OVER
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self._return += reward
        self._over = terminated or truncated
        return f"{observation}\n{OVER}" if self._over else observation

    def get_reward(self) -> float:
        """The episode's return so far, in the environment's own unit."""
        return self._return


def environment_factory(
    environment: str | Callable[..., TextEnvironment], *, seed: int = 0, **options: Any
) -> Callable[[], ToolEnvironment]:
    """What `GRPOTrainer(environment_factory=...)` takes.

    Args:
        environment: A name that `ragen-apo train` knows, or a function that makes an environment;
            each rollout that is under way at the same time has one of its own.
        seed: Of every episode, for environments that draw.
        options: Of the environment.
    """
    finder: TaskFinder | None = None

    def make() -> ToolEnvironment:
        nonlocal finder
        made = make_environment(environment, options)
        finder = finder or TaskFinder(made)
        return ToolEnvironment(made, seed=seed, finder=finder)

    return make


def task_rows(
    environment: str | Callable[..., TextEnvironment], *, split: str = "train", **options: Any
) -> list[dict[str, Any]]:
    """The rows of a `Dataset`, one a task: `prompt`, a user message with the rules, and `task_id`.

    Raises ConfigError if the split has no task.
    """
    with opened_environment(environment, options) as made:
        tasks = tasks_of(made, split)
        message = {"role": "user", "content": f"{made.properties.rules}\n\n"}
        return [{"prompt": [message], "task_id": task.task_id} for task in tasks]
