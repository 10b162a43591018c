"""The interface of text environments, and their names.

An environment turns a `Task` into text observations and rewards with Gymnasium's five-tuple
semantics. It holds one episode at a time; whatever many episodes share (a catalogue, an index) is
immutable and shared between instances. No torch here.
"""

import contextlib
import difflib
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from numbers import Integral, Real
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel, ValidationError

from ragen_apo.config.messages import describe_problems
from ragen_apo.config.named_code import ENVIRONMENT, FOREIGN_FAILURES, referenced_code
from ragen_apo.config.references import is_reference
from ragen_apo.environments.foreign import call_factory, plugin_factory, refuse_other_parameters
from ragen_apo.environments.tools import Tool
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.printable import raised_in_words, shortened
from ragen_apo.types import Task

ENTRY_POINT_GROUP = "ragen_apo.environments"


@dataclass(frozen=True)
class PatternWords:
    """A report's words for one failure pattern; empty for its own neutral words."""

    name: str = ""
    meaning: str = ""
    advice: str = ""
    """The remedy; keys of the configuration in backticks."""


@dataclass(frozen=True)
class FailureWords:
    """An environment's words for the failure patterns (`evaluation.failures`)."""

    unreadable: PatternWords = PatternWords()
    """Most responses held no action that could be read."""
    impossible: PatternWords = PatternWords()
    """Most actions could be read and not be executed."""
    wrong_final_action: PatternWords = PatternWords()
    """The environment ended the episode, without success."""
    loop: PatternWords = PatternWords()
    """The same action was repeated until the episode was cut off."""
    unreachable_target: PatternWords = PatternWords()
    """Cut off, and the goal was never on screen."""
    timeout: PatternWords = PatternWords()
    """Cut off for another reason."""


@dataclass(frozen=True)
class EnvironmentProperties:
    """The declared properties of an environment. Raises ConfigError for bounds that cannot be."""

    name: str
    version: str
    """Changes whenever data, text or dynamics change: it is part of the key of a stored return."""
    reward_version: str
    """Changes whenever the rewards of the same episode change."""
    deterministic: bool
    """The same task and actions always give the same observations and rewards."""
    return_range: tuple[float, float]
    """Bounds of the return of one episode."""
    splits: tuple[str, ...]
    rules: str
    """How to act and what counts; offered to the context manager as system prompt."""
    category_weights: Mapping[str, float] = field(default_factory=dict)
    """Relative frequency of each category's tasks in training; positive, for all categories. Empty
    if all tasks are equally frequent."""
    data: str = ""
    """The data of its tasks in words, where the machine or an option decides it."""
    max_turns: int | None = None
    """The longest episode in turns; None if unknown."""
    failure_words: FailureWords = FailureWords()
    """Words for reports, where the neutral ones do not fit."""
    tools: tuple[Tool, ...] = ()
    """The actions as functions that a model may call (`agent.response_format: tool_call`)."""

    def __post_init__(self) -> None:
        if not _is_range(self.return_range):
            raise ConfigError(
                f"properties of {self.name!r}: return_range is {self.return_range!r:.80}; expected "
                "a tuple of two finite numbers, the lowest return of an episode and the highest"
            )
        limit = self.max_turns
        is_number = isinstance(limit, Integral) and not isinstance(limit, bool)
        if limit is not None and not (is_number and limit >= 1):
            raise ConfigError(
                f"properties of {self.name!r}: max_turns is {limit!r:.80}; expected a whole number "
                "from 1, or None if it is not known"
            )


def _is_range(bounds: object) -> bool:
    """Whether these are two finite numbers in order."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        return False
    if not all(isinstance(each, Real) and not isinstance(each, bool) for each in bounds):
        return False
    return -math.inf < bounds[0] <= bounds[1] < math.inf


@dataclass(frozen=True)
class Reply:
    """One turn of a scripted policy."""

    thought: str
    action: str
    is_mistake: bool = False
    """An error on purpose, to show how to recover: not imitated."""


class ScriptedPolicy(Protocol):
    """A policy written by hand: a teacher, a baseline, an oracle. It reads text like the model."""

    def begin(self, task: Task, *, seed: int) -> None:
        """Starts an episode. Only an oracle may look at the task's payload."""
        ...

    def act(self, observation: str) -> Reply:
        """The reply to one observation."""
        ...


class HasTasks(Protocol):
    """An environment, or a pool of them."""

    @property
    def properties(self) -> EnvironmentProperties:
        """The declared properties; they never change."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split in a fixed order; raises ConfigError for an unknown split."""
        ...

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        """Policies by name; `random` and `heuristic` are the baselines of an evaluation."""
        ...


class TextEnvironment(HasTasks, Protocol):
    """One episode at a time, text in and text out.

    It may also have `close()`, which gives back what it holds (`close_environment`).
    """

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode and returns its first observation and info."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Executes any text: observation, reward, terminated, truncated, info.

        No text makes it raise. Text that is no action changes nothing, costs a turn and is answered
        with the possible actions. `info` may hold `success` (bool, at the end),
        `invalid_action` (bool), `flags` (strings for `Turn.flags`) and `metrics` (numbers by name,
        for `Trajectory.metrics`).
        """
        ...

    def state_key(self) -> str:
        """Equal keys mean equal futures: task, page and all that later rewards depend on."""
        ...


@contextlib.contextmanager
def opened_environment(
    name: str | Callable[..., TextEnvironment], options: Mapping[str, Any]
) -> Iterator[TextEnvironment]:
    """As `make_environment`; closed at the end. Raises EnvironmentFaultError where that raises,
    unless the block has raised something already.
    """
    environment = make_environment(name, options)
    try:
        yield environment
    except BaseException:
        with contextlib.suppress(*FOREIGN_FAILURES):
            close_environment(environment)
        raise
    try:
        close_environment(environment)
    except FOREIGN_FAILURES as error:
        raise EnvironmentFaultError(
            f"the environment {environment.properties.name!r}: closing it raised "
            f"{raised_in_words(error)}; its code has to be repaired"
        ) from error


def close_environment(environment: TextEnvironment) -> None:
    """Calls its `close()`, if it has one: nothing is asked of it afterwards."""
    getattr(environment, "close", lambda: None)()


def tasks_of(environment: HasTasks, split: str) -> Sequence[Task]:
    """The tasks of a split; raises ConfigError, with the splits to take, for one that has none."""
    splits = environment.properties.splits
    tasks = environment.tasks(split) if split in splits else ()
    if not tasks:
        others = " or ".join(filter(environment.tasks, splits)) or "other options"
        raise ConfigError(f"the split {shortened(repr(split), 80)} has no tasks; expected {others}")
    return tasks


def policies_of(environment: HasTasks) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """Its scripted policies by name; raises EnvironmentFaultError for what makes none."""
    policies = environment.scripted_policies()
    if not isinstance(policies, Mapping):
        raise EnvironmentFaultError(
            f"the environment {environment.properties.name!r}: scripted_policies returned "
            f"{shortened(repr(policies), 80)}; expected a dictionary of names and of what makes a "
            "policy, empty where there are none"
        )
    for name, make_policy in policies.items():
        if not callable(make_policy):
            kind = type(make_policy).__name__
            raise EnvironmentFaultError(
                f"the environment {environment.properties.name!r}: the scripted policy {name!r} is "
                f"an object of {kind}; expected what makes one for each episode, such as the class "
                "itself, without calling it"
            )
    return policies


def task_at(environment: HasTasks, split: str, index: int, *, named: str = "--task") -> Task:
    """A task by its number, from 0; raises ConfigError as `tasks_of`, and for other numbers."""
    tasks = tasks_of(environment, split)
    if not 0 <= index < len(tasks):
        raise ConfigError(f"{named} must be from 0 to {len(tasks) - 1} in {split!r}, got {index}")
    return tasks[index]


class TaskFinder:
    """Finds an environment's tasks by their ids. Of each split it reads all tasks once."""

    def __init__(self, environment: HasTasks) -> None:
        self._environment = environment
        self._indices: dict[str, dict[str, int]] = {}

    def find(self, task_id: str, splits: Sequence[str] | None = None) -> Task:
        """A task of any split, or of these; raises ConfigError where none has the id."""
        splits = splits or self._environment.properties.splits
        for split in splits:
            index = self._of(split).get(str(task_id))
            if index is not None:
                return self._environment.tasks(split)[index]
        raise ConfigError(
            f"no task has the id {shortened(repr(task_id), 80)}; expected the task_id of a task of "
            f"the split {' or '.join(splits)} of this environment under its present options"
        )

    def _of(self, split: str) -> dict[str, int]:
        if split not in self._indices:
            tasks = self._environment.tasks(split)
            self._indices[split] = {task.task_id: index for index, task in enumerate(tasks)}
        return self._indices[split]


_BUILT_IN: dict[str, str] = {
    "bandit": "ragen_apo.environments.bandit:make_bandit",
    "countdown": "ragen_apo.environments.countdown.environment:make_countdown",
    "frozen_lake": "ragen_apo.environments.frozen_lake:make_frozen_lake",
    "mixture": "ragen_apo.environments.mixture:MixtureEnvironment",
    "questions": "ragen_apo.environments.questions.environment:make_questions",
    "shop": "ragen_apo.environments.shop:ShopEnvironment",
    "sokoban": "ragen_apo.environments.sokoban.environment:make_sokoban",
    "textworld": "ragen_apo.environments.textworld:make_textworld",
    "webshop": "ragen_apo.environments.webshop:WebShopEnvironment",
}

_Options = TypeVar("_Options", bound=BaseModel)


def environment_names() -> tuple[str, ...]:
    """Every name that `make_environment` accepts, built-in or from an installed plugin, sorted."""
    plugins = {plugin.name for plugin in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*_BUILT_IN, *plugins}))


def make_environment(
    name: str | Callable[..., TextEnvironment], options: Mapping[str, Any]
) -> TextEnvironment:
    """A new environment; raises ConfigError for an unknown name or unusable options.

    `name` is a built-in environment, a plugin (an entry point of the group
    `ragen_apo.environments`; built-in names come first), a reference to a factory,
    `path.py:function` or `module:function`, or the factory itself. Raises EnvironmentFaultError if
    foreign code fails.
    """
    keywords = {str(key): value for key, value in options.items()}
    if not isinstance(name, str):
        return cast(TextEnvironment, call_factory(repr(name), name, keywords))
    if name in _BUILT_IN:
        return pkgutil.resolve_name(_BUILT_IN[name])(**keywords)
    made = cast(TextEnvironment, call_factory(name, _foreign_factory(name), keywords))
    if not isinstance(made.properties, EnvironmentProperties):
        raise EnvironmentFaultError(
            f"the environment {name!r}: properties is {shortened(repr(made.properties), 80)}; "
            "expected an attribute that is an EnvironmentProperties"
        )
    refuse_other_parameters(name, made)
    return made


def _foreign_factory(name: str) -> object:
    if is_reference(name):
        return referenced_code(name, ENVIRONMENT)
    for plugin in entry_points(group=ENTRY_POINT_GROUP, name=name):  # reads all that is installed
        return plugin_factory(plugin)
    known = environment_names()
    close = difflib.get_close_matches(name, known, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(
        f"environment.name: got {shortened(repr(name), 80)}, expected one of {', '.join(known)}"
        f"{meant}; a plugin is found once its package is installed, and one of your own as "
        "path.py:function"
    )


def validate_options(
    model_class: type[_Options], options: Mapping[str, Any], where: str = "environment"
) -> _Options:
    """The options as a checked record. Raises ConfigError with a line for each wrong key."""
    try:
        return model_class.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError("\n".join(describe_problems(error, model_class, where=where))) from error
