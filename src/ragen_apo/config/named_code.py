"""Code that a configuration names: the factory of an environment, the class of an algorithm.

A reference says where it is: `path.py:name`, a relative path from the current directory, or
`module:name` for a module that Python can import.

A configuration from elsewhere may hold any reference. So the file has to import ragen_apo and to
define the function or class itself: `subprocess:Popen` is refused. Its source is checked before
anything is imported. A process that has the function or class itself hands it over (`provide`), and
nothing is imported for it. What may come from somebody else is imported only where the caller
trusts it (`api.open_run`).
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ragen_apo
from ragen_apo.config.references import file_of
from ragen_apo.errors import ConfigError, EnvironmentFaultError, RagenApoError
from ragen_apo.printable import exception_in_words, raised_in_words

FOREIGN_FAILURES = (Exception, SystemExit)
"""Exceptions of foreign code; SystemExit would end this process, perhaps with status 0."""
OURS = Path(ragen_apo.__file__).resolve().parent
_FOLDERS: set[Path] = set()
"""Of the files that were imported."""
_found: set[tuple[str, str]] = set()
"""Files, and the names in them that were imported. Their source is not read again: threads that
make environments would parse it side by side, which Python 3.11 does not bear, and an editor that
is not done with it would end the run that plays it."""
_provided: dict[str, Any] = {}
"""Factories that this process was handed, by the reference under which configurations keep them."""

_importing: ContextVar[Path | None] = ContextVar("importing", default=None)


def file_being_imported() -> Path | None:
    """The file whose code runs because a configuration names what is in it; no run starts there."""
    return _importing.get()


@dataclass(frozen=True)
class Role:
    """What a reference stands for, in the words of messages."""

    noun: str
    example: str
    """Of the name behind the colon."""
    built_in: str
    """The name of one of ours."""
    fault: type[RagenApoError]
    """Raised if the code fails."""
    kinds: tuple[type[ast.FunctionDef | ast.ClassDef], ...]
    """Statements that define one."""

    @property
    def key(self) -> str:
        """Of the configuration."""
        return f"{self.noun}.name"

    @property
    def is_a(self) -> str:
        """What defines one."""
        return "function or class" if ast.FunctionDef in self.kinds else "class"

    @property
    def statement(self) -> str:
        """How one begins, with the place of its name."""
        return (
            "def {name}(**options): ..." if ast.FunctionDef in self.kinds else "class {name}: ..."
        )

    @property
    def page(self) -> str:
        """Where the documentation has a complete one."""
        return f"docs/adding_an_{self.noun}.md"


ENVIRONMENT = Role(
    noun="environment",
    example="make_environment",
    built_in="shop",
    fault=EnvironmentFaultError,
    kinds=(ast.FunctionDef, ast.ClassDef),
)
ALGORITHM = Role(
    noun="algorithm",
    example="MyAlgorithm",
    built_in="grpo",
    fault=ConfigError,
    kinds=(ast.ClassDef,),
)


def provide(reference: str, factory: Any) -> None:
    """From now on this process makes the environment of that reference with the factory.

    Raises ConfigError for what cannot be called. (For algorithms: `algorithms.provide_algorithm`.)
    """
    if not callable(factory):
        raise ConfigError(f"environment: got {factory!r:.80}, expected a {ENVIRONMENT.is_a}")
    _provided[reference] = factory


def is_provided(reference: str) -> bool:
    """Whether `provide` was called for it, so that no code is imported."""
    return reference in _provided


def reference_to(code: Any, role: Role) -> str:
    """The reference to a function or class that a configuration keeps.

    `module:name` in a package, `path.py:name` in a script or a file of its own, and
    `__main__:name` in a notebook, which has no file. Raises ConfigError for what no other process
    could find: a lambda, a local function, an object.
    """
    name = getattr(code, "__qualname__", "")
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not code:
        raise ConfigError(
            f"{role.noun}: got {code!r:.80}, expected a {role.is_a} that a file, or a notebook, "
            "defines by its name and not inside a function; options go beside it: "
            f"{role.noun}={{'name': {role.example}, ...}}"
        )
    if module.__name__.startswith(f"{ragen_apo.__name__}."):
        raise ConfigError(
            f"{role.noun}: {name} belongs to ragen-apo; give its name, such as {role.built_in}"
        )
    file = getattr(module, "__file__", None)
    if file is None or (module.__package__ and module.__name__ != "__main__"):
        return f"{module.__name__}:{name}"
    return f"{Path(file).absolute()}:{name}"


def referenced_code(reference: str, role: Role) -> Any:
    """What a reference names; each file and module is imported once."""
    if reference in _provided:
        return _provided[reference]
    file, (module, _, name) = file_of(reference), reference.rpartition(":")
    if not name or reference.endswith(".py"):
        raise ConfigError(
            f"{role.key}: {reference!r} names no {role.is_a}; add it behind a colon, such as "
            f"{reference.rstrip(':')}:{role.example}"
        )
    if module == "__main__":
        raise ConfigError(
            f"{role.key}: {name} was defined in a notebook, and only there; hand it over again, "
            f"{role.noun}={name}, or define it in a file"
        )
    path = file or _file_of_module(module, reference, role)
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        raise ConfigError(
            f"{role.key}: there is no file {path}; a relative path starts in the current "
            f"directory, {Path.cwd()}"
        )
    place = (str(path), name)
    if place not in _found:
        _refuse_other_code(path, name, reference, role)
    token = _importing.set(path)
    try:
        if file is None:
            with in_one_sentence(reference, "importing it", role):
                imported = importlib.import_module(module)
        else:
            imported = _imported_file(path, role)
    finally:
        _importing.reset(token)
    if not hasattr(imported, name):
        raise ConfigError(f"{role.key}: {path} has removed its {name!r} again")
    _found.add(place)
    return getattr(imported, name)


def _file_of_module(module: str, reference: str, role: Role) -> Path:
    """As `importlib.util.find_spec` finds it, which would import the packages around the module."""
    folders, spec, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            break
        folders = spec.submodule_search_locations or ()
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        raise ConfigError(
            f"{role.key}: {reference!r}: there is no Python file of a module {module!r}; install "
            f"its package, or name a file: path.py:{role.example}"
        )
    return Path(str(spec.origin)).absolute()


def _refuse_other_code(path: Path, name: str, reference: str, role: Role) -> None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise role.fault(
            f"the {role.noun} {reference!r}: {path} cannot be read as Python "
            f"({exception_in_words(error)}); its code has to be repaired"
        ) from error
    defined = [node.name for node in tree.body if isinstance(node, role.kinds)]
    if name not in defined:
        close = difflib.get_close_matches(name, defined, n=1)
        instead = f"did you mean {close[0]!r}?" if close else f"it defines {', '.join(defined)}"
        if name in _assigned_names(tree):
            instead = (
                f"it assigns {name}, and has to define it, so that its source can be read: "
                f"{role.statement.format(name=name)}"
            )
        elif not defined:
            instead = "it defines none"
        raise ConfigError(f"{role.key}: {path} defines no {role.is_a} {name!r}; {instead}")
    is_ours = path.resolve().is_relative_to(OURS)
    if is_ours or ragen_apo.__name__ not in _imported_names(tree):
        raise ConfigError(
            f"{role.key}: {reference!r} is no {role.noun}: "
            + (
                f"{path} belongs to ragen-apo; give its name, such as {role.built_in}"
                if is_ours
                else f"{path} imports nothing from ragen_apo, as every {role.noun} does "
                f"({role.page})"
            )
        )


def _assigned_names(tree: ast.Module) -> set[str]:
    """The names to which a file assigns something, outside of functions and classes."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    found: set[str] = set()
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, inner):
            waiting += ast.iter_child_nodes(node)
    return found


def _imported_file(path: Path, role: Role) -> ModuleType:
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
    name = f"{path.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the path ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    _FOLDERS.add(path.parent)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that files beside it hide no other module
    try:
        with _hidden_neighbours_named(path, role), in_one_sentence(str(path), "importing it", role):
            spec.loader.exec_module(module)
        _refuse_neighbours_of_others(path, role)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _beside(path: Path, name: str) -> list[Path]:
    """The files beside this one that are a module of the name."""
    beside = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
    return [file for file in beside if file.exists()]


@contextlib.contextmanager
def _hidden_neighbours_named(path: Path, role: Role) -> Iterator[None]:
    """Python's own modules are found before a neighbour of their name: says so if one is missed."""
    try:
        yield
    except RagenApoError as error:
        cause = error.__cause__
        name = cause.name if isinstance(cause, ImportError) else None
        if isinstance(cause, AttributeError) and isinstance(cause.obj, ModuleType):
            name = cause.obj.__name__
        there = _beside(path, name) if name in sys.stdlib_module_names else []
        if cause is None or not there:
            raise
        raise ConfigError(
            f"{role.key}: {path} cannot be loaded ({exception_in_words(cause)}). The file "
            f"{there[0]} beside it is hidden by Python's own module {name}; give that file another "
            "name"
        ) from error


def _refuse_neighbours_of_others(path: Path, role: Role) -> None:
    """Python keeps one module of a name: two folders with a `words.py` cannot both have theirs."""
    for name in _imported_names(ast.parse(path.read_bytes())):
        found = getattr(sys.modules.get(name), "__file__", None)
        there = _beside(path, name)
        if found is None or not there or any(file.samefile(found) for file in there):
            continue
        if any(map(Path(found).is_relative_to, _FOLDERS)):
            raise ConfigError(
                f"{role.key}: {path} imports {name!r}, and the one that is loaded is that of "
                f"another environment or algorithm, {found}; give one of the two files another name"
            )


def _imported_names(tree: ast.Module) -> set[str]:
    """The modules that code imports, without those inside of packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@contextlib.contextmanager
def in_one_sentence(name: str, doing: str, role: Role = ENVIRONMENT) -> Iterator[None]:
    """Turns exceptions of foreign code into errors of this package."""
    try:
        yield
    except RagenApoError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{role.key}: {name!r} cannot be loaded ({exception_in_words(error)}); install "
            "what is missing"
        ) from error
    except FOREIGN_FAILURES as error:
        raise role.fault(
            f"the {role.noun} {name!r}: {doing} raised {raised_in_words(error)}; its code has to "
            "be repaired"
        ) from error
