"""The failed episodes as a document: each pattern with its meaning, examples and advice.

Consumes `RunData`; produces Markdown. Text of the policy and the environment stands only inside
code fences that are longer than any fence within it; control characters are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ragen_apo.evaluation.failures import FailurePattern
from ragen_apo.printable import printable
from ragen_apo.report.algorithm import algorithm_of, circumstances
from ragen_apo.report.api_model import api_model
from ragen_apo.report.episodes import readable_episode
from ragen_apo.report.load import RunData
from ragen_apo.report.style import counted, interval, one_line, percent
from ragen_apo.report.tables import failure_rows, failure_words, num_failures
from ragen_apo.types import StopReason, TurnFlag

TARGET_PATTERNS = ("wrong_final_action", "loop", "wrong_purchase", "search_loop")
"""Patterns whose remedy depends on whether the goal was on screen."""
_CODE = re.compile("(?<!`)(`[^`]+`)(?!`)")
_ACTIVE = re.compile(r"[\\`\[\]<>&|]")
"""What begins code, links, pictures, tags, characters by name and cells."""


def failure_analysis(run: RunData) -> str:
    """The whole document."""
    return printable("\n\n".join([_introduction(run), _table(run), *_sections(run)])) + "\n"


def pattern_note(run: RunData, pattern: str) -> str:
    """How often the goal was on screen, for `TARGET_PATTERNS`, and how often the context was full.

    Empty where there is nothing to say.
    """
    failed = [row for row in run.episodes if row.get("failure") == pattern]
    among = counted(len(failed), "episode")
    notes: list[str] = []
    if failed and pattern in TARGET_PATTERNS and any(map(_goal_shown, run.episodes)):
        num_shown = sum(map(_goal_shown, failed))
        notes.append(f"The goal had been on screen in {num_shown} of {among}.")
    full = StopReason.CONTEXT_LIMIT.value
    if num_full := sum(row.get("stop_reason") == full for row in failed):
        notes.append(f"Of {among}, {num_full} ended because the context was full.")
    return " ".join(notes)


def _goal_shown(row: Mapping[str, Any]) -> bool:
    flag = TurnFlag.TARGET_SHOWN.value
    return any(flag in (turn.get("flags") or ()) for turn in row.get("turns") or ())


def _introduction(run: RunData) -> str:
    failed, results = num_failures(run), run.results
    how = "distilled from its reference" if run.distilled else "not trained"
    how = f"trained by {algorithm_of(run).label}" if run.trained else how
    asked = api_model(run)
    opening = f"The policy was {how}" if asked is None else asked.sentence
    sentence = (
        f"{opening}. {failed} of "
        f"{counted(run.num_episodes, 'evaluated episode')} failed; success "
        f"rate {percent(results.get('success_rate'))} (95% interval "
        f"{interval(results.get('success_ci95'))})."
    )
    sentence = markdown(one_line(" ".join([sentence, *circumstances(run)])))
    names = ", ".join(failure_words(run, pattern.value).name for pattern in FailurePattern)
    order = f"Every failed episode has one pattern, the first that fits: {markdown(names)}."
    return (
        f"# Failure analysis\n\n{sentence}\n\n{order if failed else 'There is nothing to analyse.'}"
    )


def _table(run: RunData) -> str:
    lines = ["| pattern | episodes | share | meaning |", "|---|---:|---:|---|"]
    for row in failure_rows(run):
        name, meaning = (text.replace("|", "/") for text in (row.words.name, row.words.meaning))
        lines.append(f"| {markdown(name)} | {row.count:,} | {percent(row.share)} | {meaning} |")
    return "\n".join(lines) + "\n\n![Failed episodes by pattern](failures.png)"


def _sections(run: RunData) -> list[str]:
    sections: list[str] = []
    for row in failure_rows(run):
        if row.count:
            note = pattern_note(run, row.pattern)
            parts = [
                f"## {markdown(row.words.name.capitalize())}: {counted(row.count, 'episode')}",
                f"**What it means.** {row.words.meaning} {note}".rstrip(),
                f"**What to do.** {row.words.advice}",
                *map(_example, row.examples),
            ]
            sections.append("\n\n".join(parts))
    return sections


def _example(row: Mapping[str, Any]) -> str:
    return f"### Episode {row.get('episode')}\n\n{fenced(readable_episode(row))}"


def markdown(text: str) -> str:
    """Text of one line as Markdown that shows it: no picture, link or tag comes of names in it.

    Parts between two single backticks are code, as in the report's own sentences.
    """
    parts = _CODE.split(text)  # code at every second place
    return "".join(
        part if number % 2 else _ACTIVE.sub(r"\\\g<0>", part) for number, part in enumerate(parts)
    )


def fenced(text: str, *, language: str = "text") -> str:
    """The text in a code fence that nothing within it can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
