"""What pages say of a run: its line in the list, its tiles, its curves.

Consumes a `Site`; produces records for templates, numbers already written as people read them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ragen_apo.errors import RunDirectoryError
from ragen_apo.plural import counted
from ragen_apo.report.algorithm import algorithm_of, circumstances
from ragen_apo.report.api_model import api_model
from ragen_apo.report.findings import evaluated_tasks, phase_seconds, total_seconds
from ragen_apo.report.load import RunData, finite, pair, series
from ragen_apo.report.panels import Panel, before_stage_two, stage_two_panels
from ragen_apo.report.style import ABSENT, compact, decimal, duration, interval, one_line, percent
from ragen_apo.web.view.curves import Curve, curve
from ragen_apo.web.view.folder import last_change
from ragen_apo.web.view.rows import Progress
from ragen_apo.web.view.site import Site
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
TOKENS_PANEL = Panel("Tokens per second in rollouts", "tokens_per_second")


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


def run_line(site: Site, name: str) -> RunLine:
    """A run in a line; one that is damaged says so."""
    run = site.folder.run(name)
    state, changed = state_of(run), _ago(last_change(run))
    try:
        data, progress = site.data(name), site.progress(name)
        if api_model(data) is not None:
            reached = _answered(site, name, data)
        else:
            reached = _reached(data, progress) or _before_stage_two(site, name)
    except (RunDirectoryError, OSError) as error:
        return RunLine(name, state, changed=changed, problem=one_line(error, 300))
    # What ends as it was asked to is no attempt at more.
    if state is RunState.STOPPED and data.record.get("attempts") == 0:
        state = RunState.WARM_STARTED
    return RunLine(
        name=name,
        state=state,
        algorithm=algorithm_label(data),
        environment=one_line(data.option("environment", "name") or ABSENT, 60),
        progress=reached,
        best=_best(progress),
        success=percent(data.results.get("success_rate")),
        success_interval=interval(data.results.get("success_ci95")),
        changed=changed,
    )


def algorithm_label(data: RunData) -> str:
    """The algorithm, or the model behind an API that played instead of a run."""
    asked = api_model(data)
    return algorithm_of(data).label if asked is None else asked.label


def run_page(site: Site, name: str) -> dict[str, Any]:
    """The numbers and curves of a run now: what changes on its page while it trains."""
    line = run_line(site, name)
    files = ("metrics", "distillation", "warm_start")
    data = replace(site.data(name), **{file: site.rows(name, file) for file in files})
    rates = _token_rates(data.metrics)
    return {
        "line": line,
        "tiles": _tiles(data, line, rates),
        "notices": circumstances(data),
        "curves": _curves(data, rates),
        "phases": [(one_line(phase, 60), duration(took)) for phase, took in phase_seconds(data)],
        "has_rows": bool(data.metrics),
        "is_of_api": api_model(data) is not None,
    }


def _before_stage_two(site: Site, name: str) -> str:
    """How far a run has come that has made no step yet."""
    run = site.folder.run(name)
    if run.reference(0).exists() and not run.distillation.exists():
        return "has its reference"
    for file in ("distillation", "warm_start"):
        last = site.progress(name, file).last
        if finite(last.get("step")) is not None:
            return f"{one_line(last.get('phase', file), 40)}, step {compact(last['step'])}"
    return "before its first step"


def _answered(site: Site, name: str, data: RunData) -> str:
    """How far the evaluation of a model behind an API has come."""
    if data.results:
        return counted(data.num_episodes, "episode")
    answers, episodes = site.num_answers(name)
    most = compact(data.option("evaluation", "num_episodes"))  # a split may have fewer tasks
    return f"{counted(answers, 'answer')} so far, in {episodes:,} of up to {most} episodes"


def _reached(data: RunData, progress: Progress) -> str:
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


def _tiles(
    data: RunData, line: RunLine, rates: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Numbers, each with what it is."""
    results, is_running = data.results, line.state is RunState.RUNNING
    tiles: list[tuple[str, str]] = []
    if results:
        label = f"success on {evaluated_tasks(data)}"
        if (bounds := pair(results.get("success_ci95"))) is not None:
            label += f", 95% interval {interval(bounds)}"
        tiles.append((percent(results.get("success_rate")), label))
        tiles.append((decimal(results.get("avg_reward"), 3), "average reward there"))
    if data.metrics:
        rate = compact(round(rates[-1]["tokens_per_second"])) if rates else ABSENT
        last_rate = percent(data.metrics[-1].get("success_rate"))
        tiles.append((line.progress.removeprefix("step "), "steps"))
        tiles.append((last_rate, "success in the last rollouts"))
        tiles.append((line.best.replace(" at ", " at step "), "best success"))
        tiles.append((rate, "tokens per second, last step"))
    if is_running and (left := _seconds_left(data)) is not None:
        tiles.append((f"about {duration(left)}", "left of Stage 2, without evaluations"))
    if (total := total_seconds(data)) is not None:
        tiles.append((duration(total), "so far" if is_running else "the whole run"))
    return tiles


def _token_rates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Generated tokens over the seconds of the rollouts, those ahead of their step included."""
    steps, tokens = series(rows, "num_generated_tokens")
    waited = dict(zip(*series(rows, "rollout_seconds"), strict=True))
    ahead = dict(zip(*series(rows, "rollout_ahead_seconds"), strict=True))
    return [
        {"step": step, "tokens_per_second": number / seconds}
        for step, number in zip(steps, tokens, strict=True)
        if (seconds := waited.get(step, 0.0) + ahead.get(step, 0.0)) > 0
        and finite(number / seconds) is not None
    ]


def _seconds_left(data: RunData) -> float | None:
    """The steps that are left, each as long as the last ones were; None if Stage 2 is over."""
    most = finite(data.option("training", "max_steps"))
    if data.record.get("early_stop"):
        return None
    steps, rollouts = series(data.metrics, "rollout_seconds")
    _, updates = series(data.metrics, "training_seconds")
    if most is None or not rollouts or not updates:
        return None
    last = slice(-NUM_RECENT_STEPS, None)
    num_left = most - steps[-1]
    return num_left * (fmean(rollouts[last]) + fmean(updates[last])) if num_left > 0 else None


def _curves(data: RunData, rates: Sequence[Mapping[str, Any]]) -> list[Curve]:
    drawn = [(panel, data.metrics) for panel in (*stage_two_panels(data), *MORE_PANELS)]
    drawn += [(TOKENS_PANEL, rates), *before_stage_two(data)]
    curves = [
        curve(panel, series(rows, panel.key), series(rows, panel.evaluation_key or ""))
        for panel, rows in drawn
    ]
    return [each for each in curves if each is not None]


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
