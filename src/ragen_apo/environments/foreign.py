"""Factories of foreign environments: an installed package's, or what a reference names.

The caller gets an environment or an error in one sentence: ConfigError if the name or the options
are wrong, EnvironmentFaultError if the foreign code fails. How a reference is resolved, and what is
refused: `config.named_code`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from ragen_apo.config.named_code import in_one_sentence
from ragen_apo.errors import ConfigError, EnvironmentFaultError

MEMBERS = ("properties", "tasks", "reset", "step", "state_key", "scripted_policies")
"""Those of `TextEnvironment`."""
_CALLS: Mapping[str, tuple[str, tuple[Any, ...], Mapping[str, Any]]] = {
    "tasks": ("tasks(split)", ("train",), {}),
    "reset": ("reset(task, seed=seed)", (None,), {"seed": 0}),
    "step": ("step(action)", ("",), {}),
    "state_key": ("state_key()", (), {}),
    "scripted_policies": ("scripted_policies()", (), {}),
}
"""How each method is called, in words and with arguments."""
_HAS_TO_BE = "expected a function or class that takes the options and makes an environment"


def plugin_factory(plugin: EntryPoint) -> object:
    """The factory of an installed package's entry point."""
    with in_one_sentence(plugin.name, "importing it"):
        return plugin.load()


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


def refuse_other_parameters(name: str, made: object) -> None:
    """Raises EnvironmentFaultError for methods that do not take what they are given."""
    for method, (call, arguments, keywords) in _CALLS.items():
        try:
            function = getattr(made, method)
            inspect.signature(function, follow_wrapped=False).bind(*arguments, **keywords)
        except ValueError:  # one written in C may have no signature
            continue
        except TypeError as error:
            raise EnvironmentFaultError(
                f"the environment {name!r}: {type(made).__name__}.{method} cannot be called as "
                f"{call} ({error}); give it these parameters"
            ) from error


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
