"""`--pretrained MODEL`: a pretrained model in a configuration that was written for the small one.

Learning rates of a model with random weights destroy a pretrained one, its tokenizer needs more
tokens, and it is larger. The file configs/pretrained.yaml says what is set in their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ragen_apo.config.overrides import merge
from ragen_apo.config.shipped import shipped_configurations
from ragen_apo.config.yaml_text import parse_yaml, read_yaml
from ragen_apo.errors import ConfigError

NAME = "pretrained"
"""Of the configuration that comes with the package."""
LONGEST = ("max_response_tokens", "max_context_tokens")
"""Keys of which the larger value counts."""
FEWEST = (
    "eval_episodes",
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
            f"pretrained: the configuration has a pretrained model, {policy['path']}, and the "
            f"settings for one; to train another one with them, write --policy.path {model}"
        )
    settings, _ = parse_yaml(read_yaml(shipped_configurations()[NAME]))
    return [values, merge(_within(settings, values), {"policy": {"path": model}})]


def _within(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, but those values that are larger or smaller where that is what counts."""
    layer: dict[str, Any] = {}
    for key, setting in settings.items():
        own = values.get(key)
        if isinstance(setting, Mapping):
            layer[key] = _within(setting, own if isinstance(own, Mapping) else {})
        elif key in LONGEST + FEWEST and isinstance(own, int | float) and math.isfinite(own):
            layer[key] = max(setting, own) if key in LONGEST else min(setting, own)
        else:
            layer[key] = setting
    return layer
