"""The goals that people shop for, and what an agent did on the same ones.

Consumes an environment and, if there is one, a run with an evaluation. Its episodes stay in the
file; where each begins is kept, so that a large evaluation takes little memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ragen_apo.environments.base import TextEnvironment, tasks_of
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import broken_line, parse_json, parse_record
from ragen_apo.report.episodes import Episode
from ragen_apo.report.load import evaluation_command, read_config
from ragen_apo.run_directory import open_evaluated
from ragen_apo.types import Task

MAX_EPISODES_SHOWN = 3


_EPISODE = TypeAdapter(Episode)


@dataclass(frozen=True)
class AgentEpisodes:
    """The evaluated episodes of a run, by task; none without a run."""

    name: str = ""
    """The run's name, as pages show it."""
    path: Path | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)
    """The tasks by id, in the order in which they were first played."""
    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Where the episodes of a task begin in the file, in bytes."""

    @property
    def split(self) -> str:
        """The split of its tasks; empty if there are several or none."""
        splits = {task.split for task in self.tasks.values()}
        return splits.pop() if len(splits) == 1 else ""

    def of(self, task: Task) -> list[Episode]:
        """The first episodes of a task; raises RunDirectoryError if the file has changed."""
        if self.path is None:
            return []
        episodes = []
        with self.path.open("rb") as stream:
            for offset in self.offsets.get(task.task_id, ())[:MAX_EPISODES_SHOWN]:
                stream.seek(offset)
                try:
                    episode = parse_record(_EPISODE, parse_json(stream.readline()))
                    if episode.task.task_id != task.task_id:
                        raise ValueError("it is of another task now")
                except ValueError as error:
                    raise RunDirectoryError(
                        f"{self.path} was changed since the shop was opened ({error}); start the "
                        "shop again"
                    ) from error
                episodes.append(episode)
        return episodes


def agent_episodes(run_path: Path) -> AgentEpisodes:
    """The episodes of a run's last evaluation.

    Raises RunDirectoryError if it was not evaluated or the file is damaged.
    """
    run = open_evaluated(run_path)
    if not run.episodes.is_file():
        raise RunDirectoryError(
            f"{run_path} was not evaluated: {run.episodes} is missing. Run "
            f"`{evaluation_command(run)}` first"
        )
    offsets: defaultdict[str, list[int]] = defaultdict(list)
    tasks: dict[str, Task] = {}
    with run.episodes.open("rb") as stream:
        offset = 0
        for number, line in enumerate(stream, 1):
            try:
                task = parse_record(_EPISODE, parse_json(line)).task
            except ValueError as error:
                raise broken_line(run.episodes, number, f"cannot be used ({error})") from error
            tasks.setdefault(task.task_id, task)
            offsets[task.task_id].append(offset)
            offset += len(line)
    return AgentEpisodes(run_path.resolve().name, run.episodes, tasks, offsets)


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
    path = run.evaluation if run.evaluation.is_file() else run.config
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
    return [task for task in agent.tasks.values() if split in ("all", task.split)] or tasks
