"""The packages that play the games: an extra, so they may be missing."""

from importlib import import_module, metadata
from typing import Any

from ragen_apo.errors import ConfigError


def package_versions() -> str:
    """Of what plays the games; raises ConfigError where it is missing."""
    try:
        return "-".join(map(metadata.version, ("textworld", "alfworld")))
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"environment.name: 'textworld' needs the package {error.name}, which is not "
            "installed; run `pip install 'ragen-apo[textworld]'`"
        ) from error


def imported(name: str) -> Any:
    """A module of theirs; raises ConfigError where it cannot be imported."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"environment.name: 'textworld' needs {name}, which cannot be imported ({error}); run "
            "`pip install 'ragen-apo[textworld]'`"
        ) from error
