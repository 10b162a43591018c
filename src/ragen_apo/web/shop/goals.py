"""The goals that people shop for, and what an agent did on the same ones.

Consumes an environment and, if there is one, a run with an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ragen_apo.environments.base import TextEnvironment, tasks_of
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import parse_record
from ragen_apo.report.episodes import Episode, read_episodes
from ragen_apo.report.load import read_config
from ragen_apo.run_directory import open_evaluated
from ragen_apo.types import Task

MAX_EPISODES_SHOWN = 3
"""Of a task; others are not kept in memory."""


@dataclass(frozen=True)
class AgentEpisodes:
    """The first evaluated episodes of a run on each task; none without a run."""

    name: str = ""
    """The run's name, as pages show it."""
    by_task: Mapping[str, Sequence[Episode]] = field(default_factory=dict)
    """By the id of their task, in the order in which the tasks were first played."""

    @property
    def tasks(self) -> Sequence[Task]:
        return [episodes[0].task for episodes in self.by_task.values()]

    @property
    def split(self) -> str:
        """The split of its tasks; all if there are several, empty if there are none."""
        splits = {task.split for task in self.tasks}
        return "all" if len(splits) > 1 else "".join(splits)

    def of(self, task: Task) -> Sequence[Episode]:
        return self.by_task.get(task.task_id, ())


def agent_episodes(run_path: Path) -> AgentEpisodes:
    """The episodes of a run's last evaluation; raises RunDirectoryError as `read_episodes`."""
    by_task: dict[str, list[Episode]] = {}
    for episode in read_episodes(open_evaluated(run_path)):
        of_task = by_task.setdefault(episode.task.task_id, [])
        if len(of_task) < MAX_EPISODES_SHOWN:
            of_task.append(episode)
    return AgentEpisodes(run_path.resolve().name, by_task)


class _Environment(BaseModel, frozen=True, extra="allow"):
    name: str

    @property
    def options(self) -> Mapping[str, Any]:
        return self.model_extra or {}


class _Evaluation(BaseModel, frozen=True):
    split: str


class ConfigOfRun(BaseModel, frozen=True):
    """The environment of a run, and the split that its configuration evaluates."""

    environment: _Environment
    evaluation: _Evaluation


def config_of_run(run_path: Path) -> ConfigOfRun:
    """What the configuration of a run, or of an evaluated model behind an API, says of it.

    Raises RunDirectoryError where there is none that can be read.
    """
    run = open_evaluated(run_path)
    path = run.api_config if run.is_of_api else run.config
    _, values = read_config(path)
    try:
        return parse_record(TypeAdapter(ConfigOfRun), values)
    except ValueError as error:
        raise RunDirectoryError(f"{path} {error}") from error


def goals_of(environment: TextEnvironment, split: str, agent: AgentEpisodes) -> Sequence[Task]:
    """The tasks of a split on which the agent has played, else all of them, in their order.

    Raises ConfigError for a split without tasks.
    """
    tasks = tasks_of(environment, split)
    return [task for task in agent.tasks if split in ("all", task.split)] or tasks
