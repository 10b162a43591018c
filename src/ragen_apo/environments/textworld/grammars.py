"""What TextWorld does with the texts and problems of ALFWorld's games, safely and once.

A game's file has a grammar. After each turn the package writes a text by it for every command that
is possible: it parses each sentence and each condition anew, copies all that they are about, and
evaluates their expressions as Python. At the start of an episode it translates the problem (PDDL)
four times, twice for plans. Here expressions may only name things and join texts, and what was
parsed or translated is remembered. The texts are the same.
"""

import ast
import contextlib
import functools
import hashlib
import pickle
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from ragen_apo.environments.textworld.packages import imported
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.printable import shortened

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

_sentences = functools.lru_cache(maxsize=4096)  # ALFWorld's grammar has some hundred
_games = functools.lru_cache(maxsize=8)  # what is parsed of a game's grammar
_MAX_TRANSLATIONS = 1000
"""Of 20 to 100 kB each, in every process that plays."""


@contextlib.contextmanager
def careful_grammars() -> Iterator[None]:
    """Within the block TextWorld has our functions, in all threads; afterwards its own again."""
    replaced = [(vars(owner)[name], owner, name, ours) for owner, name, ours in _replacements()]
    for _, owner, name, ours in replaced:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for theirs, owner, name, _ in replaced:
            setattr(owner, name, theirs)


@functools.cache
def _replacements() -> list[tuple[Any, str, Any]]:
    """Owner, name and function. A release that lacks one of the last five is only slower."""
    texts = imported("textworld.envs.pddl.textgen")
    plans = imported("textworld.envs.pddl.logic")
    rule = imported("textworld.logic").Rule
    planner = imported("fast_downward")
    quicker: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (texts, "_parse_and_convert", _parsed_once),
        (texts, "copy_context", lambda _: _copied),
        (rule, "parse_conjunctive_query", lambda parse: staticmethod(_sentences(parse))),
        (plans, "_parse_and_convert", _games),
        (planner, "pddl2sas", _translated_once),
    ]
    found = [
        (owner, name, ours(getattr(owner, name)))
        for owner, name, ours in quicker
        if hasattr(owner, name)
    ]
    return [(texts.EvalSymbol, "derive", _evaluated_as(texts.TerminalSymbol)), *found]


def _parsed_once(parse: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Symbols are given a context when they are used, so each use has its own."""
    remembered = _sentences(parse)
    return lambda *texts, **options: deepcopy(remembered(*texts, **options))


def _translated_once(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Another translation would make plans sooner. Nothing here asks for plans.

    What is remembered is packed, which is a tenth of it: an epoch may have a thousand games. The
    start of a game asks four times.
    """
    packed: dict[bytes, bytes] = {}
    unpacked = functools.lru_cache(maxsize=1)(lambda data: pickle.loads(zlib.decompress(data)))

    def translated(domain: str, problem: str, **_: Any) -> Any:
        game = hashlib.sha256(f"{domain}\0{problem}".encode()).digest()
        if game not in packed:
            if len(packed) == _MAX_TRANSLATIONS:
                del packed[next(iter(packed))]
            packed[game] = zlib.compress(pickle.dumps(translate(domain, problem)), 1)
        return unpacked(packed[game])

    return translated


def _copied(context: dict[str, Any]) -> dict[str, Any]:
    """Names get new meanings in the copy; what they mean is never changed."""
    return context | {name: dict(context[name]) for name in ("variables", "mapping")}


def _evaluated_as(symbol_type: Any) -> Callable[..., list[Any]]:
    def derive(symbol: Any, context: Any = None) -> list[Any]:
        """As theirs. Since Python 3.13 a function's `locals()` cannot be given names."""
        require_no_code(symbol.expression)
        names = (context or symbol.context)["variables"]
        value = eval(symbol.expression.strip(), {"__builtins__": {}}, names)
        return [symbol_type(value)]

    return derive


@functools.lru_cache(maxsize=1024)
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
