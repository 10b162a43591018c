"""The games of a folder, as tasks.

    FOLDER/train/simple/one.z8, one.json                      made by TextWorld (`tw-make`)
    FOLDER/train/pick_and_place_simple-Mug-None-Desk-301/trial_T1/game.tw-pddl       of ALFWorld

Each subfolder is a split. A game's category is the first folder below it, up to its first hyphen.
A task is known by its category and the content of its game.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_apo.errors import EnvironmentDataError
from ragen_apo.printable import shortened
from ragen_apo.types import Task, make_task

NAME = "textworld"
COMPILED, PLANNED = ".z8", ".tw-pddl"
"""Suffixes: of a game that TextWorld compiled, with a file .json beside it, and of ALFWorld's."""
NO_CATEGORY = "game"
_LEFT_OUT = ("movable", "Sliced")
"""Parts of paths, of games that ALFWorld leaves out, as its engine cannot do what they ask for."""
_GOAL = re.compile(r"Your task is to: ([^\"\\]+)")
_SOLVABLE = re.compile(r'"solvable": ?true')


@dataclass(frozen=True)
class Games:
    """The tasks by split, and where the game of each is."""

    tasks: Mapping[str, Sequence[Task]]
    paths: Mapping[str, Path]
    """By the `sha256` of a task's payload."""

    def path(self, task: Task) -> Path:
        """Its game. Raises KeyError if it is not here, ValueError if the file has changed."""
        digest = task.payload["sha256"]
        path = self.paths[digest]
        if _digest(_contents(path)) != digest:
            raise ValueError(f"{path} has changed since its folder was read")
        return path


@functools.lru_cache(maxsize=4)
def games_in(folder: Path) -> Games:
    """All games below a folder; raises EnvironmentDataError where none can be used.

    The folder is read once in a process.
    """
    if not folder.is_dir():
        raise EnvironmentDataError(
            f"{folder}: no such folder; expected one with games, {_expected()}"
        )
    paths: dict[str, Path] = {}
    tasks: dict[str, Sequence[Task]] = {}
    for split in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = {task.task_id: (task, path) for task, path in _tasks(split)}
        paths |= {task.payload["sha256"]: path for task, path in found.values()}
        if found:  # by id, which mixes the categories: evaluations play the first ones
            tasks[split.name] = [found[task_id][0] for task_id in sorted(found)]
    if not tasks:
        raise EnvironmentDataError(
            f"{folder} has no games in its subfolders; expected {_expected()}"
        )
    return Games(tasks, paths)


def _expected() -> str:
    return (
        f"subfolders such as train and test with games of TextWorld (*{COMPILED} with a *.json "
        f"beside it) or ALFWorld (game{PLANNED})"
    )


def _tasks(split: Path) -> Iterator[tuple[Task, Path]]:
    for path in sorted(split.rglob("*")):
        below = path.relative_to(split)
        if path.suffix not in (COMPILED, PLANNED):
            continue
        contents = _contents(path)
        text = contents[-1].decode("utf-8", "replace")
        if path.suffix == PLANNED and not _is_playable(below, text):
            continue
        task = make_task(
            environment=NAME,
            instruction=_instruction(path, text),
            split=split.name,
            category=below.parts[0].partition("-")[0] if len(below.parts) > 1 else NO_CATEGORY,
            payload={"sha256": _digest(contents)},
        )
        yield task, path


def _contents(path: Path) -> list[bytes]:
    """Of the game's files; the last one is JSON."""
    files = [path] if path.suffix == PLANNED else [path, path.with_suffix(".json")]
    try:
        return [file.read_bytes() for file in files]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename != str(path):
            raise EnvironmentDataError(
                f"{path} has no {error.filename} beside it, which says when the game is won; "
                "expected both, as `tw-make` writes them"
            ) from error
        raise EnvironmentDataError(f"{path} cannot be read ({error.strerror})") from error


def _digest(contents: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _is_playable(path: Path, text: str) -> bool:
    """As ALFWorld decides it."""
    return bool(_SOLVABLE.search(text)) and not any(word in str(path) for word in _LEFT_OUT)


def _instruction(path: Path, text: str) -> str:
    if path.suffix == PLANNED:
        goal = _GOAL.search(text)
        if goal is None:
            raise EnvironmentDataError(f"{path}: expected a text with 'Your task is to:', got none")
        return goal[1].strip()
    try:
        game: Any = json.loads(text)
        objective = " ".join(game["objective"].split()) or "Win the game."
        quests = [(quest["reward"], bool(quest.get("repeatable"))) for quest in game["quests"]]
        highest = sum(reward for reward, _ in quests)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EnvironmentDataError(
            f"{path.with_suffix('.json')}: expected a game of TextWorld with its objective and "
            f"quests, got {shortened(repr(text), 60)}"
        ) from error
    if highest <= 0 or any(reward < 0 or is_repeatable for reward, is_repeatable in quests):
        raise EnvironmentDataError(
            f"{path}: expected quests that pay once and nothing below 0, and some that pay; got "
            f"{shortened(str(quests), 80)} (reward, repeatable)"
        )
    return objective
