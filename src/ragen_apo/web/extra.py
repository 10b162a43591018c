"""Whether the packages of the extra `web` are there. Imports none of them."""

from importlib.util import find_spec

from ragen_apo.errors import ConfigError

_PACKAGES = ("starlette", "uvicorn")


def require_web() -> None:
    """Raises ConfigError where a package that serves pages is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"pages in the browser need {' and '.join(missing)}, not installed here; run "
            "`pip install 'ragen-apo[web]'`"
        )
