"""Several environments as one, each with a weight.

    environment: {name: mixture, parts: {shop: {weight: 2, max_turns: 6}, frozen_lake: {size: 4}}}

A task of the mixture wraps a task of one part and has the part's name as its category, so results
by category are results by environment. Text, rewards, turn limit and scripted policies are the
part's. Weights are the parts' relative frequency in training
(`EnvironmentProperties.category_weights`), and set the order in which a split lists their tasks.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field

from ragen_apo.config.references import environment_of_part, is_reference
from ragen_apo.config.section import Positive, Section
from ragen_apo.environments.base import (
    EnvironmentProperties,
    Reply,
    ScriptedPolicy,
    TextEnvironment,
    close_environment,
    make_environment,
    policies_of,
    validate_options,
)
from ragen_apo.environments.policy_calls import begin_policy, reply_of
from ragen_apo.errors import ConfigError
from ragen_apo.shares import interleaved
from ragen_apo.types import Task, make_task

NAME = "mixture"


class PartOptions(Section):
    """One part; every further key is an option of its environment."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    """The environment; null for the one that the part is named after."""
    weight: Positive = 1.0
    """How often its tasks come up, relative to the other parts."""


class MixtureOptions(Section):
    """The options of the environment `mixture`."""

    parts: dict[str, PartOptions] = Field(min_length=1)
    """By name of an environment: its `weight` (1 if absent) and its options. With `name` a part is
    that environment, so one can be there twice."""
    max_turns: int | None = None
    """Turn limit of the parts that do not set their own; null for that of each environment."""


class MixtureEnvironment:
    """A `TextEnvironment` that hands each episode to the part that its task belongs to."""

    def __init__(self, /, **options: Any) -> None:
        checked = validate_options(MixtureOptions, options)
        self._parts: dict[str, TextEnvironment] = {}
        weights = {label: part.weight for label, part in checked.parts.items()}
        with contextlib.ExitStack() as made:
            for label, part in checked.parts.items():
                self._parts[label] = _make_part(label, part, max_turns=checked.max_turns)
                made.callback(close_environment, self._parts[label])
            self.properties = _combined(self._parts, weights)
            made.pop_all()  # the parts stay open where nothing was raised
        self._tasks: dict[str, tuple[Task, ...]] = {}
        self._playing: str | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The parts' tasks interleaved by weight; ConfigError where not all have the split."""
        if split not in self.properties.splits:
            raise ConfigError(
                f"the parts {', '.join(self._parts)} of the mixture do not all have the split "
                f"{split!r}; expected one of {', '.join(self.properties.splits)}"
            )
        if split not in self._tasks:
            wrapped = {
                label: [_wrapped(task, label) for task in part.tasks(split)]
                for label, part in self._parts.items()
            }
            self._tasks[split] = interleaved(wrapped, self.properties.category_weights)
        return self._tasks[split]

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts the episode in its part; raises ConfigError for a task of another environment."""
        label = part_of(task)
        if task.environment != NAME or label not in self._parts:
            raise ConfigError(
                f"mixture cannot set up task {task.task_id} of {label!r}; expected a task of its "
                f"parts {', '.join(self._parts)}"
            )
        part = self._parts[label]
        answer = part.reset(_unwrapped(task, part.properties.name), seed=seed)
        self._playing = label
        return answer

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._playing is None:
            raise RuntimeError("mixture has no episode yet; call reset(task, seed=...) before step")
        return self._parts[self._playing].step(action)

    def state_key(self) -> str:
        if self._playing is None:
            return "none"
        return f"{self._playing}:{self._parts[self._playing].state_key()}"

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        """The policies that every part has; each plays a task as the part's own does."""
        of_parts = {label: policies_of(part) for label, part in self._parts.items()}
        shared = set.intersection(*(set(policies) for policies in of_parts.values()))
        names = {label: part.properties.name for label, part in self._parts.items()}
        return {
            name: functools.partial(
                PartPolicy, {label: of_parts[label][name] for label in of_parts}, names
            )
            for name in sorted(shared)
        }

    def close(self) -> None:
        """Closes its parts."""
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.callback(close_environment, part)


class PartPolicy:
    """Plays each episode with the policy of the part that it belongs to."""

    def __init__(
        self, makers: Mapping[str, Callable[[], ScriptedPolicy]], environments: Mapping[str, str]
    ) -> None:
        self._policies = {label: make() for label, make in makers.items()}
        self._environments = environments

    def begin(self, task: Task, *, seed: int) -> None:
        label = part_of(task)
        self._policy = self._policies[label]
        begin_policy(self._policy, _unwrapped(task, self._environments[label]), seed=seed)

    def act(self, observation: str) -> Reply:
        return reply_of(self._policy, observation)


def part_of(task: Task) -> str:
    """The part that a task of a mixture belongs to; any other task's environment."""
    return task.payload["part"] if task.environment == NAME else task.environment


def _make_part(label: str, part: PartOptions, *, max_turns: int | None) -> TextEnvironment:
    where, name = f"environment.parts.{label}", environment_of_part(label, part.name)
    if not part.name and is_reference(label):
        raise ConfigError(
            f"environment.parts: {label!r} is no name for a part; give it one, such as "
            f"{{mine: {{name: '{label}'}}}}"
        )
    if name == NAME:
        raise ConfigError(
            f"{where}: a mixture cannot be a part of a mixture; list its parts here instead"
        )
    own = part.model_extra or {}
    limit = {} if max_turns is None or "max_turns" in own else {"max_turns": max_turns}
    try:
        return make_environment(name, {**limit, **own})
    except ConfigError as error:
        # A part names its keys as if it were the whole environment.
        own_names = re.compile(r"(^|did you mean | or )environment\b", re.MULTILINE)
        message = own_names.sub(lambda found: f"{found[1]}{where}", str(error))
        if limit and "max_turns" in message:
            message += ". This max_turns is environment.max_turns, which all parts get"
        raise ConfigError(message) from error


def _combined(
    parts: Mapping[str, TextEnvironment], weights: Mapping[str, float]
) -> EnvironmentProperties:
    properties = {label: part.properties for label, part in parts.items()}
    each = list(properties.values())
    rules = list(dict.fromkeys(part.rules for part in each))
    if len(rules) > 1:
        opening = "Every task is of one of these kinds, and its first text shows of which."
        rules = [opening, *(f"- {text}" for text in rules)]
    limits = [part.max_turns for part in each if part.max_turns is not None]
    return EnvironmentProperties(
        name=NAME,
        version=_of_parts(
            {label: f"{part.name} {part.version}" for label, part in properties.items()}
        ),
        reward_version=_of_parts(
            {label: part.reward_version for label, part in properties.items()}
        ),
        deterministic=all(part.deterministic for part in each),
        return_range=(
            min(part.return_range[0] for part in each),
            max(part.return_range[1] for part in each),
        ),
        splits=tuple(
            split for split in each[0].splits if all(split in part.splits for part in each)
        ),
        rules="\n".join(rules),
        category_weights=dict(weights),
        max_turns=max(limits) if len(limits) == len(each) else None,
        data=_of_parts({label: part.data for label, part in properties.items()}),
    )


def _of_parts(texts: Mapping[str, str]) -> str:
    """The parts' texts with their labels, empty ones left out."""
    return ", ".join(f"{label}={text}" for label, text in texts.items() if text)


def _wrapped(task: Task, label: str) -> Task:
    return make_task(
        environment=NAME,
        instruction=task.instruction,
        split=task.split,
        category=label,
        payload={"part": label, "category": task.category, "payload": dict(task.payload)},
    )


def _unwrapped(task: Task, environment: str) -> Task:
    return make_task(
        environment=environment,
        instruction=task.instruction,
        split=task.split,
        category=task.payload["category"],
        payload=task.payload["payload"],
    )
