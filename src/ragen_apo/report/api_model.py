"""A model behind an API in words, where the folder is an evaluation of one and not a run.

Consumes `RunData`; produces its name, its server without credentials, and sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ragen_apo.evaluation.failures import FailurePattern
from ragen_apo.report.load import RunData, finite, mapping
from ragen_apo.report.style import compact, counted, one_line

ADVICE: Mapping[str, str] = {
    FailurePattern.UNREADABLE.value: (
        "Read the responses. If they are cut off, raise `--max-tokens`. If the model describes its "
        "action instead of writing it, show it the form in a text of your own as "
        "`agent.system_prompt`; a server that has a parser for reasoning should use it."
    ),
    FailurePattern.IMPOSSIBLE.value: (
        "Read the actions beside what the observation offers. If the model does not know which "
        "actions there are, name them in a text of your own as `agent.system_prompt`."
    ),
    FailurePattern.WRONG_FINAL_ACTION.value: (
        "Read the last turns. If the model could know better, it is the model; if it could not, "
        "the observation lacks what it needs."
    ),
    FailurePattern.LOOP.value: (
        "Let the observation say that nothing changed. A temperature above 0 breaks some loops."
    ),
    FailurePattern.TIMEOUT.value: (
        "See whether the model was on its way: then let the environment play more turns "
        "(`--max-turns`), or serve the model with a longer context."
    ),
}
"""The neutral advice where nothing can be trained."""
_COUNTS = {
    "format_errors": "no readable action",
    "impossible_actions": "were impossible actions",
    "cut_off_answers": "were cut off",
    "empty_answers": "were empty",
    "refused_answers": "were refusals",
    "answers_without_usage": "came without their cost",
}


@dataclass(frozen=True)
class ApiModel:
    """The model that played."""

    name: str
    server: str
    """Host and port."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{one_line(self.name, 40)} (API)"

    @property
    def sentence(self) -> str:
        """What was played."""
        return (
            f"The episodes are those of {one_line(self.name, 80)} behind the API of {self.server}"
        )


def api_model(run: RunData) -> ApiModel | None:
    """The model behind an API; None for a run."""
    api = mapping(run.config.get("api"))
    return ApiModel(str(api.get("model")), _server(api.get("base_url"))) if api else None


def cost(run: RunData) -> str | None:
    """What its answers have cost in tokens."""
    usage = mapping(run.results.get("api"))
    if finite(usage.get("answers")) is None:
        return None
    return f"{cost_in_words(usage)}."


def cost_in_words(usage: Mapping[str, Any]) -> str:
    """`12 answers cost 340 prompt tokens and 60 completion tokens`, as far as the server said."""
    answers = counted(usage.get("answers"), "answer")
    untold = finite(usage.get("answers_without_usage")) or 0
    if untold >= usage["answers"] > 0:
        return f"{answers}, of which the server did not say what they cost"
    return (
        f"{answers} cost {'at least ' if untold else ''}"
        f"{counted(usage.get('prompt_tokens'), 'prompt token')} and "
        f"{counted(usage.get('completion_tokens'), 'completion token')}"
    )


def faults(run: RunData) -> str | None:
    """How many of its answers were none, where there were such."""
    usage = mapping(run.results.get("api"))
    parts = [_told(usage, key, words) for key, words in _COUNTS.items() if finite(usage.get(key))]
    if not parts:
        return None
    return f"Of its answers {', '.join(parts)}."


def _told(usage: Mapping[str, Any], key: str, words: str) -> str:
    number = compact(usage.get(key))
    return f"{number} had {words}" if words.startswith("no ") else f"{number} {words}"


def _server(base_url: object) -> str:
    """Host and port of a URL; whatever stands before an @ is left out."""
    try:
        netloc = urlsplit(str(base_url)).netloc
    except ValueError:
        netloc = ""
    return one_line(netloc.rpartition("@")[2], 80) or "an unknown server"
