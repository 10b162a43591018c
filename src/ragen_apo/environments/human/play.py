"""A person plays an episode in the terminal: reads the observations, types the actions.

Works for every text environment. `read` and `write` stand for the keyboard and the screen; control
characters of an environment are escaped.
"""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ragen_apo.config.named_code import in_one_sentence
from ragen_apo.environments.answers import (
    problem_with_reset,
    problem_with_step,
    problem_with_text,
)
from ragen_apo.environments.base import TextEnvironment
from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.plural import counted
from ragen_apo.printable import printable
from ragen_apo.types import Task

QUIT, HELP = "quit", "help"
HOW_TO = f"Type an action; {HELP} shows the rules again, {QUIT} leaves, and neither costs a turn."


@dataclass(frozen=True)
class PlayedTurn:
    """One turn of a person."""

    observation: str
    action: str
    reward: float
    invalid: bool


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode played by a person; neither terminated nor truncated when they left early."""

    task: Task
    turns: tuple[PlayedTurn, ...]
    terminated: bool
    truncated: bool
    success: bool
    final_observation: str

    @property
    def episode_return(self) -> float:
        """The undiscounted sum of the rewards."""
        return sum(turn.reward for turn in self.turns)


def typed_line(prompt: str) -> str:
    """A line from the keyboard; bytes that are no UTF-8 are in it as lone surrogates."""
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        sys.stdin.reconfigure(errors="surrogateescape")
    return input(prompt)


def play(
    environment: TextEnvironment,
    task: Task,
    *,
    seed: int = 0,
    read: Callable[[str], str] = typed_line,
    write: Callable[[str], object] = print,
) -> PlayedEpisode:
    """Plays one episode until its end, or until the person types `quit`, Ctrl-D or Ctrl-C.

    Raises EnvironmentFaultError for an environment that raises something, or whose answers have
    another form than rollouts take.
    """

    def show(text: str) -> None:
        write(printable(text))

    properties = environment.properties
    if properties.data:
        show(f"{properties.name}: {properties.data}\n")
    show(f"{properties.rules}\n{HOW_TO}\n")
    observation, _ = _answer(
        properties.name, "reset", lambda: environment.reset(task, seed=seed), problem_with_reset
    )
    turns: list[PlayedTurn] = []
    terminated = truncated = success = False
    show(f"{observation}{_turns_left(properties.max_turns, 0)}")
    while not (terminated or truncated):
        action = _next_action(read, show, rules=properties.rules)
        if action is None:
            break
        read_before = observation
        observation, reward, ended, cut_off, info = _answer(
            properties.name, "step", partial(environment.step, action), problem_with_step
        )
        terminated, truncated = bool(ended), bool(cut_off)
        invalid = bool(info.get("invalid_action", False))
        success = bool(info.get("success", False))
        turns.append(PlayedTurn(read_before, action, float(reward), invalid))
        left = "" if terminated or truncated else _turns_left(properties.max_turns, len(turns))
        show(f"{observation}\n[reward {reward:+.2f}]{left}")
    episode = PlayedEpisode(task, tuple(turns), terminated, truncated, success, observation)
    show(_summary(episode))
    return episode


def _answer(
    name: str,
    doing: str,
    ask: Callable[[], Any],
    problem_with: Callable[[object], str | None],
) -> Any:
    """What the environment answers, in the right form."""
    with in_one_sentence(name, doing):
        answer = ask()
    if problem := problem_with(answer):
        raise EnvironmentFaultError(f"the environment {name!r}: {problem}")
    return answer


def _next_action(
    read: Callable[[str], str], show: Callable[[str], None], *, rules: str
) -> str | None:
    """The next action that the person types, or None when they want to leave."""
    while True:
        try:
            typed = read("> ")
        except (EOFError, KeyboardInterrupt):
            return None
        word = typed.strip().lower()
        if word == QUIT:
            return None
        if word == HELP:
            show(f"{rules}\n{HOW_TO}")
        elif not word:
            show(HOW_TO)
        elif problem_with_text(typed):
            show(f"That line is not UTF-8 text. {HOW_TO}")
        else:
            return typed


def _turns_left(max_turns: int | None, num_played: int) -> str:
    """The number of turns left, if known; a part of a mixture may have fewer."""
    if max_turns is None:
        return ""
    left = max_turns - num_played
    return f"\n[at most {counted(left, 'turn')} left]"


def _summary(episode: PlayedEpisode) -> str:
    if episode.success:
        verdict = "Success"
    elif episode.terminated:
        verdict = "No success"
    elif episode.truncated:
        verdict = "No turns left"
    else:
        verdict = "Goodbye"
    turns = counted(len(episode.turns), "turn")
    return f"\n{verdict}: return {episode.episode_return:+.2f} in {turns}."
