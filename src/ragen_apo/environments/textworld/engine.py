"""One game in progress, played by the packages textworld and alfworld.

Games of TextWorld run in an interpreter (Frotz). Those of ALFWorld are a plan's domain and problem
(PDDL); their texts come from a grammar in the same file.
"""

import contextlib
import hashlib
import random
import re
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_apo.environments.textworld.games import PLANNED
from ragen_apo.environments.textworld.grammars import careful_grammars
from ragen_apo.environments.textworld.packages import imported
from ragen_apo.environments.toolkit.global_generators import borrowed_generators
from ragen_apo.errors import EnvironmentDataError, RagenApoError
from ragen_apo.printable import raised_in_words

_IDLE: list[Any] = []
"""Planners that no game uses. Each holds a copy of a C library, which cannot be unloaded."""
_ENDING = re.compile(r"\s*\*\*\*.*", re.DOTALL)
"""After the last command: that it is over, the score, and a menu."""


@dataclass(frozen=True)
class Scene:
    """What a game says after a command, and where it stands."""

    text: str
    commands: tuple[str, ...]
    """Those that do something now."""
    score: float
    """From 0 to 1, the share of the game's highest."""
    won: bool
    over: bool
    state: str
    """A digest of all that is true in the world, and of what can be seen."""
    advice: str | None
    """An expert's next command, where there is an expert."""


class Engine:
    """Plays one game. `seed` is that of the expert, if there is one: the games know no chance.

    Raises EnvironmentDataError for a game that cannot be played.
    """

    def __init__(self, path: Path, *, seed: int = 0, has_expert: bool = False) -> None:
        self._path, self._seed, self._num_commands = path, seed, 0
        self._is_planned = path.suffix == PLANNED
        self._expert_may_give_up = has_expert and self._is_planned
        self._has_given_up = False
        try:
            with self._alone():
                self._game = (
                    self._planned(has_expert) if self._is_planned else self._run(has_expert)
                )
                self._state = self._game.reset()
                self._walkthrough = deque[str](self._state.get("extra.walkthrough") or ())
                if self._expert_may_give_up:
                    _let_expert_put_things_down(self._game)
        except RagenApoError:
            raise
        except (Exception, SystemExit) as error:  # the planner exits
            raise EnvironmentDataError(
                f"{path} cannot be played: {raised_in_words(error)}"
            ) from error

    def scene(self) -> Scene:
        """Where the game stands."""
        state = self._state
        known = sorted(map(str, state["facts"]))
        commands = tuple(word for word in state["admissible_commands"] if word != "help")
        if not self._is_planned:  # Inform names things in the order in which they were moved
            known += [state["description"], state["inventory"]]
        highest = 1 if self._is_planned else state["max_score"]
        won, lost = bool(state["won"]), bool(state["lost"])
        return Scene(
            text=self._text(),
            commands=commands,
            score=float(state.get("score") or 0) / highest,  # ALFWorld has none at first
            won=won,
            over=won or lost,
            state=hashlib.sha256("\n".join(known).encode()).hexdigest(),
            advice=self._advice(commands),
        )

    def step(self, command: str) -> Scene:
        """The scene after a command."""
        self._num_commands += 1
        if self._walkthrough and command == self._walkthrough[0]:
            self._walkthrough.popleft()
        with self._alone():
            try:
                self._state, _, _ = self._game.step(command)
            except Exception as error:
                if isinstance(error, RagenApoError) or not self._expert_may_give_up:
                    raise
                self._state = self._game.state
                self._has_given_up = True  # ALFWorld's expert does after 200 commands
        return self.scene()

    def close(self) -> None:
        """Ends the interpreter, or gives the planner back."""
        if self._is_planned:
            self._give_back()
        else:
            self._game.close()

    def _run(self, has_expert: bool) -> Any:
        textworld = imported("textworld")
        wanted = textworld.EnvInfos(
            **_WANTED,
            description=True,
            inventory=True,
            policy_commands=has_expert,
            extras=["walkthrough"] if has_expert else [],
        )
        return textworld.start(str(self._path), wanted)

    def _planned(self, has_expert: bool) -> Any:
        alfworld = imported("alfworld.agents.environment.alfred_tw_env")
        textworld, envs = imported("textworld"), imported("textworld.envs")
        planner = _IDLE.pop() if _IDLE else envs.PddlEnv(textworld.EnvInfos(**_WANTED))
        self._give_back = weakref.finalize(self, _IDLE.append, planner)
        self._give_back.atexit = False
        game = alfworld.AlfredDemangler(planner)
        game = alfworld.AlfredExpert(game) if has_expert else game
        game.load(str(self._path))
        return game

    def _text(self) -> str:
        text = str(self._state["feedback"])
        if not self._is_planned:
            if self._num_commands == 0:
                text = str(self._state["description"])  # without title and objective
            text = _ENDING.sub("", text.partition("\n>")[0])  # and no status line
        paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
        return "\n".join(
            paragraph
            for paragraph in paragraphs
            if paragraph and not paragraph.startswith(("-= Welcome to", "Your task is to:"))
        )

    def _advice(self, commands: Sequence[str]) -> str | None:
        """None where the expert has given up, or names none of these commands.

        TextWorld knows no solution of a game in which things have to be dropped; there the next
        command of its walkthrough that was not given yet is the advice.
        """
        if self._has_given_up:
            return None
        state = self._state
        plan = state.get("extra.expert_plan") or state.get("policy_commands") or self._walkthrough
        return plan[0] if plan and plan[0] in commands else None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Others wait: the parser of grammars is shared, and experts draw from Python's global
        generator, here a function of seed and turn. What is changed in the process is put back.

        Frotz warns that it does not know the game, which TextWorld has made.
        """
        grammars = careful_grammars() if self._is_planned else contextlib.nullcontext()
        with borrowed_generators(), grammars, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            random.seed(f"{self._seed}/{self._num_commands}")
            arguments = sys.argv
            try:
                yield
            finally:
                sys.argv = arguments


def _let_expert_put_things_down(game: Any) -> None:
    """ALFWorld's expert knows `put X in Y`, which its games call `move X to Y` since 0.4.

    It thinks that it still holds what it has moved, and so never finds a second one. So a move
    that it has not understood is reported to it as a `put`.
    """
    policy = game._handcoded_expert.policy
    track = policy.update_state_tracking

    def tracked(state: Any, command: str) -> None:
        track(state, command)
        what, _, where = command.removeprefix("move ").partition(" to ")
        has_moved = command.startswith("move ") and "Nothing happens" not in state["feedback"]
        if has_moved and what in policy.inventory:
            track(state, f"put {what} in {where}")

    policy.update_state_tracking = tracked


_WANTED = dict.fromkeys(("admissible_commands", "facts", "lost", "max_score", "score", "won"), True)
"""What textworld says of each state."""
