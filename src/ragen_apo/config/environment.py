"""The environment: its name and its own options."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, model_validator

from ragen_apo.config.references import with_absolute_paths
from ragen_apo.config.section import Section, as_section, require_json


class EnvironmentConfig(Section):
    """The environment, by name; all further keys are its options and are checked by it. A name
    alone, `environment: sokoban`, means its defaults.
    """

    model_config = ConfigDict(extra="allow")

    name: str = "shop"
    """Name of a built-in or installed environment, `path.py:function` or `module:function`; a
    relative path starts in the current directory and is kept as an absolute one."""

    @model_validator(mode="before")
    @classmethod
    def _paths_are_absolute(cls, values: Any) -> Any:
        """So that a run can be resumed, and evaluated, from another directory."""
        return with_absolute_paths(as_section(values))

    @model_validator(mode="after")
    def _options_are_json_values(self) -> EnvironmentConfig:
        require_json(self.options)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Every key of the section except `name`."""
        return dict(self.model_extra or {})
