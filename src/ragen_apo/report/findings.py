"""The findings of a run in sentences, for the slides and the top of the page.

A sentence whose numbers are missing is left out.
"""

from __future__ import annotations

from statistics import fmean

from ragen_apo.report.algorithm import algorithm_of, circumstances, knew_tasks, search_label
from ragen_apo.report.api_model import api_model
from ragen_apo.report.load import RunData, finite, mapping
from ragen_apo.report.style import (
    ABSENT,
    compact,
    counted,
    decimal,
    duration,
    interval,
    one_line,
    percent,
    words,
)
from ragen_apo.report.tables import (
    OutcomeRow,
    category_rows,
    failure_rows,
    method_rows,
    num_failures,
)

LAST_STEPS = 5
FAR_APART = 0.2
"""Between the success of rollouts and of greedy decoding: more than their tasks differ, mostly."""


def headline(run: RunData) -> str:
    """The result in one sentence, with its interval."""
    asked, label = api_model(run), search_label(run)
    searched = f" with {label}" if label else ""
    if run.trained:
        subject = f"{algorithm_of(run).label}{searched} solves"
    else:
        subject = f"The distilled policy{searched} solves" if run.distilled else "Not trained:"
    if asked is not None:
        subject = f"{one_line(asked.name, 40)} solves"
    rate, bounds = percent(run.results.get("success_rate")), run.results.get("success_ci95")
    sentence = f"{subject} {rate} of {evaluated(run)}"
    if interval(bounds) == ABSENT:
        return sentence
    return f"{sentence} (95% interval {interval(bounds)})"


def evaluated(run: RunData) -> str:
    """What was played: `100 held-out tasks`, or `100 episodes of 13 held-out tasks`."""
    num_tasks = int(finite(run.results.get("tasks")) or run.num_episodes)
    played = counted(run.num_episodes, "episode")
    episodes = f"{played} of " if num_tasks < run.num_episodes else ""
    return f"{episodes}{num_tasks:,} {evaluated_tasks(run, num_tasks)}"


def evaluated_tasks(run: RunData, number: int | None = None) -> str:
    """The evaluated tasks as a noun: `held-out tasks` for the split named test, unless a search has
    known rewards of them, or training has.
    """
    split, noun = str(run.results.get("split") or ""), "task" if number == 1 else "tasks"
    known = knew_tasks(run) or run.results.get("tasks_trained_on", 0) != 0
    names = {"": noun} if known else {"test": f"held-out {noun}", "": noun}
    return names.get(split, f"{noun} of split “{split}”")


def key_sentences(run: RunData) -> list[str]:
    """The gain, what came before it, steps, sampled play, full contexts, weakest category, most
    frequent failure and time.

    Also adapters, an early stop and that it was resumed. Each where it is known.
    """
    sentences = [
        _comparison(run),
        *circumstances(run),
        _steps(run),
        _sampled_play(run),
        _full_contexts(run),
        _weakest_category(run),
        _most_frequent_failure(run),
        _time(run),
    ]
    asked = api_model(run)
    if asked is not None:
        sentences.insert(0, f"{asked.sentence}.")
    elif run.trained and not run.metrics:
        sentences.insert(
            0, "The rows of Stage 2 are lost (metrics.jsonl), and with them the curves."
        )
    elif run.distilled:
        sentences.insert(
            0, "This run made no step of Stage 2: its policy is what distillation has left."
        )
    elif not run.trained:
        name = algorithm_of(run).label
        sentences.insert(
            0, f"This run has no Stage 2 metrics: the policy was not trained by {name}."
        )
    return [sentence for sentence in sentences if sentence]


ORDER = (
    "loading",
    "copy",
    "demonstrations",
    "stage 1",
    "distillation",
    "stage 2",
    "reference refresh",
    "evaluation",
)
"""Of the phases; run.json has them by name."""


def total_seconds(run: RunData) -> float | None:
    """The seconds of all recorded phases together; None if none is recorded."""
    seconds = [value for _, value in phase_seconds(run)]
    return sum(seconds) if seconds else None


def phase_seconds(run: RunData) -> list[tuple[str, float]]:
    """The phases of the run with the seconds that each took, in the order in which they come."""
    phases = mapping(run.record.get("phases"))
    rows = {
        words(str(name)): finite(mapping(phase).get("seconds")) for name, phase in phases.items()
    }
    ordered = sorted(rows, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return [(name, seconds) for name in ordered if (seconds := rows[name]) is not None]


def _comparison(run: RunData) -> str | None:
    """The gain over the reference, or over the first baseline where that was not played."""
    policy, *baselines = method_rows(run)
    for baseline in sorted(baselines, key=lambda row: row.name != "reference"):
        if policy.success_rate is not None and baseline.success_rate is not None:
            points = 100 * (policy.success_rate - baseline.success_rate)
            sentence = (
                f"{points:+.1f} points against the {baseline.label}: "
                f"{percent(baseline.success_rate)} to {percent(policy.success_rate)}"
                f"{_overlap(policy, baseline)}."
            )
            if points < 0 and run.trained and baseline.name == "reference":
                sentence += (
                    " If training has made it worse and this is no chance, “Nothing is learned” in "
                    "docs/troubleshooting.md says what to try."
                )
            return sentence
    return None


def _overlap(policy: OutcomeRow, baseline: OutcomeRow) -> str:
    ours, theirs = policy.bounds, baseline.bounds
    if ours is None or theirs is None:
        return ""
    apart = ours[0] > theirs[1] or theirs[0] > ours[1]
    return "; the intervals do not overlap" if apart else "; the intervals overlap"


def _steps(run: RunData) -> str | None:
    if finite(run.results.get("avg_steps")) is None:
        return None
    sentence = f"{decimal(run.results.get('avg_steps'))} turns per episode on average"
    reference = mapping(mapping(run.results.get("baselines")).get("reference"))
    if run.trained and finite(reference.get("avg_steps")) is not None:
        sentence += f", {decimal(reference.get('avg_steps'))} before training"
    return f"{sentence}; average reward {decimal(run.results.get('avg_reward'))}."


def _sampled_play(run: RunData) -> str | None:
    """That training saw another player than the evaluation did, if the two are far apart."""
    rates = [finite(row.get("success_rate")) for row in run.metrics[-LAST_STEPS:]]
    sampled = [rate for rate in rates if rate is not None]
    greedy = finite(run.results.get("success_rate"))
    played = mapping(run.results.get("evaluation"))
    is_greedy = played.get("temperature", run.option("evaluation", "temperature")) == 0
    if len(sampled) < LAST_STEPS or greedy is None or not is_greedy or search_label(run):
        return None
    if abs(greedy - fmean(sampled)) < FAR_APART:
        return None
    if greedy > fmean(sampled):
        advice = "If rollouts fail by single unlikely tokens, a lower sampling.temperature helps."
    else:
        temperature = compact(finite(run.option("sampling", "temperature")) or 1.0)
        advice = (
            "Either other tasks are harder for it, or greedy decoding says the same again and "
            f"again: `ragen-apo evaluate RUN --temperature {temperature}` samples as training does."
        )
    return (
        f"Sampled rollouts solved {percent(fmean(sampled))} of training tasks in the last steps, "
        f"greedy decoding solves {percent(greedy)} of the evaluated ones. {advice}"
    )


def _full_contexts(run: RunData) -> str | None:
    num_cut = finite(run.results.get("episodes_out_of_context"))
    if not num_cut:
        return None
    return (
        f"{int(num_cut):,} of {counted(run.results.get('episodes'), 'episode')} ended because the "
        "context was full, before the environment ended them. Scripted baselines have no context."
    )


def _weakest_category(run: RunData) -> str | None:
    rows = [row for row in category_rows(run) if row.success_rate is not None]
    if len(rows) < 2:
        return None
    best, *_, weakest = rows
    rate = percent(weakest.success_rate)
    if weakest.success_rate == best.success_rate:
        return f"All {len(rows)} categories at {rate}."
    num_weakest = sum(row.success_rate == weakest.success_rate for row in rows)
    if num_weakest > 1:
        return f"Weakest categories: {num_weakest} of {len(rows)} at {rate}."
    episodes = counted(weakest.summary.get("episodes"), "episode")
    return f"Weakest category: {weakest.label}, {rate} of {episodes}."


def _most_frequent_failure(run: RunData) -> str | None:
    rows, failures = failure_rows(run), num_failures(run)
    if not rows:
        return None
    if failures == 0:
        return "No evaluated episode failed."
    return f"Most frequent failure: {rows[0].words.name}, {compact(rows[0].count)} of {failures}."


def _time(run: RunData) -> str | None:
    total = total_seconds(run)
    if total is None:
        return None
    longest, seconds = max(phase_seconds(run), key=lambda row: row[1])
    return (
        f"The whole run took {duration(total)}; "
        f"the longest phase was {longest} with {duration(seconds)}."
    )
