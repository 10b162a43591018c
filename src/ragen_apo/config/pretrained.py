"""`--pretrained MODEL`: a pretrained model in a configuration that was written for the small one.

Learning rates of a model with random weights destroy a pretrained one, its tokenizer needs more
tokens, and it is larger. The file configs/pretrained.yaml says what is set in their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_apo.config.overrides import merge
from ragen_apo.config.shipped import shipped_configurations
from ragen_apo.config.yaml_text import parse_yaml, read_yaml
from ragen_apo.errors import ConfigError

NAME = "pretrained"
"""Of the settings that come with the package."""
LONGEST = ("max_response_tokens", "max_context_tokens")
"""Keys of which the larger value counts."""
FEWEST = (
    "eval_episodes",
    "eval_every",
    "max_steps",
    "max_tasks",
    "micro_batch_size",
    "num_episodes_per_task",
    "num_rows",
    "num_samples",
    "num_steps",
    "tasks_per_step",
)
"""Keys of which the smaller value counts."""
LEFT_OUT = ("eval_every", "refresh_every_steps")
"""Keys that stay null where the configuration says so."""


def with_pretrained(values: Mapping[str, Any], model: str | None) -> list[Mapping[str, Any]]:
    """A configuration that is not validated yet, and the sections to lay over it for the model.

    `model` is a folder or a hub name; None adds nothing. Raises ConfigError where the configuration
    names a pretrained model itself.
    """
    if model is None:
        return [values]
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"pretrained: got {model!r}, expected the folder or the hub name of a model"
        )
    policy = values.get("policy")
    if isinstance(policy, Mapping) and policy.get("path") is not None:
        raise ConfigError(
            f"pretrained: the configuration names a model itself, {policy['path']}, and has the "
            f"settings for it; to train another one with them, write --policy.path {model}"
        )
    settings, _ = parse_yaml(read_yaml(shipped_configurations()[NAME]))
    stage_one = values.get("values")
    if isinstance(stage_one, Mapping) and stage_one.get("store") is not None:
        del settings["reference"]  # whose values are of one reference
    return [values, merge(_within(settings, values), {"policy": {"path": model}})]


def is_no_run(file: Path) -> bool:
    """Whether these are the settings, which make no configuration of a run by themselves."""
    if file.stem != NAME:
        return False
    settings = shipped_configurations().get(NAME)
    return settings is not None and file.resolve() == settings.resolve()


def _within(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, but those values that are larger or smaller where that is what counts."""
    layer: dict[str, Any] = {}
    for key, setting in settings.items():
        own = values.get(key)
        if key in LEFT_OUT and key in values and own is None:
            continue
        if isinstance(setting, Mapping):
            layer[key] = _within(setting, own if isinstance(own, Mapping) else {})
        elif key in LONGEST + FEWEST and isinstance(own, int | float) and math.isfinite(own):
            layer[key] = max(setting, own) if key in LONGEST else min(setting, own)
        else:
            layer[key] = setting
    return layer
