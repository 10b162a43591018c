"""The coverage of Stage 1: five facts in words, then every number of the value report.

Consumes the value report of `RunData`; produces rows of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragen_apo.report.algorithm import algorithm_of
from ragen_apo.report.load import RunData, finite, mapping
from ragen_apo.report.style import compact, counted, decimal, percent, words

OF_V_STAR = {"mean_v_star", "beta1", "mean_effective_samples", "share_resting_on_one"}
"""Numbers that say nothing to an algorithm without V*."""


def coverage_facts(run: RunData) -> list[tuple[str, str]]:
    """The five facts as (name, value); none of V* where the algorithm has none.

    Empty for a run without Stage 1.
    """
    report = _shown_report(run)
    facts = {
        "Samples": _samples(report) + _not_read(run, report),
        "Solved in k samples": ", ".join(f"{name} {value}" for name, value in passes(report)),
        "Tasks": _tasks(report),
        "Return of the reference": _returns(report),
        "V* rests on": _support(report),
    }
    return [(what, answer) for what, answer in facts.items() if answer]


def coverage_rows(run: RunData) -> list[tuple[str, str]]:
    """Every number of the value report as (name, value); without its advice."""
    report = _shown_report(run)
    rows: list[tuple[str, str]] = []
    for key in sorted(set(report) - {"advice", "tasks_below_k"}, key=_rank):
        value = report[key]
        if key == "pass_at_k":
            rows += passes(report)
        elif isinstance(value, Mapping):
            parts = sorted(value.items(), key=lambda part: (len(part[0]), part[0]))
            rows += [(f"{_name(key)}: {words(name)}", _text(key, part)) for name, part in parts]
        elif value is not None:
            rows.append((_name(key), _text(key, value)))
    return rows


def _shown_report(run: RunData) -> Mapping[str, Any]:
    """The value report, empty where Stage 1 was played neither for V* nor for distillation.

    The counts of a `rollout_filter` are left out where it does not choose tasks: they then say that
    every task was kept, and none never solved.
    """
    has_values = algorithm_of(run).has_values
    if not has_values and not run.option("distillation", "enabled"):
        return {}
    left_out = set() if has_values else {"selection", *OF_V_STAR}
    if (run.option("rollout_filter", "strategy") or "none") == "none":
        left_out.add("selection")
    return {key: value for key, value in run.value_report.items() if key not in left_out}


def _samples(report: Mapping[str, Any]) -> str:
    """`104 of 52 tasks, 2 each`."""
    if finite(report.get("num_samples")) is None:
        return ""
    sizes = sorted(int(n) for n in mapping(report.get("tasks_by_num_samples")) if n.isdigit())
    each = f", {sizes[0]} each" if len(sizes) == 1 else ""
    if len(sizes) > 1:
        each = f", {sizes[0]} to {sizes[-1]} each"
    return f"{compact(report['num_samples'])} of {counted(report.get('num_tasks'), 'task')}{each}"


def _not_read(run: RunData, report: Mapping[str, Any]) -> str:
    """How many of the samples training has read, if `estimate-values` has added some since."""
    read = finite(mapping(run.record.get("samples_of_references")).get("0"))
    sampled = finite(report.get("num_samples"))
    if read is None or sampled is None or sampled <= read:
        return ""
    return f"; training has read {read:,.0f} of them, and all numbers here are of all"


def in_order_of_k(pass_at_k: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Its items; in a file 16 stands before 2."""
    return sorted(pass_at_k.items(), key=lambda row: (len(row[0]), row[0]))


def passes(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """pass@k for every k that there are samples for; a lower bound says so."""
    below, num_tasks = mapping(report.get("tasks_below_k")), finite(report.get("num_tasks"))
    rows: list[tuple[str, str]] = []
    for k, share in in_order_of_k(mapping(report.get("pass_at_k"))):
        fewer = finite(below.get(k)) or 0
        if num_tasks is None or fewer < num_tasks:
            rows.append((f"pass@{k}", f"{'at least ' if fewer else ''}{percent(share)}"))
    return rows


def _tasks(report: Mapping[str, Any]) -> str:
    shares = {"never": "share_never_solved", "always": "share_always_solved"}
    known = {how: report[key] for how, key in shares.items() if finite(report.get(key)) is not None}
    return ", ".join(f"{percent(share)} {how} solved" for how, share in known.items())


def _returns(report: Mapping[str, Any]) -> str:
    if finite(report.get("mean_return")) is None:
        return ""
    text = f"{decimal(report['mean_return'])} in the mean"
    if finite(report.get("mean_v_star")) is None:
        return text
    beta = "" if finite(report.get("beta1")) is None else f" at β₁ = {compact(report['beta1'])}"
    return f"{text}; V* {decimal(report['mean_v_star'])}{beta}"


def _support(report: Mapping[str, Any]) -> str:
    """The mean effective sample size of V*."""
    size = finite(report.get("mean_effective_samples"))
    if size is None:
        return ""
    alone = report.get("share_resting_on_one")
    few = f"; {percent(alone)} of tasks: fewer than 2" if finite(alone) else ""
    return f"{decimal(size, 1)} equally weighted samples a task{few}"


def _rank(key: str) -> tuple[int, str]:
    """Numbers of tasks and samples first, then pass@k, shares and means, then the rest."""
    starts = ("num_", "pass_at", "share", "mean")
    return next((n for n, start in enumerate(starts) if key.startswith(start)), len(starts)), key


def _name(key: str) -> str:
    if key == "selection":
        return "rollout filter"
    return words(key).replace("num ", "").replace("v star", "V*")


def _text(key: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence):
        return ", ".join(_text(key, entry) for entry in value)
    return percent(value) if key.startswith("share") else compact(value)
