"""Evaluated episodes for people: records that print turn by turn.

Consumes `evaluation/episodes.jsonl` of a run. Text of the policy and the environment that would
steer a terminal is escaped where it is printed; the records keep it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import read_records
from ragen_apo.printable import printable, shortened
from ragen_apo.report.load import evaluation_command
from ragen_apo.report.style import counted, measured, signed
from ragen_apo.run_directory import RunDirectory
from ragen_apo.types import Task

MAX_TEXT_CHARACTERS = 700


class EpisodeTurn(BaseModel, frozen=True):
    """One exchange, without its tokens."""

    observation: str
    thought: str
    action: str
    """Empty where none could be read from the response."""
    response: str
    reward: float
    flags: tuple[str, ...]


class Episode(BaseModel, frozen=True):
    """An episode of an evaluation; `print(episode)` tells it turn by turn."""

    index: int = Field(alias="episode")
    """Its number in the evaluation, from 0."""
    task: Task
    success: bool
    episode_return: float = Field(alias="return")
    num_turns: int
    stop_reason: str
    failure: str | None
    """The pattern of its failure, if it has failed."""
    final_observation: str
    metrics: Mapping[str, float] = Field(default_factory=dict)
    """What the environment measured besides the reward."""
    turns: tuple[EpisodeTurn, ...]

    def __str__(self) -> str:
        return printable(readable_episode(self.model_dump(by_alias=True)))


def read_episodes(run: RunDirectory) -> list[Episode]:
    """The episodes of the run's last evaluation.

    Raises RunDirectoryError if it was not evaluated or the file is damaged.
    """
    if not run.episodes.exists():
        raise RunDirectoryError(
            f"{run.path} was not evaluated: {run.episodes} is missing. Run "
            f"`{evaluation_command(run)}` first"
        )
    return read_records(run.episodes, TypeAdapter(Episode))


def readable_episode(row: Mapping[str, Any]) -> str:
    """An episode as plain text for people: what the agent read, thought, did and earned."""
    task = row.get("task") or {}
    lines = [
        f"{task.get('category', '')}: {task.get('instruction', '')}",
        f"return {signed(row.get('return'))} in {counted(row.get('num_turns'), 'turn')}; "
        f"{row.get('stop_reason', '')}",
    ]
    if row.get("metrics"):
        lines.append(f"measured: {measured(row['metrics'])}")
    for number, turn in enumerate(row.get("turns") or (), 1):
        reward, flags = signed(turn.get("reward")), ", ".join(map(str, turn.get("flags") or ()))
        lines += ["", f"--- turn {number}   reward {reward}{f'   [{flags}]' if flags else ''}"]
        lines.append(_entry("reads", turn.get("observation")))
        if turn.get("thought"):
            lines.append(_entry("thinks", turn.get("thought")))
        action = turn.get("action")
        lines.append(_entry("does", action) if action else _entry("wrote", turn.get("response")))
    lines += ["", "--- end", _entry("answer", row.get("final_observation"))]
    return "\n".join(lines)


def _entry(label: str, value: object) -> str:
    """A labelled text whose further lines are indented under its first."""
    text = shortened(str(value or "").strip(), MAX_TEXT_CHARACTERS)
    return f"{label:<8}" + text.replace("\n", "\n" + " " * 8)
