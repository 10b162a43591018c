"""Worlds whose actions have names, several of which may be joined by `||` in one turn.

    Up || Left || Left

Parts that name no action are skipped, flagged and cost `invalid_action` once a turn. Parts beyond
the limit of a turn are left out and flagged. The world ends the turn early when it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ragen_apo.environments.toolkit.game import Answer
from ragen_apo.environments.tools import Tool

SEPARATOR = "||"
TOO_MANY_ACTIONS = "too_many_actions"
"""Flag of a turn with more actions than are carried out."""
NO_EFFECT = "no_effect"
"""Flag of a turn whose actions left the world as it was."""


@dataclass(frozen=True)
class Effect:
    """The effect of one action."""

    reward: float
    ended: bool = False
    success: bool = False
    changed: bool = True


class World(Protocol):
    """The state that actions change."""

    def act(self, action: str) -> Effect:
        """Carries out one action by its name."""
        ...

    def view(self) -> str:
        """The present observation."""
        ...

    def key(self) -> str:
        """Identifies the state; the task and the number of turns need not be in it.

        The number of actions has to be where what an action does depends on it.
        """
        ...


@dataclass(frozen=True)
class ParsedActions:
    """The actions of a text that are carried out, and its faults."""

    names: tuple[str, ...]
    has_invalid: bool
    has_too_many: bool


def parse_actions(text: str, *, names: Sequence[str], limit: int) -> ParsedActions:
    """The actions in a text, upper and lower case alike; the first `limit` of them count."""
    known = {name.lower(): name for name in names}
    parts = [stripped for part in text.split(SEPARATOR) if (stripped := part.strip())]
    found = [known.get(part.lower()) for part in parts]
    valid = [name for name in found if name is not None]
    return ParsedActions(
        names=tuple(valid[:limit]),
        has_invalid=not found or None in found,
        has_too_many=len(valid) > limit,
    )


def join_actions(names: Sequence[str]) -> str:
    """The text that says these actions; the inverse of `parse_actions`."""
    return f" {SEPARATOR} ".join(names)


def action_tool(
    name: str, description: str, parameter: str, *, names: Sequence[str], max_per_turn: int
) -> Tool:
    """The tool that says one of these actions, or a list of them where a turn has several."""
    schema: dict[str, Any] = {"type": "string", "enum": list(names)}
    if max_per_turn > 1:
        parameter, schema = f"{parameter}s", {"type": "array", "items": schema}
        description = f"{description} Up to {max_per_turn} are carried out in order."
    action = f"{{{parameter}}}"
    return Tool(name, description, action, {parameter: schema}, separator=f" {SEPARATOR} ")


@dataclass(frozen=True)
class ActionRules:
    """Names and limits of actions, and the reward of a turn with an invalid one."""

    names: tuple[str, ...]
    max_per_turn: int
    max_per_episode: int | None
    """None: only turns are limited."""
    invalid_reward: float

    @property
    def hint(self) -> str:
        """The answer to an invalid action."""
        listed = ", ".join(self.names)
        if self.max_per_turn == 1:
            return f"Invalid action. Use one of: {listed}."
        return f"Invalid action. Use {listed}, up to {self.max_per_turn} joined by {SEPARATOR}."


class NamedActionsGame:
    """A world played by texts that name its actions."""

    def __init__(self, world: World, rules: ActionRules, *, instruction: str) -> None:
        self._world = world
        self._rules = rules
        self._instruction = instruction
        self._num_actions = 0

    def first_observation(self) -> str:
        return f"TASK: {self._instruction}\n{self._world.view()}"

    def play(self, text: str) -> Answer:
        """Carries out the actions in order until the world ends or the episode's are used up."""
        parsed = parse_actions(text, names=self._rules.names, limit=self._rules.max_per_turn)
        effects: list[Effect] = []
        for name in parsed.names:
            effects.append(self._world.act(name))
            self._num_actions += 1
            if effects[-1].ended or self._is_used_up():
                break
        reward = sum(effect.reward for effect in effects)
        return Answer(
            observation=self._observation(parsed),
            reward=reward + (self._rules.invalid_reward if parsed.has_invalid else 0.0),
            terminated=bool(effects) and effects[-1].ended,
            truncated=self._is_used_up(),
            success=bool(effects) and effects[-1].success,
            invalid=parsed.has_invalid,
            flags=_flags(parsed, effects),
        )

    def key(self) -> str:
        """The world's state and, where their number is limited, the actions used."""
        if self._rules.max_per_episode is None:
            return self._world.key()
        return f"{self._num_actions}:{self._world.key()}"

    def _is_used_up(self) -> bool:
        most = self._rules.max_per_episode
        return most is not None and self._num_actions >= most

    def _observation(self, parsed: ParsedActions) -> str:
        lines = [self._rules.hint] if parsed.has_invalid else []
        if parsed.has_too_many:
            lines.append(f"Only the first {self._rules.max_per_turn} actions were carried out.")
        return "\n".join([*lines, self._world.view()])


def _flags(parsed: ParsedActions, effects: Sequence[Effect]) -> tuple[str, ...]:
    flags = [TOO_MANY_ACTIONS] if parsed.has_too_many else []
    if effects and not any(effect.changed for effect in effects):
        flags.append(NO_EFFECT)
    return tuple(flags)
