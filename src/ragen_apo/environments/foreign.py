"""Factories of foreign environments: found by a plugin or a reference, called with care.

A reference says where a factory is: `path.py:function`, a relative path from the current directory,
or `module:function` for a module that Python can import. The caller gets an environment or an error
in one sentence: ConfigError if the name or the options are wrong, EnvironmentFaultError if the
foreign code fails.

A configuration from elsewhere may hold a reference, with any options. So the file has to import
ragen_apo and to define the function itself: `subprocess:Popen` is refused. Its source is checked
before anything is imported. A process that has the function itself hands it over (`provide`), and
nothing is imported for it.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import ragen_apo
from ragen_apo.config.references import file_of
from ragen_apo.errors import ConfigError, EnvironmentFaultError, RagenApoError
from ragen_apo.printable import exception_in_words, raised_in_words

FOREIGN_FAILURES = (Exception, SystemExit)
"""Exceptions of foreign code; SystemExit would end this process, perhaps with status 0."""
MEMBERS = ("properties", "tasks", "reset", "step", "state_key", "scripted_policies")
"""Those of `TextEnvironment`."""
OURS = Path(ragen_apo.__file__).resolve().parent
_FOLDERS: set[Path] = set()
"""Of the files that were imported as environments."""
_HAS_TO_BE = "expected a function or class that takes the options and makes an environment"
_found: set[tuple[str, str]] = set()
"""Files, and the functions in them that were imported as environments. Their source is not read
again: threads that make environments would parse it side by side, which Python 3.11 does
not bear, and an editor that is not done with it would end the run that plays it."""
_provided: dict[str, Callable[..., object]] = {}
"""What this process was handed, by the reference under which configurations keep it."""


def provide(reference: str, factory: Callable[..., object]) -> None:
    """From now on this process makes the environment of that reference with the factory.

    Raises ConfigError for what cannot be called.
    """
    if not callable(factory):
        raise ConfigError(f"environment: got {factory!r:.80}, {_HAS_TO_BE}")
    _provided[reference] = factory


def is_provided(reference: str) -> bool:
    """Whether `provide` was called for it, so that no code is imported."""
    return reference in _provided


def reference_to(factory: Callable[..., object]) -> str:
    """The reference to a function or class that a configuration keeps.

    `module:function` in a package, `path.py:function` in a script or a file of its own, and
    `__main__:function` in a notebook, which has no file. Raises ConfigError for what no other
    process could find: a lambda, a local function, an object.
    """
    name = getattr(factory, "__qualname__", "")
    module = sys.modules.get(getattr(factory, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not factory:
        raise ConfigError(
            f"environment: got {factory!r:.80}, expected a function or class that a "
            "file, or a notebook, defines by its name and not inside a function; options go beside "
            "it: environment={'name': make_it, 'max_turns': 5}"
        )
    if module.__name__.startswith(f"{ragen_apo.__name__}."):
        raise ConfigError(f"environment: {name} belongs to ragen-apo; give its name, such as shop")
    file = getattr(module, "__file__", None)
    if file is None or (module.__package__ and module.__name__ != "__main__"):
        return f"{module.__name__}:{name}"
    return f"{Path(file).absolute()}:{name}"


def plugin_factory(plugin: EntryPoint) -> object:
    """The factory of an installed package's entry point."""
    with in_one_sentence(plugin.name, "importing it"):
        return plugin.load()


def referenced_factory(reference: str) -> object:
    """What a reference names; each file and module is imported once."""
    if reference in _provided:
        return _provided[reference]
    file, (module, _, function) = file_of(reference), reference.rpartition(":")
    if not function or reference.endswith(".py"):
        raise ConfigError(
            f"environment.name: {reference!r} names no function; add it behind a colon, such as "
            f"{reference.rstrip(':')}:make_environment"
        )
    if module == "__main__":
        raise ConfigError(
            f"environment.name: {function} was defined in a notebook, and only there; hand it over "
            f"again, environment={function}, or define it in a file"
        )
    path = file or _file_of_module(module, reference)
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        raise ConfigError(
            f"environment.name: there is no file {path}; a relative path starts in the current "
            f"directory, {Path.cwd()}"
        )
    place = (str(path), function)
    if place not in _found:
        _refuse_what_makes_no_environment(path, function, reference)
    if file is None:
        with in_one_sentence(reference, "importing it"):
            imported = importlib.import_module(module)
    else:
        imported = _imported_file(path)
    if not hasattr(imported, function):
        raise ConfigError(f"environment.name: {path} has removed its {function!r} again")
    _found.add(place)
    return getattr(imported, function)


def _file_of_module(module: str, reference: str) -> Path:
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
            f"environment.name: {reference!r}: there is no Python file of a module {module!r}; "
            "install its package, or name a file: path.py:function"
        )
    return Path(str(spec.origin)).absolute()


def _refuse_what_makes_no_environment(path: Path, function: str, reference: str) -> None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EnvironmentFaultError(
            f"the environment {reference!r}: {path} cannot be read as Python "
            f"({exception_in_words(error)}); its code has to be repaired"
        ) from error
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = [node.name for node in tree.body if isinstance(node, kinds)]
    if function not in defined:
        close = difflib.get_close_matches(function, defined, n=1)
        instead = f"did you mean {close[0]!r}?" if close else f"it defines {', '.join(defined)}"
        raise ConfigError(
            f"environment.name: {path} defines no function or class {function!r}; "
            f"{instead if defined else 'it defines none'}"
        )
    is_ours = path.resolve().is_relative_to(OURS)
    if is_ours or ragen_apo.__name__ not in _imported_names(tree):
        raise ConfigError(
            f"environment.name: {reference!r} is no environment: "
            + (
                f"{path} belongs to ragen-apo, whose environments are named shortly, such as shop"
                if is_ours
                else f"{path} imports nothing from ragen_apo, as every environment does "
                "(docs/adding_an_environment.md)"
            )
        )


def _imported_file(path: Path) -> ModuleType:
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
        with in_one_sentence(str(path), "importing it"):
            spec.loader.exec_module(module)
        _refuse_neighbours_of_others(path)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _refuse_neighbours_of_others(path: Path) -> None:
    """Python keeps one module of a name: two folders with a `words.py` cannot both have theirs."""
    for name in _imported_names(ast.parse(path.read_bytes())):
        beside = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
        found = getattr(sys.modules.get(name), "__file__", None)
        there = [file for file in beside if file.exists()]
        if found is None or not there or any(file.samefile(found) for file in there):
            continue
        if any(map(Path(found).is_relative_to, _FOLDERS)):
            raise ConfigError(
                f"environment.name: {path} imports {name!r}, and the one that is loaded is that of "
                f"another environment, {found}; give one of the two files another name"
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
def in_one_sentence(name: str, doing: str) -> Iterator[None]:
    """Turns exceptions of foreign code into errors of this package."""
    try:
        yield
    except RagenApoError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"environment.name: {name!r} cannot be loaded ({exception_in_words(error)}); install "
            "what is missing"
        ) from error
    except FOREIGN_FAILURES as error:
        raise EnvironmentFaultError(
            f"the environment {name!r}: {doing} raised {raised_in_words(error)}; its code has to "
            "be repaired"
        ) from error


def call_factory(name: str, factory: object, options: Mapping[str, Any]) -> object:
    """The environment that a foreign factory makes."""
    if not callable(factory):
        raise ConfigError(
            f"environment.name: {name!r} is of the type {type(factory).__name__}, which cannot be "
            f"called; {_HAS_TO_BE}"
        )
    _refuse_options(name, factory, options)
    with in_one_sentence(name, "making it"):
        made = factory(**options)
        missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        raise EnvironmentFaultError(
            f"the environment {name!r}: its factory returned {type(made).__name__}, which has no "
            f"{', no '.join(missing)}; {_HAS_TO_BE} (docs/adding_an_environment.md)"
        )
    return made


def _refuse_options(name: str, factory: Callable[..., object], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that do not fit the factory's parameters."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # one written in C may have none; calling it will tell
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment: {name!r} does not take these options ({error}); its parameters are "
            f"{signature}"
        ) from error
