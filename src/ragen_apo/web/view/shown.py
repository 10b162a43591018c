"""What pages say of a run: its line in the list, its tiles, its curves.

Consumes a `RunReader`; produces records for templates, numbers already written as people read them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ragen_apo.errors import RunDirectoryError
from ragen_apo.plural import counted
from ragen_apo.report.algorithm import algorithm_of, circumstances
from ragen_apo.report.api_model import api_model
from ragen_apo.report.findings import evaluated_tasks, phase_seconds, total_seconds
from ragen_apo.report.load import RunData, finite, pair
from ragen_apo.report.panels import (
    DISTILLATION_PANEL,
    WARM_START_PANELS,
    Panel,
    stage_two_panels,
)
from ragen_apo.report.style import ABSENT, compact, decimal, duration, interval, one_line, percent
from ragen_apo.web.view.curves import Curve, curve
from ragen_apo.web.view.folder import last_change
from ragen_apo.web.view.growing import Metrics, Progress
from ragen_apo.web.view.run_files import RunReader
from ragen_apo.web.view.state import RunState, state_of

NUM_RECENT_STEPS = 10
"""Steps whose seconds say how long the others will take."""

MORE_PANELS = (
    Panel("Loss", "loss"),
    Panel("Entropy per token", "entropy"),
    Panel("Turns per episode", "num_turns_mean"),
    Panel("Responses without an action", "format_error_share", share=True),
    Panel("Information of thoughts, nats", "mutual_information"),
)
"""Of Stage 2, after those that a report draws as well."""
TOKENS_PANEL = Panel("Tokens per second in rollouts", "tokens")


@dataclass(frozen=True)
class Tile:
    """A number and what it is."""

    value: str
    label: str


@dataclass(frozen=True)
class RunLine:
    """A run in the list."""

    name: str
    state: RunState
    algorithm: str = ABSENT
    environment: str = ABSENT
    progress: str = ABSENT
    best: str = ABSENT
    success: str = ABSENT
    success_interval: str = ABSENT
    changed: str = ABSENT
    problem: str = ""
    """Why its files cannot be read."""


@dataclass(frozen=True)
class RunPage:
    """The part of a run's page that changes while it trains."""

    line: RunLine
    tiles: tuple[Tile, ...]
    notices: tuple[str, ...]
    curves: tuple[Curve, ...]
    phases: tuple[tuple[str, str], ...]
    has_rows: bool


def run_line(reader: RunReader, name: str) -> RunLine:
    """A run in a line; one that is damaged says so."""
    run = reader.folder.run(name)
    state, changed = state_of(run), _ago(last_change(run))
    try:
        data, progress = reader.data(name), reader.progress(name)
        reached = _progress(data, progress) or _before_stage_two(reader, name)
    except (RunDirectoryError, OSError) as error:
        return RunLine(name, state, changed=changed, problem=one_line(error, 300))
    results = data.results
    return RunLine(
        name=name,
        state=state,
        algorithm=algorithm_label(data),
        environment=one_line(data.option("environment", "name") or ABSENT, 60),
        progress=reached,
        best=_best(progress),
        success=percent(results.get("success_rate")),
        success_interval=interval(results.get("success_ci95")),
        changed=changed,
    )


def algorithm_label(data: RunData) -> str:
    """The algorithm, or the model behind an API that played instead of a run."""
    asked = api_model(data)
    return algorithm_of(data).label if asked is None else asked.label


def run_page(reader: RunReader, name: str) -> RunPage:
    """The numbers and curves of a run now."""
    data, metrics = reader.data(name), reader.metrics(name)
    line = run_line(reader, name)
    phases = [(one_line(phase, 60), duration(took)) for phase, took in phase_seconds(data)]
    return RunPage(
        line=line,
        tiles=tuple(_tiles(data, metrics, line)),
        notices=tuple(circumstances(data)),
        curves=tuple(_curves(reader, name, data, metrics)),
        phases=tuple(phases),
        has_rows=metrics.num_rows > 0,
    )


def _before_stage_two(reader: RunReader, name: str) -> str:
    """How far a run has come that has made no step yet."""
    run = reader.folder.run(name)
    if run.reference(0).exists() and not run.distillation.exists():
        return "has its reference"
    for file in ("distillation", "warm_start"):
        last = reader.progress(name, file).last
        if finite(last.get("step")) is not None:
            return f"{one_line(last.get('phase', file), 40)}, step {compact(last['step'])}"
    return "before its first step"


def _progress(data: RunData, progress: Progress) -> str:
    if api_model(data) is not None:
        return counted(data.num_episodes, "episode")
    step = finite(progress.last.get("step"))
    if step is None:
        return ""
    return f"step {compact(step)} of {compact(data.option('training', 'max_steps'))}"


def _best(progress: Progress) -> str:
    """The best success rate of an evaluation during training, or of the rollouts."""
    if progress.best is None:
        return ABSENT
    what = "" if progress.is_evaluated else " (rollouts)"
    return f"{percent(progress.best)} at {compact(progress.best_step)}{what}"


def _tiles(data: RunData, metrics: Metrics, line: RunLine) -> list[Tile]:
    last, results = metrics.last, data.results
    tiles: list[Tile] = []
    if results:
        label = f"success on {evaluated_tasks(data)}"
        if (bounds := pair(results.get("success_ci95"))) is not None:
            label += f", 95% interval {interval(bounds)}"
        tiles.append(Tile(percent(results.get("success_rate")), label))
        tiles.append(Tile(decimal(results.get("avg_reward"), 3), "average reward there"))
    if metrics.num_rows:
        tiles.append(Tile(line.progress.removeprefix("step "), "steps"))
        tiles.append(Tile(percent(last.get("success_rate")), "success in the last rollouts"))
        tiles.append(Tile(line.best.replace(" at ", " at step "), "best success"))
        tiles.append(Tile(_tokens_per_second(metrics), "tokens per second, last step"))
    if line.state is RunState.RUNNING and (left := _seconds_left(data, metrics)) is not None:
        tiles.append(Tile(f"about {duration(left)}", "left of Stage 2, without evaluations"))
    if (total := total_seconds(data)) is not None:
        tiles.append(
            Tile(duration(total), "so far" if line.state is RunState.RUNNING else "the whole run")
        )
    return tiles


def _tokens_per_second(metrics: Metrics) -> str:
    _, values = _token_rates(metrics)
    return compact(round(values[-1])) if values else ABSENT


def _token_rates(metrics: Metrics) -> tuple[list[float], list[float]]:
    """Generated tokens over the seconds of the rollouts, by step."""
    steps, tokens = metrics.series("num_generated_tokens")
    waited = dict(zip(*metrics.series("rollout_seconds"), strict=True))
    ahead = dict(zip(*metrics.series("rollout_ahead_seconds"), strict=True))
    if waited.keys() != set(steps):
        return [], []
    seconds = [waited[step] + ahead.get(step, 0.0) for step in steps]
    rates = [(step, n / s) for step, n, s in zip(steps, tokens, seconds, strict=True) if s > 0]
    return [step for step, _ in rates], [rate for _, rate in rates]


def _seconds_left(data: RunData, metrics: Metrics) -> float | None:
    """The steps that are left, each as long as the last ones were."""
    step = finite(metrics.last.get("step"))
    most = finite(data.option("training", "max_steps"))
    recent = [
        metrics.series(name)[1][-NUM_RECENT_STEPS:]
        for name in ("rollout_seconds", "training_seconds")
    ]
    if step is None or most is None or not all(recent):
        return None
    return (most - step) * sum(sum(values) / len(values) for values in recent)


def _curves(reader: RunReader, name: str, data: RunData, metrics: Metrics) -> list[Curve]:
    drawn = [
        curve(
            panel,
            metrics.series(panel.key),
            metrics.series(panel.evaluation_key) if panel.evaluation_key else ((), ()),
        )
        for panel in (*stage_two_panels(data), *MORE_PANELS)
    ]
    drawn.append(curve(TOKENS_PANEL, _token_rates(metrics)))
    others = [("distillation", "", DISTILLATION_PANEL)]
    others += [("warm_start", phase, panel) for phase, panel in WARM_START_PANELS.items()]
    for file, phase, panel in others:
        drawn.append(curve(panel, reader.metrics(name, file).series(panel.key, phase=phase)))
    return [each for each in drawn if each is not None]


def _ago(changed: float) -> str:
    """When that was, for people."""
    seconds = time.time() - changed
    if seconds < 90:
        return "just now"
    if seconds < 5400:
        return f"{round(seconds / 60)} min ago"
    if seconds < 129_600:
        return f"{round(seconds / 3600)} h ago"
    return time.strftime("%Y-%m-%d", time.localtime(changed))
