"""An object whose methods a policy calls in one episode.

Its class is written as for TRL's `environment_factory`: public methods are functions to call,
`reset` begins an episode, and `get_reward` decides what it was worth.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ragen_apo.printable import raised_in_words

NO_TOOLS = ("reset", "get_reward", "close")
"""Public methods that the policy does not call; a class may have them."""


def gives_reward(kind: type) -> bool:
    """Whether the class decides what an episode is worth."""
    return hasattr(kind, "get_reward")


class ToolObject:
    """An object of a class, made without arguments. What its methods raise names the class.

    `functions` are excepted: they raise what they raise.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._made = self._asked("", kind)
        # On the class: a property of the object would be computed.
        names = (name for name, _ in inspect.getmembers(kind, inspect.isfunction))
        self.functions: dict[str, Callable[..., Any]] = {
            name: getattr(self._made, name)
            for name in names
            if name not in NO_TOOLS and not name.startswith("_")
        }
        """To be called, by name."""

    def reset(self, row: Mapping[str, Any]) -> object:
        """What it says at the beginning of an episode about this row; None for nothing."""
        if not hasattr(self._kind, "reset"):
            return None
        return self._asked(f".reset({', '.join(row)})", lambda: self._made.reset(**row))

    def reward(self) -> float:
        """What the episode was worth, from 0 to 1."""
        reward = self._asked(".get_reward()", self._made.get_reward)
        if not isinstance(reward, (int, float)) or not 0 <= reward <= 1:
            raise RuntimeError(
                f"{self._kind.__name__}.get_reward() returned {reward!r:.80}; expected a number "
                "from 0 to 1"
            )
        return float(reward)

    def close(self) -> None:
        """Gives back what it holds."""
        getattr(self._made, "close", lambda: None)()

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            raise RuntimeError(
                f"{self._kind.__name__}{what or '()'} raised {raised_in_words(error)}"
            ) from error
