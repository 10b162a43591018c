"""The tables of a report: methods side by side, failure patterns, monitors at start and end.

Consumes `RunData`; produces rows of plain values and the texts of
`summary.csv` and `summary.tex`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ragen_apo.config.algorithms import Monitor
from ragen_apo.config.search import WITHOUT_SEARCH
from ragen_apo.environments.base import PatternWords
from ragen_apo.evaluation.failures import NEUTRAL_WORDS, FailurePattern
from ragen_apo.report.algorithm import algorithm_of, monitors_of, search_label
from ragen_apo.report.api_model import ADVICE as API_ADVICE
from ragen_apo.report.api_model import api_model
from ragen_apo.report.latex import latex_table
from ragen_apo.report.load import RunData, finite, mapping, pair, series
from ragen_apo.report.style import (
    ABSENT,
    MAX_METRICS,
    compact,
    decimal,
    interval,
    one_line,
    percent,
    words,
)

CSV_COLUMNS = ("method", "success_rate", "avg_reward", "avg_steps")
LAST_CSV_COLUMNS = ("episodes", "success_ci95_low", "success_ci95_high")
BASELINES = (WITHOUT_SEARCH, "reference", "distilled", "heuristic", "random")
"""In this order, before others by name."""
MAX_EXAMPLES = 3
"""Episodes shown of a pattern of failure."""

MONITORS: Mapping[str, Monitor] = {
    "success_rate": Monitor("success rate (training rollouts)", share=True),
    "return_mean": Monitor("mean return"),
    "loss": Monitor("loss"),
    "kl_per_sequence": Monitor("KL to the reference, per episode"),
    "kl_per_token": Monitor("KL to the reference, per token"),
    "log_ratio_max_abs": Monitor("log ratio, largest"),
    "logprob_gap_mean": Monitor("sampler–trainer log-probability gap, mean"),
    "logprob_gap_max": Monitor("sampler–trainer log-probability gap, largest"),
    "entropy": Monitor("entropy"),
    "mutual_information": Monitor("information of thoughts about tasks, nats"),
    "retrieval_accuracy": Monitor("thoughts that fit their own task best", share=True),
    "empty_thought_share": Monitor("share of empty thoughts", share=True),
    "unclosed_thought_share": Monitor("share of unclosed thoughts", share=True),
    "truncated_share": Monitor("share of truncated episodes", share=True),
    "out_of_context_share": Monitor("share of episodes that a full context ended", share=True),
    "invalid_turn_share": Monitor("share of invalid turns", share=True),
    "format_error_share": Monitor("share of format errors", share=True),
    "num_turns_mean": Monitor("turns per episode"),
    "gradient_norm": Monitor("gradient norm"),
    "rollout_seconds": Monitor("seconds of rollouts per step"),
    "training_seconds": Monitor("seconds of training per step"),
}
"""Of every algorithm; its class has its own."""

UNKNOWN_WORDS = PatternWords(
    meaning="A pattern that this version of the report does not know.",
    advice="Read the examples.",
)
KNOWN_WORDS: Mapping[str, PatternWords] = {
    **NEUTRAL_WORDS,
    # Patterns in evaluations of earlier versions.
    "search_loop": replace(NEUTRAL_WORDS[FailurePattern.LOOP], name="search loop"),
    "wrong_purchase": replace(
        NEUTRAL_WORDS[FailurePattern.WRONG_FINAL_ACTION], name="wrong purchase"
    ),
    "invalid_format": replace(
        NEUTRAL_WORDS[FailurePattern.UNREADABLE],
        name="invalid format",
        meaning="Half or more of the turns had no readable or no possible action.",
    ),
}


@dataclass(frozen=True)
class OutcomeRow:
    """What came out of a policy, or of the evaluated one in a category."""

    name: str
    """Of the baseline or the category in results.json; empty for the evaluated policy."""
    label: str
    """For people."""
    summary: Mapping[str, Any]
    evaluated: bool = True
    """Whether this is of the policy that the run evaluated, not of a baseline."""

    @property
    def success_rate(self) -> float | None:
        return finite(self.summary.get("success_rate"))

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The 95% interval of the success rate."""
        return pair(self.summary.get("success_ci95"))

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The means of what the environment measures, by name."""
        return mapping(self.summary.get("metrics"))

    @property
    def cells(self) -> dict[str, str]:
        """Its numbers as text for a table, by their column."""
        return {
            "episodes": compact(self.summary.get("episodes")),
            "success": percent(self.success_rate),
            "interval": interval(self.bounds),
            "reward": decimal(self.summary.get("avg_reward"), 3),
            "steps": decimal(self.summary.get("avg_steps")),
        }


def method_rows(run: RunData) -> list[OutcomeRow]:
    """The evaluated policy, then its baselines: reference, heuristic, random, others by name."""
    rows = [OutcomeRow("", _evaluated_method(run), run.results)]
    baselines = mapping(run.results.get("baselines"))
    known = [name for name in BASELINES if name in baselines]
    others = sorted(set(baselines) - set(known))
    for name in known + others:
        warm = name == "reference" and run.option("warm_start", "enabled")
        label = f"{name} (warm start)" if warm else name
        rows.append(OutcomeRow(name, label, mapping(baselines[name]), evaluated=False))
    return rows


def metric_names(run: RunData) -> list[str]:
    """Of what the environment measures, by any of the methods."""
    names = dict.fromkeys(name for row in method_rows(run) for name in row.metrics)
    return list(names)[:MAX_METRICS]


def _evaluated_method(run: RunData) -> str:
    asked = api_model(run)
    if asked is not None:
        return asked.label
    method = f"policy ({'distilled' if run.distilled else 'not trained'})"
    method = f"{algorithm_of(run).label} (trained)" if run.trained else method
    label = search_label(run)
    return f"{method}, {label}" if label else method


def summary_csv(run: RunData) -> str:
    """The comparison as CSV: shares and numbers with four decimals, empty where unknown.

    After a search there is one more column, the tokens that it sampled for an episode. What the
    environment measures, which may be of any size, has a column each, with six digits. The last
    columns are the number of episodes and the bounds of the 95% interval of the success rate.
    """
    search = mapping(run.results.get("search"))
    columns = (*CSV_COLUMNS, *(["avg_tokens"] if search else []))
    measured = metric_names(run)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*columns, *measured, *LAST_CSV_COLUMNS])
    for row in method_rows(run):
        summary = {**row.summary, **(search if row.evaluated else {})}
        cells = [_cell(summary.get(column), ".4f") for column in columns[1:]]
        cells += [_cell(row.metrics.get(name), ".6g") for name in measured]
        cells += [_cell(row.summary.get("episodes"), ".0f")]
        cells += [_cell(bound, ".4f") for bound in row.bounds or (None, None)]
        writer.writerow([row.label, *cells])
    return stream.getvalue()


def _cell(value: object, form: str) -> str:
    number = finite(value)
    return "" if number is None else format(number, form)


def summary_latex(run: RunData) -> str:
    """The comparison for a paper, with the intervals."""
    rows = [[row.label, *row.cells.values()] for row in method_rows(run)]
    return latex_table(("Method", "Episodes", "Success", "95% interval", "Reward", "Steps"), rows)


def category_rows(run: RunData) -> list[OutcomeRow]:
    """The categories, the most successful first."""
    categories = mapping(run.results.get("by_category"))
    rows = [OutcomeRow(name, name, mapping(summary)) for name, summary in categories.items()]
    return sorted(rows, key=lambda row: (-(row.success_rate or 0.0), row.name))


@dataclass(frozen=True)
class FailureRow:
    """A pattern of failure."""

    pattern: str
    words: PatternWords
    count: int
    share: float
    """Of all episodes."""
    examples: Sequence[Mapping[str, Any]]
    """The rows of some of its episodes."""


def failure_rows(run: RunData) -> list[FailureRow]:
    """The failure patterns, those without an episode included, the most frequent first."""
    episodes = {row.get("episode"): row for row in run.episodes}
    rows: list[FailureRow] = []
    for pattern, each in mapping(run.results.get("failures")).items():
        summary = mapping(each)
        numbers = list(summary.get("examples") or ())[:MAX_EXAMPLES]
        rows.append(
            FailureRow(
                pattern=pattern,
                words=failure_words(run, pattern),
                count=int(finite(summary.get("count")) or 0),
                share=finite(summary.get("share")) or 0.0,
                examples=[episodes[number] for number in numbers if number in episodes],
            )
        )
    return sorted(rows, key=lambda row: -row.count)


def failure_words(run: RunData, pattern: str) -> PatternWords:
    """Name, meaning and advice of a failure pattern.

    In the words that the environment declared, as the evaluation kept them; else in neutral ones.
    Its advice is for training, so a model behind an API has advice of its own.
    """
    neutral = KNOWN_WORDS.get(pattern, UNKNOWN_WORDS)
    summary = mapping(mapping(run.results.get("failures")).get(pattern))
    declared = mapping(summary.get("words"))
    api_advice = API_ADVICE.get(pattern) if api_model(run) else None
    name = declared.get("name") or neutral.name or words(pattern)
    return PatternWords(
        name=one_line(name, 40),
        meaning=one_line(declared.get("meaning") or neutral.meaning),
        advice=one_line(api_advice or declared.get("advice") or neutral.advice),
    )


def num_failures(run: RunData) -> int:
    """The number of failed episodes, all patterns together."""
    return sum(row.count for row in failure_rows(run))


def monitor_rows(run: RunData) -> list[tuple[str, str, str]]:
    """Each recorded monitor: its name, its mean over the first and over the last tenth of steps.

    Of a monitor that was not recorded in such a tenth, the first or the last that was, and where.
    """
    last = int(max([len(run.metrics), *series(run.metrics, "step")[1]]))
    tenth = max(1, last // 10)
    rows: list[tuple[str, str, str]] = []
    for key, monitor in {**MONITORS, **monitors_of(run)}.items():
        steps, values = series(run.metrics, key)
        if values:
            recorded = list(zip(steps, values, strict=True))
            write = percent if monitor.share else compact_mean
            early = [value for step, value in recorded if step <= tenth]
            late = [value for step, value in recorded if step > last - tenth]
            first, newest = (
                write(fmean(part)) if part else f"{write(value)} (step {step:g})"
                for part, (step, value) in ((early, recorded[0]), (late, recorded[-1]))
            )
            rows.append((monitor.label, first, newest))
    return rows


def compact_mean(value: object) -> str:
    """A mean with three significant digits, small ones in powers of ten."""
    number = finite(value)
    if number is None:
        return ABSENT
    return f"{number:.3g}" if abs(number) < 1000 else compact(round(number))
