"""Stops a run whose policy falls apart, by rules on its metrics.

Consumes the rows of metrics.jsonl one by one and nothing else, so a resumed run that reads the rows
of its file knows what the interrupted one knew. A rule stops the run when it held in `patience`
rows one after the other; rows without its metric (no update, no measurement) are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ragen_apo.config.training import EarlyStopConfig


@dataclass(frozen=True)
class Rule:
    """What a key of `training.early_stop` compares with its limit."""

    key: str
    metric: str
    is_floor: bool = False
    """The rule holds below the limit, not above."""


RULES = (
    Rule("min_mutual_information", "mutual_information", is_floor=True),
    Rule("min_entropy", "entropy", is_floor=True),
    Rule("max_entropy", "entropy"),
    Rule("max_kl", "kl_per_sequence"),
    Rule("max_format_error_share", "format_error_share"),
    Rule("max_return_drop", "return_drop"),
)


@dataclass(frozen=True)
class EarlyStop:
    """Why a run ended before its last step."""

    rule: str
    """The key in `training.early_stop`, or `rollout_filter` where it left no task."""
    step: int
    """Steps that were made."""
    reason: str
    """The same as a sentence, with the numbers."""


class EarlyStopWatch:
    """Notes rows; `stopped` says whether and why a rule is broken."""

    def __init__(self, settings: EarlyStopConfig, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._settings = settings
        self._num_held = {rule.key: 0 for rule in RULES}
        self._best_return = float("-inf")
        self.stopped: EarlyStop | None = None
        for row in rows:
            self.note(row)

    def note(self, row: Mapping[str, Any]) -> None:
        """Takes the next row; nothing changes after the first rule that stopped the run."""
        self._best_return = max(self._best_return, row["return_mean"])
        values = {**row, "return_drop": self._best_return - row["return_mean"]}
        for rule in RULES:
            limit = getattr(self._settings, rule.key)
            if limit is None or rule.metric not in values or self.stopped is not None:
                continue
            value = values[rule.metric]
            holds = value < limit if rule.is_floor else value > limit
            self._num_held[rule.key] = self._num_held[rule.key] + 1 if holds else 0
            if self._num_held[rule.key] >= self._settings.patience:
                self.stopped = EarlyStop(rule.key, row["step"], self._reason(rule, limit, values))

    def _reason(self, rule: Rule, limit: float, values: Mapping[str, Any]) -> str:
        what = rule.metric
        if what == "return_drop":
            what = f"the fall of return_mean from its best ({self._best_return:.4g})"
        side = "below" if rule.is_floor else "above"
        rows = "row" if self._settings.patience == 1 else "rows in succession"
        return (
            f"{what} was {side} {limit:g} in {self._settings.patience} {rows}, in the last one "
            f"{values[rule.metric]:.4g} (training.early_stop.{rule.key})"
        )
