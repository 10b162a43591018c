"""An environment that has Gymnasium's `reset` and `step`, as a text environment.

Gymnasium itself is not imported: GEM's environments and classes of your own have the same methods.
A task is a seed, with which the environment is reset. docs/existing_environments.md has examples.
"""

import contextlib
import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ragen_apo.environments.base import EnvironmentProperties, ScriptedPolicy, close_environment
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.environments.toolkit.global_generators import (
    borrowed_generators,
    generator_states,
    seed_generators,
    set_generators,
)
from ragen_apo.environments.toolkit.scripted import RandomActions
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.plural import counted
from ragen_apo.printable import raised_in_words
from ragen_apo.types import Task, make_task

_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


def from_gymnasium(  # noqa: PLR0913 (what Gymnasium does not know of an environment)
    make: Callable[[], Any],
    *,
    name: str,
    version: str,
    rules: str,
    instruction: str,
    splits: Mapping[str, Sequence[int]],
    max_turns: int,
    return_range: tuple[float, float],
    is_success: Callable[[float, Mapping[str, Any]], bool],
    is_invalid: Callable[[float, Mapping[str, Any]], bool] = lambda reward, info: False,
    actions: Sequence[str] = (),
    observe: Callable[[Any], str] = str,
    policies: Mapping[str, Callable[[], ScriptedPolicy]] | None = None,
    own_generators: bool = True,
) -> GameEnvironment:
    """The text environment that plays what `make` makes, one episode after another.

    Args:
        make: called once, before the first episode. A run makes as many text environments as it
            plays episodes at a time. What `make` returns has `reset(seed=...)`, which returns an
            observation and a mapping, and `step(action)`, which returns an observation, a reward,
            whether the episode has terminated, whether it was truncated, and a mapping; and
            `close()` if it holds anything.
        name: of the environment.
        version: changes with texts, dynamics and rewards, such as the version of their package.
        rules: how to act, offered as system prompt.
        instruction: what the agent is to do; stands before the first observation.
        splits: the seeds of each split; each is a task.
        max_turns: the longest episode.
        return_range: bounds of the sum of an episode's rewards.
        is_success: whether an episode that `make`'s environment has ended is a success, from the
            last reward and mapping. Also asked where it was truncated, as by a time limit.
        is_invalid: whether a text was no action, from the reward and the mapping.
        actions: names of the actions 0, 1, 2, ... of an environment whose actions are numbers. A
            text that is none of them costs a turn, and the environment does not see it. Without
            names the environment gets the text. A `Discrete` action space has to have as many; to
            leave some out, let `make` wrap it in one with a smaller action space.
        observe: the text of an observation.
        policies: scripted policies by name. Where actions have names, the policies `random` and
            `teacher` that are not given draw them at random.
        own_generators: give each episode generators of its own in the place of `random` and
            `numpy.random`, which many environments use and all would share. Then environments in
            threads (`rollouts.num_environment_workers`) act one after another. `False` is for one
            that draws from nothing but generators of its own.

    Raises ConfigError where `make` cannot be called, two splits have a seed in common, or two
    actions a name, and TypeError where a seed is no whole number.
    """
    if not callable(make):
        instead = "the class itself, without calling it"
        if isinstance(make, str):
            instead = f"lambda: gymnasium.make({make!r:.60})"
        raise ConfigError(
            f"{name}, make: got an object of {type(make).__name__}; expected what makes one, such "
            f"as {instead}"
        )
    _require_distinct(name, splits=splits, actions=actions)
    foreign = _Foreign(make, observe, own_generators, num_actions=len(actions))
    drawn = functools.partial(RandomActions, tuple(actions), 1)

    def start(task: Task, _: int) -> _Episode:
        return _Episode(foreign, task, actions, is_success, is_invalid)

    return _Wrapped(
        foreign,
        start=start,
        properties=EnvironmentProperties(
            name=name,
            version=version,
            reward_version=version,
            deterministic=True,
            return_range=return_range,
            splits=tuple(splits),
            rules=rules,
        ),
        tasks={
            split: [
                make_task(
                    environment=name,
                    instruction=instruction,
                    split=split,
                    category=name,
                    payload={"seed": operator.index(seed)},
                )
                for seed in seeds
            ]
            for split, seeds in splits.items()
        },
        policies={**({"random": drawn, "teacher": drawn} if actions else {}), **(policies or {})},
        max_turns=max_turns,
    )


def _require_distinct(
    name: str, *, splits: Mapping[str, Sequence[int]], actions: Sequence[str]
) -> None:
    for one, other in itertools.combinations(splits, 2):
        if common := sorted({*splits[one]} & {*splits[other]}):
            raise ConfigError(
                f"{name}, splits: {one} and {other} have seeds in common, such as {common[0]}; "
                "expected other seeds in each, or training tasks would be test tasks"
            )
    if len({action.strip().lower() for action in actions}) < len(actions):
        raise ConfigError(
            f"{name}, actions: two have the same name but for case and spaces around it, and the "
            f"agent could never choose one of them; got {', '.join(actions)}"
        )


def _problem_with_names(environment: Any, num_names: int) -> str | None:
    """Each action of a `Discrete` space, from 0 on, has a name where actions have names."""
    space: Any = getattr(environment, "action_space", None)
    is_discrete = any(kind.__name__ == "Discrete" for kind in type(space).__mro__)
    first = getattr(space, "start", 0)
    if not num_names or not is_discrete or (space.n, first) == (num_names, 0):
        return None
    advice = ""
    if first:
        advice = ". Numbers begin at 0 here: shift them (gymnasium.wrappers.TransformAction)"
    elif num_names < space.n:
        advice = (
            ". To leave the last ones out, wrap it in an environment with a smaller action space "
            "(gymnasium.wrappers.TransformAction)"
        )
    kind = type(getattr(environment, "unwrapped", environment)).__name__
    return (
        f"actions: got {counted(num_names, 'name')}, and the action space of {kind} is {space}; "
        f"expected one for each action, in their order{advice}"
    )


class _Foreign:
    """The environment, made when it is first needed; it keeps generators of its own."""

    def __init__(
        self,
        make: Callable[[], Any],
        observe: Callable[[Any], str],
        own_generators: bool,
        *,
        num_actions: int,
    ) -> None:
        self._make, self._observe, self._num_actions = make, observe, num_actions
        self._drawing = self._with_own_generators if own_generators else contextlib.nullcontext
        self._environment: Any = None
        self._states: tuple[Any, Any] | None = None

    def reset(self, seed: int) -> str:
        """The first observation of an episode; its draws are a function of the seed."""
        self._states = None
        with self._drawing():
            if self._environment is None:
                seed_generators(0)  # the first episode's seed would make it another one
                made = self._make()
                if problem := _problem_with_names(made, self._num_actions):
                    getattr(made, "close", lambda: None)()
                    raise EnvironmentFaultError(problem)
                self._environment = made
            seed_generators(seed)
            answer = self._asked("reset(seed=...)", _RESET, lambda it: it.reset(seed=seed))
        return self._observe(answer[0])

    def step(self, action: Any) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        with self._drawing():
            answer = self._asked("step(action)", _STEP, lambda it: it.step(action))
        observation, reward, terminated, truncated, info = answer
        return self._observe(observation), float(reward), bool(terminated), bool(truncated), info

    def _asked(self, what: str, names: Sequence[str], ask: Callable[[Any], Any]) -> Sequence[Any]:
        """Its answer, which has to have these parts."""
        kind, expected = type(self._environment).__name__, ", ".join(names)
        try:
            answer = ask(self._environment)
        except TypeError as error:
            is_deeper = error.__traceback__.tb_next.tb_next  # pyright: ignore[reportOptionalMemberAccess]
            if is_deeper:
                raise
            raise EnvironmentFaultError(
                f"{kind}.{what} raised {raised_in_words(error)}. It has to take what is named here "
                f"and to return {expected}; docs/existing_environments.md has wrappers for others"
            ) from error
        is_sequence = isinstance(answer, (tuple, list))
        if not is_sequence or len(answer) != len(names):
            found = f"{len(answer)} values" if is_sequence else type(answer).__name__
            raise EnvironmentFaultError(
                f"{kind}.{what} returned {found}; expected {expected}. "
                "docs/existing_environments.md has wrappers for others"
            )
        return answer

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            close_environment(environment)

    @contextlib.contextmanager
    def _with_own_generators(self) -> Iterator[None]:
        """The global generators are where this episode left them."""
        with borrowed_generators():
            if self._states is not None:
                set_generators(self._states)
            yield
            self._states = generator_states()


class _Episode:
    """One episode, a `Game`. Its state is what was done so far."""

    def __init__(
        self,
        foreign: _Foreign,
        task: Task,
        actions: Sequence[str],
        is_success: Callable[[float, Mapping[str, Any]], bool],
        is_invalid: Callable[[float, Mapping[str, Any]], bool],
    ) -> None:
        self._actions = {action.strip().lower(): index for index, action in enumerate(actions)}
        self._hint = f"Invalid action. Use one of: {', '.join(actions)}."
        self._is_success, self._is_invalid = is_success, is_invalid
        self._foreign, self._instruction = foreign, task.instruction
        self._seed: int = task.payload["seed"]
        self._so_far = hashlib.sha256()

    def first_observation(self) -> str:
        """Begins the episode."""
        return f"TASK: {self._instruction}\n{self._foreign.reset(self._seed)}"

    def play(self, text: str) -> Answer:
        # A lone surrogate, which is no Unicode, would come back in an observation.
        action: str | int = text.encode("utf-8", "replace").decode()
        if self._actions:
            index = self._actions.get(text.strip().lower())
            if index is None:
                return Answer(self._hint, invalid=True)
            action = index
        self._so_far.update(f"{action!r}\n".encode())
        observation, reward, terminated, truncated, info = self._foreign.step(action)
        return Answer(
            observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            success=(terminated or truncated) and bool(self._is_success(reward, info)),
            invalid=bool(self._is_invalid(reward, info)),
        )

    def key(self) -> str:
        return self._so_far.hexdigest()


class _Wrapped(GameEnvironment):
    """Plays every episode with the same environment."""

    def __init__(self, foreign: _Foreign, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._foreign = foreign

    def close(self) -> None:
        super().close()
        self._foreign.close()
