"""The conditions under which a return was sampled: the part of a value's key that is not the task.

Stage 2 may use a return only if it was sampled and scored under its own conditions, so everything
that could change a return of the reference is a field here. A new field needs a new
`store.SCHEMA_VERSION`: older rows lack its value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from ragen_apo.errors import ValueStoreError

_LONGEST_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class SamplingConditions:
    """How a trajectory of the reference was sampled and scored; equal conditions share returns.

    Numbers are normalised, so 1 and 1.0 are the same temperature. Raises ValueStoreError for a
    number that is not finite.
    """

    reference_fingerprint: str
    """Content hash of the reference's weights, vocabulary and chat template."""
    environment: str
    environment_version: str
    """Of data, text and dynamics, the limit on turns included."""
    environment_options: str
    """Canonical JSON of the options that the environment was made with; "{}" for none."""
    reward_version: str
    context_mode: str
    chat_template_hash: str
    system_prompt: str
    parser_version: str
    """Changes whenever the same response would be read as another action."""
    max_response_tokens: int
    """Per turn."""
    max_context_tokens: int
    temperature: float
    format_penalty: float
    """Added to the reward for a response without a readable action."""
    invalid_action_penalty: float

    def __post_init__(self) -> None:
        for name in ("temperature", "format_penalty", "invalid_action_penalty"):
            # Adding 0.0 turns -0.0 into 0.0, which JSON would write differently.
            number = float(getattr(self, name)) + 0.0
            if not math.isfinite(number):
                raise ValueStoreError(f"SamplingConditions.{name} must be finite, got {number}")
            object.__setattr__(self, name, number)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; as keywords they make the same conditions."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        """128 bits in hex: the same in every process, different for any other value of a field."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_differences(stored: SamplingConditions, asked: SamplingConditions) -> list[str]:
    """One line for each field that differs: `field: store has ..., asked for ...`."""
    stored_values, asked_values = stored.to_json(), asked.to_json()
    return [
        f"{name}: store has {_shown(stored_values[name])}, asked for {_shown(asked_values[name])}"
        for name in asked_values
        if stored_values[name] != asked_values[name]
    ]


def _shown(value: Any) -> str:
    """The value; of a long text the beginning and a hash, which tells different texts apart."""
    text = repr(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: _LONGEST_SHOWN // 2]}... ({len(text)} characters, hash {digest})"
