"""One self-contained page about a run: no file beside it and no network is needed to read it.

Consumes `RunData` and the report's pictures; produces HTML. Everything that the policy, the
environment or a configuration wrote stays text. Jinja escapes it in the markup. Episodes are
embedded as JSON without any `<`, and the page's script shows them only through `textContent`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from ragen_apo.printable import printable
from ragen_apo.report import style
from ragen_apo.report.algorithm import algorithm_of
from ragen_apo.report.api_model import api_model
from ragen_apo.report.coverage import coverage_facts, coverage_rows, in_order_of_k
from ragen_apo.report.episodes import readable_episode
from ragen_apo.report.failure_analysis import pattern_note
from ragen_apo.report.findings import evaluated, key_sentences, phase_seconds, total_seconds
from ragen_apo.report.html import data_uri, render
from ragen_apo.report.load import RunData, mapping, with_leaves
from ragen_apo.report.tables import (
    category_rows,
    failure_rows,
    failure_words,
    method_rows,
    metric_names,
    monitor_rows,
    num_failures,
)

_TURN_FIELDS = ("observation", "response", "thought", "action", "reward", "flags",
                "num_prompt_tokens", "num_response_tokens")  # fmt: skip
_EPISODE_FIELDS = ("episode", "success", "return", "num_turns", "stop_reason", "failure",
                   "final_observation")  # fmt: skip


def page(
    run: RunData,
    *,
    curves: Sequence[tuple[str, bytes]],
    figures: Sequence[tuple[str, bytes]] = (),
    printed: bool = False,
) -> str:
    """The whole page; `curves` (none for a run without rows of Stage 2) and `figures` are PNGs by
    their titles. `printed`: for paper, with examples in place of the reader of episodes.
    """
    return render(
        "report.html",
        run=run,
        algorithm=algorithm_of(run),
        asked=api_model(run),
        policy=run.results.get("policy"),
        split=run.results.get("split"),
        evaluated=evaluated(run),
        headline=_headline(run),
        sentences=key_sentences(run),
        methods=method_rows(run),
        metric_names=metric_names(run),
        categories=category_rows(run),
        pass_at=in_order_of_k(mapping(run.results.get("pass_at_k"))),
        monitors=monitor_rows(run),
        facts=coverage_facts(run),
        coverage=coverage_rows(run),
        advice=run.value_report.get("advice"),
        failures=failure_rows(run),
        pattern_note=partial(pattern_note, run),
        num_failures=num_failures(run),
        phases=_phases(run),
        versions=mapping(run.record.get("versions")),
        curves=[(title, data_uri(picture)) for title, picture in curves],
        figures=[(title, data_uri(picture)) for title, picture in figures],
        printed=printed,
        examples=_examples(run) if printed else (),
        episodes_json=""
        if printed
        else json_for_script([with_leaves(_episode(run, row), _shown) for row in run.episodes]),
        percent=style.percent,
        compact=style.compact,
        metric_label=style.metric_label,
    )


def json_for_script(value: Any) -> Markup:
    """JSON that can stand inside a script element: ASCII, no `<`, `>`, `&`; NaN becomes null."""
    text = json.dumps(with_leaves(value, _finite_or_null), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _finite_or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: Any) -> Any:
    """A text without what steers or hides."""
    return printable(value) if isinstance(value, str) else value


def _headline(run: RunData) -> dict[str, Any]:
    policy, *baselines = method_rows(run)
    references = [row.success_rate for row in baselines if row.name == "reference"]
    return {
        **policy.cells,
        "bounds": policy.bounds,
        "rate": policy.success_rate,
        "reference": references[0] if references else None,
    }


def _phases(run: RunData) -> list[tuple[str, str]]:
    total = total_seconds(run)
    rows = [*phase_seconds(run), *([] if total is None else [("all together", total)])]
    return [(name, style.duration(seconds)) for name, seconds in rows]


def _examples(run: RunData) -> list[tuple[str, str]]:
    """An episode of each failure that occurred, and the first success, as people read them."""
    chosen = [(row.words.name, row.examples[0]) for row in failure_rows(run) if row.examples]
    solved = [("solved", row) for row in run.episodes if row.get("success") is True]
    return [
        (f"Episode {row.get('episode')}: {what}", printable(readable_episode(row)))
        for what, row in solved[:1] + chosen
    ]


def _episode(run: RunData, row: Mapping[str, Any]) -> dict[str, Any]:
    """An episode as the page's script reads it."""
    task, failure = mapping(row.get("task")), row.get("failure")
    return {
        "failure_name": failure_words(run, str(failure)).name if failure else None,
        **{field: row.get(field) for field in _EPISODE_FIELDS},
        "instruction": task.get("instruction"),
        "category": task.get("category"),
        "measured": style.measured(row.get("metrics")),
        "payload": json.dumps(task.get("payload") or {}, ensure_ascii=False),
        "turns": [
            {field: turn.get(field) for field in _TURN_FIELDS} for turn in row.get("turns") or ()
        ],
    }
