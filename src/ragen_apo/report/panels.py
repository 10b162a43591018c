"""The curves over steps that the report draws and the page in the browser: which, of which metric.

Consumes `RunData`; produces panels with their rows, without a picture. What an algorithm adds, its
class declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_apo.evaluation.summary import METRIC_PREFIX
from ragen_apo.report.algorithm import monitors_of
from ragen_apo.report.load import RunData
from ragen_apo.report.style import MAX_METRICS, metric_label


@dataclass(frozen=True)
class Panel:
    """One picture: which metric, and how it is drawn."""

    title: str
    """Short enough for half of a phone's width."""
    key: str
    evaluation_key: str | None = None
    """The same of the evaluations during training, in the same picture."""
    share: bool = False
    """Between 0 and 1, written in percent."""


TRAINING_PANELS = (
    Panel("Success rate", "success_rate", evaluation_key="eval_success_rate", share=True),
    Panel("Return per episode", "return_mean", evaluation_key="eval_avg_reward"),
    Panel("KL to the reference", "kl_per_sequence"),
)
"""Of every algorithm."""
WARM_START_PANELS = {
    "copy": Panel("Copying: accuracy", "accuracy", share=True),
    "demonstrations": Panel("Demonstrations: loss", "loss"),
}
"""By phase."""
DISTILLATION_PANEL = Panel("Distillation: loss", "loss")

Rows = Sequence[Mapping[str, Any]]


def stage_two_panels(run: RunData) -> tuple[Panel, ...]:
    """Success, return and KL of every algorithm, what the environment measures, and then what the
    algorithm's class declares.
    """
    own = (
        Panel(monitor.title, key, share=monitor.share)
        for key, monitor in monitors_of(run).items()
        if monitor.title
    )
    keys = dict.fromkeys(key for row in run.metrics for key in row if key.startswith(METRIC_PREFIX))
    measured = (
        Panel(metric_label(key.removeprefix(METRIC_PREFIX)), key, evaluation_key=f"eval_{key}")
        for key in list(keys)[:MAX_METRICS]
    )
    return (*TRAINING_PANELS, *measured, *own)


def panels(run: RunData) -> list[tuple[Panel, Rows]]:
    """The curves of the run, with their rows: Stage 2, then distillation and warm start."""
    return [*((panel, run.metrics) for panel in stage_two_panels(run)), *before_stage_two(run)]


def before_stage_two(run: RunData) -> list[tuple[Panel, Rows]]:
    """The curves of distillation and warm start that the run has."""
    curves: list[tuple[Panel, Rows]] = [(DISTILLATION_PANEL, first_distillation(run))]
    for phase, panel in WARM_START_PANELS.items():
        curves.append((panel, [row for row in run.warm_start if row.get("phase") == phase]))
    return [(panel, rows) for panel, rows in curves if rows]


def first_distillation(run: RunData) -> Rows:
    """Its updates, and the evaluation of what came out before the first step of Stage 2."""
    return [row for row in run.distillation if row.get("reference_version") == 0]
