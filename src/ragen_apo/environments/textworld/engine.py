"""One game in progress, played by the packages textworld and alfworld.

Games of TextWorld run in an interpreter (Frotz), those of ALFWorld are a plan's domain and problem
(PDDL), whose texts come from a grammar in the same file. textworld evaluates that grammar's
expressions as Python, so others than names and texts joined are refused here.
"""

import ast
import contextlib
import hashlib
import random
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ragen_apo.environments.textworld.games import PLANNED
from ragen_apo.errors import ConfigError, EnvironmentDataError
from ragen_apo.printable import shortened

_LOCK = threading.Lock()
"""Games in threads act one after another: the parser of their grammars is shared, and experts draw
from Python's global generator."""
_HARMLESS = (
    ast.Expression,
    ast.Name,
    ast.Attribute,
    ast.Load,
    ast.Constant,
    ast.BinOp,
    ast.Add,
    ast.BoolOp,
    ast.Or,
    ast.And,
)


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
    facts: str
    """A digest of all that is true in the world."""
    advice: str | None
    """An expert's next command, where there is an expert."""


def package_version() -> str:
    """Of what plays the games; raises ConfigError where it is missing."""
    try:
        return metadata.version("textworld")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "environment.name: 'textworld' needs the packages textworld and alfworld, which are "
            "not installed; run `pip install 'ragen-apo[textworld]'`"
        ) from error


class Engine:
    """Plays one game. `seed` is that of the expert, if there is one: the games know no chance."""

    def __init__(self, path: Path, *, seed: int = 0, has_expert: bool = False) -> None:
        self._path, self._seed, self._num_commands = path, seed, 0
        self._is_planned = path.suffix == PLANNED
        with self._alone():
            self._game = self._started(has_expert)
            self._state = self._game.reset()

    def scene(self) -> Scene:
        """Where the game stands."""
        state = self._state
        facts = "\n".join(sorted(map(str, state["facts"])))
        highest = 1 if self._is_planned else state["max_score"] or 1
        won, lost = bool(state["won"]), bool(state["lost"])
        return Scene(
            text=self._text(),
            commands=tuple(word for word in state["admissible_commands"] if word != "help"),
            score=float(state.get("score") or 0) / highest,  # ALFWorld has none at first
            won=won,
            over=won or lost,
            facts=hashlib.sha256(facts.encode()).hexdigest(),
            advice=self._advice(),
        )

    def step(self, command: str) -> Scene:
        """The scene after a command."""
        self._num_commands += 1
        with self._alone():
            self._state, _, _ = self._game.step(command)
        return self.scene()

    def close(self) -> None:
        """Ends the interpreter."""
        with contextlib.suppress(AttributeError):  # an expert's wrapper of ALFWorld has none
            self._game.close()

    def _started(self, has_expert: bool) -> Any:
        textworld = import_module("textworld")
        wants = {"facts": True, "admissible_commands": True, "won": True, "lost": True}
        wants |= {"score": True, "max_score": True}
        if not self._is_planned:
            wants |= {"description": True, "policy_commands": has_expert}
            return textworld.start(str(self._path), textworld.EnvInfos(**wants))
        _check_grammars()
        alfworld = _alfworld()
        wrappers = [alfworld.AlfredDemangler]
        if has_expert:
            wrappers.append(alfworld.AlfredExpert)
        return textworld.start(str(self._path), textworld.EnvInfos(**wants), wrappers)

    def _text(self) -> str:
        text = str(self._state["feedback"])
        if not self._is_planned:
            if self._num_commands == 0:
                text = str(self._state["description"])  # without title and objective
            text = text.partition("\n>")[0].partition("*** The End ***")[0]  # and no status line
        paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
        return "\n".join(
            paragraph
            for paragraph in paragraphs
            if paragraph and not paragraph.startswith(("-= Welcome to", "Your task is to:"))
        )

    def _advice(self) -> str | None:
        plan = self._state.get("extra.expert_plan") or self._state.get("policy_commands")
        return plan[0] if plan else None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Others wait; Python's global generator is a function of seed and turn. Frotz warns that
        it does not know the game, which TextWorld has made.
        """
        with _LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = random.getstate()
            random.seed(f"{self._seed}/{self._num_commands}")
            try:
                yield
            finally:
                random.setstate(before)


def _alfworld() -> Any:
    try:
        return import_module("alfworld.agents.environment.alfred_tw_env")
    except ImportError as error:
        raise ConfigError(
            f"a game of ALFWorld (*{PLANNED}) needs the package alfworld, which cannot be imported "
            f"({error}); run `pip install 'ragen-apo[textworld]'`"
        ) from error


def _check_grammars() -> None:
    """Makes textworld check what it evaluates, once in a process."""
    grammars: Any = import_module("textworld.envs.pddl.textgen")
    if hasattr(grammars.EvalSymbol, "is_checked"):
        return

    class CheckedSymbol(grammars.EvalSymbol):
        """An expression of a grammar that only names things."""

        is_checked = True

        def __init__(self, expression: str, *arguments: Any) -> None:
            require_no_code(expression)
            super().__init__(expression, *arguments)

    grammars.EvalSymbol = CheckedSymbol


def require_no_code(expression: str) -> None:
    """Raises EnvironmentDataError for an expression that is more than names and texts joined."""
    try:
        nodes = list(ast.walk(ast.parse(expression.strip(), mode="eval")))
    except SyntaxError:
        nodes = [None]
    for node in nodes:
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if is_private or not isinstance(node, _HARMLESS):
            raise EnvironmentDataError(
                f"the grammar of a game would run Python code: {shortened(repr(expression), 80)}; "
                "expected names and texts joined, as in ALFWorld's own. Take games from those "
                "whom you trust"
            )
