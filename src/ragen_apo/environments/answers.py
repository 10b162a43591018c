"""Checks of an environment's answers; each returns the problem in words, or None."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np

from ragen_apo.config.named_code import FOREIGN_FAILURES, in_one_sentence
from ragen_apo.environments.base import EnvironmentProperties, TextEnvironment
from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.plural import counted
from ragen_apo.printable import shortened
from ragen_apo.types import Task, TurnFlag

MAX_UNDECLARED_TURNS = 1_000
"""The turn limit of an environment that declares no `max_turns`."""
MAX_SHOWN_CHARACTERS = 80
LARGEST_REWARD = 1e9
"""In absolute value, for a turn: float32 holds the squares of an episode's sum."""
TRUTHS_OF_INFO = ("success", "invalid_action")
"""Keys of `info` with truth values."""
_METRIC_NAME = re.compile(r"\w[\w.-]{0,59}", re.ASCII)
_FLAGS_OF_RESPONSES = frozenset(
    flag.value for flag in (TurnFlag.FORMAT_ERROR, TurnFlag.RESPONSE_TRUNCATED, TurnFlag.MISTAKE)
)


def turn_limit(properties: EnvironmentProperties) -> int:
    """The number of turns after which an episode has to be over."""
    declared = properties.max_turns
    return MAX_UNDECLARED_TURNS if declared is None else declared


def endlessness(properties: EnvironmentProperties) -> str:
    """The problem with an episode that is not over after `turn_limit` turns, and the remedy."""
    limit = f"an episode was not over after {counted(turn_limit(properties), 'turn')}"
    if properties.max_turns is None:
        return (
            f"{limit}. Set a turn limit where the environment has an option for it (max_turns); in "
            "its code, truncate episodes and declare properties.max_turns"
        )
    return f"{limit}, which its properties.max_turns declares; truncate it there"


def problem_with_text(text: object) -> str | None:
    """Text has to be UTF-8: no file and no tokenizer takes a lone surrogate."""
    if not isinstance(text, str):
        return f"{_shown(text)} is no text"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.start + 20]
        return f"a lone surrogate stands in the text {around!r}; replace it where the data is read"
    return None


def problem_with_reward(reward: object) -> str | None:
    """A reward is a number within +-`LARGEST_REWARD`, of Python or of a library such as numpy."""
    if problem := _problem_with_number("the reward", reward):
        return problem
    # As Python's number: the smallest int32 of numpy has no absolute value, a float16 no 1e9.
    if abs(float(reward)) > LARGEST_REWARD:  # pyright: ignore[reportArgumentType]
        return f"the reward is {_shown(reward)}; expected at most 1e9 in size: scale it down"
    return None


def _problem_with_number(name: str, value: object) -> str | None:
    if type(value) is float and math.isfinite(value):
        return None  # as nearly all are; a protocol takes its time
    try:
        is_finite = isinstance(value, SupportsFloat) and math.isfinite(value)
    except (OverflowError, TypeError, ValueError):  # a whole number too large, several numbers
        is_finite = False
    return None if is_finite else f"{name} is {_shown(value)}; expected a finite number"


def problem_with_reset(answer: object) -> str | None:
    """A reset answers with the first observation and a dictionary."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return f"reset answered {_shown(answer)}; expected (observation, info)"
    return problem_with_text(answer[0])


def problem_with_tasks(tasks: object, environment: str) -> str | None:
    """A list of tasks of the environment of this name, as files keep them."""
    if not isinstance(tasks, Sequence):
        return f"{_shown(tasks)}; expected a list of tasks"
    for task in tasks:
        if not isinstance(task, Task):
            return f"{_shown(task)} is among them; expected tasks, as `make_task` makes them"
        if task.environment != environment:
            return (
                f"task {task.task_id} has the environment {_shown(task.environment)}; expected the "
                f"name in properties, {environment!r}"
            )
        for name in ("task_id", "instruction", "split", "category"):
            if problem := problem_with_text(getattr(task, name)):
                return f"{name} of task {task.task_id}: {problem}; expected a text"
    try:  # of the first alone: large ones take a while
        json.dumps([task.payload for task in tasks[:1]], sort_keys=True)
    except (TypeError, ValueError) as error:
        return f"the payload of task {tasks[0].task_id}: {error}; expected JSON values"
    return None


def state_key_of(environment: TextEnvironment) -> str:
    """Its state's key. Raises EnvironmentFaultError for a tuple, say, which files do not keep."""
    name = environment.properties.name
    with in_one_sentence(name, "state_key"):
        key = environment.state_key()
    if key is not None and (problem := problem_with_text(key)):
        raise EnvironmentFaultError(
            f"the environment {name!r}: state_key: {problem}; expected a "
            "text, such as repr() of what it is made of"
        )
    return key


def problem_with_step(answer: object) -> str | None:
    """A step answers with text, a finite reward, two truth values and a dictionary."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        return (
            f"step answered {_shown(answer)}; expected (observation, reward, terminated, truncated,"
            " info)"
        )
    observation, reward, terminated, truncated, info = answer
    return (
        problem_with_text(observation)
        or problem_with_reward(reward)
        or _problem_with_truth("terminated", terminated)
        or _problem_with_truth("truncated", truncated)
        or problem_with_info(info)
    )


def checked_step(environment: Any, action: str) -> tuple[Any, ...]:
    """What `step` answers; raises EnvironmentFaultError for what `problem_with_step` finds."""
    answer = environment.step(action)
    if problem := problem_with_step(answer):
        raise EnvironmentFaultError(problem)
    return answer


def problem_with_info(info: object) -> str | None:
    """A dictionary, in which `success` and `invalid_action` are truth values.

    `flags`, where there are any, are a list or tuple of texts, none of them the agent's own.
    `metrics`, where there are any, are finite numbers by names that a file of metrics can have.
    """
    if not isinstance(info, Mapping):
        return f"info is {_shown(info)}; expected a dictionary"
    flags = info.get("flags", ())
    if not isinstance(flags, (list, tuple)) or not all(isinstance(flag, str) for flag in flags):
        return f"info['flags'] is {_shown(flags)}; expected a list of texts"
    if taken := [str(flag) for flag in flags if flag in _FLAGS_OF_RESPONSES]:
        return (
            f"info['flags'] has {', '.join(taken)}, which says something about the agent's "
            "response that no environment can know; give the flag another name"
        )
    problems = (
        _problem_with_truth(f"info[{name!r}]", info.get(name, False)) for name in TRUTHS_OF_INFO
    )
    return next(filter(None, problems), None) or _problem_with_metrics(info.get("metrics", {}))


def _problem_with_metrics(metrics: object) -> str | None:
    if not isinstance(metrics, Mapping):
        return f"info['metrics'] is {_shown(metrics)}; expected a dictionary of numbers"
    for name, value in metrics.items():
        if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
            return (
                f"info['metrics'] has the name {_shown(name)}; expected up to 60 letters, digits, "
                "'_', '-' and '.', such as tests_passed"
            )
        if problem := _problem_with_number(f"info['metrics'][{name!r}]", value):
            return problem
    return None


def _problem_with_truth(name: str, value: object) -> str | None:
    """Python's or NumPy's, or the numbers 0 and 1: the text `false` would count as true."""
    is_truth = isinstance(value, bool | int | np.bool_) and value in (0, 1)
    return None if is_truth else f"{name} is {_shown(value)}; expected true or false"


def _shown(value: Any) -> str:
    """The value, or its type where it has no text, as a whole number of 5,000 digits has none."""
    try:
        text = repr(value)
    except FOREIGN_FAILURES:
        text = f"<{type(value).__name__} without a text>"
    return shortened(text, MAX_SHOWN_CHARACTERS)
