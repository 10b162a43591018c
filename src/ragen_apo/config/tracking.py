"""Which experiment trackers get a run's metrics beside its own files (docs/tracking.md)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ragen_apo.config.section import Section, SizeOrZero, one_or_more


class TrackingConfig(Section):
    """Experiment trackers, which get the numbers of the run's own files under the same names. A
    list alone, `tracking: [tensorboard, wandb]`, means these trackers with the defaults. All keys
    may change when a run is resumed (docs/tracking.md).
    """

    trackers: Annotated[
        list[Literal["tensorboard", "trackio", "wandb", "mlflow"]], BeforeValidator(one_or_more)
    ] = Field(default=[])
    """One or several, each an extra: `pip install 'ragen-apo[wandb]'`. Keys and addresses come from
    the environment alone."""
    project: str = "ragen-apo"
    """Under which name trackers keep runs together."""
    num_episodes: SizeOrZero = 4
    """How many episodes of an evaluation during training they get; 0 for none."""

    @field_validator("project")
    @classmethod
    def _every_tracker_takes_the_project(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
            raise ValueError(
                f"project has at most 100 letters, digits, '.', '-' and '_', got {name!r:.120}"
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _names_alone_are_trackers(cls, values: Any) -> Any:
        return {"trackers": values} if isinstance(values, str | list) else values
