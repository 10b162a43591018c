"""The failure analysis as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ragen_apo.evaluation.failures import FailurePattern
from ragen_apo.report.failure_analysis import NOTES, failure_analysis, fenced, readable_episode
from ragen_apo.report.load import load_run


def test_every_failure_pattern_has_a_meaning_and_an_advice() -> None:
    assert set(NOTES) == {pattern.value for pattern in FailurePattern}


def test_the_table_lists_all_patterns_and_only_those_that_occurred_have_a_section(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    failures = {**run.results["failures"], "timeout": {"count": 0, "share": 0.0, "examples": []}}
    text = failure_analysis(dataclasses.replace(run, results={**run.results, "failures": failures}))
    assert "| wrong purchase | 4 | 4.0% |" in text
    assert "| timeout | 0 | 0.0% |" in text
    assert "## Wrong purchase: 4 episodes" in text
    assert "## Search loop: 2 episodes" in text
    assert "## Timeout" not in text


def test_at_most_three_examples_are_told_per_pattern(build_run: Callable[..., Path]) -> None:
    text = failure_analysis(load_run(build_run()))
    section = text.partition("## Wrong purchase")[2].partition("\n## ")[0]
    assert section.count("### Episode ") == 3
    assert "The goal had been on screen in 4 of 4 episodes." in section


def test_an_episode_is_told_turn_by_turn() -> None:
    row = {
        "task": {"category": "books", "instruction": "buy the atlas"},
        "return": 0.9,
        "num_turns": 1,
        "stop_reason": "the environment ended the episode",
        "final_observation": "You bought it.",
        "turns": [
            {"observation": "TASK\nbuy the atlas", "thought": "I know it", "action": "buy 3",
             "reward": 0.9, "flags": ["target_shown"]}
        ],
    }  # fmt: skip
    assert readable_episode(row) == (
        "books: buy the atlas\n"
        "return +0.90 in 1 turns; the environment ended the episode\n"
        "\n"
        "--- turn 1   reward +0.90   [target_shown]\n"
        "reads   TASK\n"
        "        buy the atlas\n"
        "thinks  I know it\n"
        "does    buy 3\n"
        "\n"
        "--- end\n"
        "answer  You bought it."
    )


def test_a_turn_without_action_shows_what_was_written() -> None:
    assert "wrote   gibberish" in readable_episode({"turns": [{"response": "gibberish"}]})


def test_text_cannot_leave_its_code_fence() -> None:
    text = fenced("before\n````\nafter")
    assert text == "`````text\nbefore\n````\nafter\n`````"


def test_a_run_without_failures_says_so(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    text = failure_analysis(dataclasses.replace(run, results={"failures": {}}))
    assert "There is nothing to analyse." in text


def test_escape_sequences_of_an_environment_are_escaped_in_the_document(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    title = "mug \x1b]0;owned\x07 \x9b2J \u202eevil"
    rows = [
        {**row, "final_observation": title, "task": {"category": title, "instruction": title}}
        for row in run.episodes
    ]
    text = failure_analysis(dataclasses.replace(run, episodes=rows))
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    assert "mug \\x1b]0;owned\\x07 \\x9b2J \\u202eevil" in text
