"""An object whose methods a policy calls in one episode.

Its class is written nearly as for TRL's `environment_factory`: public methods are functions to
call, `reset` begins an episode, and `get_reward` decides what it was worth.
"""

import inspect
import math
import types
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.printable import raised_in_words

NO_TOOLS = ("reset", "get_reward", "close")
"""Public methods that the policy does not call; a class may have them."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ROUNDING = 1e-6
"""Of a reward: a sum of tenths may be just below 1."""


def gives_reward(kind: type) -> bool:
    """Whether the class decides what an episode is worth."""
    return hasattr(kind, "get_reward")


def methods_to_call(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods of a class by name, bound to nothing: for what they are, not to be called.

    No object is made, and no property computed.
    """
    methods = {}
    for name in dir(kind):
        if name.startswith("_") or name in NO_TOOLS:
            continue
        method = getattr(kind, name)
        if isinstance(method, type) or not callable(method):
            continue
        is_bound = isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod))
        methods[name] = method if is_bound else types.MethodType(method, object())
    return methods


def _wants_answer(judge: Callable[..., Any]) -> bool:
    """Whether it has a parameter of this name, or one that has to be given."""
    return any(
        each.name == "answer" or (each.default is each.empty and each.kind not in _VARIADIC)
        for each in inspect.signature(judge).parameters.values()
    )


class ToolObject:
    """An object of a class, made without arguments for one episode."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._made = self._asked("()", kind)
        self.gives_reward = gives_reward(kind)
        self._has_begun = not hasattr(kind, "reset")
        self.functions = {name: getattr(self._made, name) for name in methods_to_call(kind)}
        """To be called, by name; they raise what they raise."""

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """What it says at the beginning of an episode about this row, if anything."""
        if self._has_begun:
            return None
        said = self._asked(f".reset({', '.join(row)})", lambda: self._made.reset(**row))
        self._has_begun = True
        if said is not None and not isinstance(said, str):
            self._refuse(f".reset() returned {said!r:.80}; expected a text or None")
        return said

    def reward(self, answer: str | None) -> float:
        """What the episode was worth, from 0 to 1; None where it was not answered."""
        judge = self._made.get_reward
        told = [answer] if _wants_answer(judge) else []
        reward = self._asked(f".get_reward({'answer' if told else ''})", lambda: judge(*told))
        number = float(reward) if isinstance(reward, Real) else math.nan
        if not -ROUNDING <= number <= 1 + ROUNDING:
            self._refuse(f".get_reward() returned {reward!r:.80}; expected a number from 0 to 1")
        return float(round(number)) if abs(number - round(number)) <= ROUNDING else number

    def close(self) -> None:
        """Gives back what it holds, if its episode has begun."""
        if self._has_begun:
            getattr(self._made, "close", lambda: None)()

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            raise RuntimeError(
                f"{self._kind.__name__}{what} raised {raised_in_words(error)}"
            ) from error

    def _refuse(self, problem: str) -> None:
        """No other attempt would be better."""
        raise EnvironmentFaultError(f"{self._kind.__name__}{problem}")
