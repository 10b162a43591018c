"""The value store in words, and every number behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragen_apo.report.coverage import coverage_facts, coverage_rows
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.page import page
from ragen_apo.values.coverage import coverage_report


def run_with(build_run: Callable[..., Path], report: dict[str, Any]) -> RunData:
    run = load_run(build_run())
    return dataclasses.replace(run, value_report=report)


def run_of_four_samples(build_run: Callable[..., Path]) -> RunData:
    returns = {"a": [1.0, 0.0], "b": [0.0, 0.0]}
    successes = {"a": [True, False], "b": [False, False]}
    return run_with(build_run, coverage_report(returns, successes, beta=0.5))


def test_the_value_store_is_five_facts_in_words_and_the_rest_is_folded(
    build_run: Callable[..., Path],
) -> None:
    run = run_of_four_samples(build_run)
    assert coverage_facts(run) == [
        ("Samples", "4 of 2 tasks, 2 each"),
        # the means of 1/2 and 0, of 1 and 0
        ("Solved in k samples", "pass@1 25.0%, pass@2 50.0%"),
        ("Tasks", "50.0% never solved, 0.0% always solved"),
        # V* of a: 0.5 log((e^2 + 1) / 2) = 0.717
        ("Return of the reference", "0.25 in the mean; V* 0.36 at β₁ = 0.5"),
        # 1.27 of a, 2 of b
        ("V* rests on", "1.6 equally weighted samples a task; 50.0% of tasks: fewer than 2"),
    ]
    html = page(run, curves=[])
    folded = html.partition("<summary>All numbers</summary>")[2].partition("</details>")[0]
    assert "share resting on one" in folded
    assert html.count("share resting on one") == 1


def test_samples_that_were_added_after_training_are_told_apart(
    build_run: Callable[..., Path],
) -> None:
    run = run_of_four_samples(build_run)
    shown = {}
    for read in (2, 4):
        record = {**run.record, "samples_of_references": {"0": read}}
        shown[read] = coverage_facts(dataclasses.replace(run, record=record))[0][1]
    of_all = "4 of 2 tasks, 2 each"
    told = "; training has read 2 of them, and all numbers here are of all"
    assert shown == {4: of_all, 2: of_all + told}


def test_distillation_shows_what_stage_1_found_also_where_nothing_subtracts_v_star(
    build_run: Callable[..., Path],
) -> None:
    returns = {"a": [1.0, 0.0], "b": [0.0, 0.0]}
    successes = {"a": [True, False], "b": [False, False]}
    report = coverage_report(returns, successes, beta=0.5) | {"selection": {"kept": 2}}
    of_apo = run_with(build_run, report)
    config = {
        **of_apo.config,
        "algorithm": {"name": "grpo"},
        "rollout_filter": {"strategy": "top_p"},
    }
    plain = dataclasses.replace(of_apo, config=config)
    assert coverage_facts(plain) == coverage_rows(plain) == []
    run = dataclasses.replace(plain, config={**config, "distillation": {"enabled": True}})
    assert coverage_facts(run) == [
        ("Samples", "4 of 2 tasks, 2 each"),
        ("Solved in k samples", "pass@1 25.0%, pass@2 50.0%"),
        ("Tasks", "50.0% never solved, 0.0% always solved"),
        ("Return of the reference", "0.25 in the mean"),
    ]
    names = {name for name, _ in coverage_rows(run)}
    assert {"share never solved", "mean return"} <= names
    assert not names & {"mean V*", "beta1", "share resting on one", "rollout filter: kept"}
    html = page(
        dataclasses.replace(run, value_report=report | {"advice": "sample more"}), curves=[]
    )
    assert "Value store" in html and "sample more" in html


def test_there_is_no_pass_at_16_of_two_samples(build_run: Callable[..., Path]) -> None:
    earlier = {
        "num_tasks": 2,
        "num_samples": 4,
        "pass_at_k": {"1": 0.25, "4": 0.5, "8": 0.5, "16": 0.5},
        "tasks_below_k": {"1": 0, "4": 1, "8": 2, "16": 2},
    }
    rows = dict(coverage_rows(run_with(build_run, earlier)))
    assert [name for name in rows if name.startswith("pass@")] == ["pass@1", "pass@4"]
    assert rows["pass@4"] == "at least 50.0%"


def test_never_solved_0_does_not_stand_beside_100_percent_never_solved(
    build_run: Callable[..., Path],
) -> None:
    report = {"share_never_solved": 1.0, "selection": {"kept": 52, "never_solved": 0}}
    run = run_with(build_run, report)
    assert coverage_rows(run) == [("share never solved", "100.0%")]
    config = {**run.config, "rollout_filter": {"strategy": "top_p"}}
    filtered = dataclasses.replace(run, config=config)
    assert ("rollout filter: never solved", "0") in coverage_rows(filtered)


def test_coverage_shows_whatever_keys_there_are(build_run: Callable[..., Path]) -> None:
    report = {
        "beta1": 0.5,
        "pass_at_k": {"16": 0.6, "4": 0.5, "1": None},
        "advice": "sample more",
        "num_tasks": 1397,
        "share_never_solved": 0.25,
        "share_unreadable": None,
        "kind": "adaptive",
        "tasks_by_num_samples": {"4": 12},
    }
    assert coverage_rows(run_with(build_run, report)) == [
        ("tasks", "1,397"),
        ("pass@1", "–"),
        ("pass@4", "50.0%"),
        ("pass@16", "60.0%"),
        ("share never solved", "25.0%"),
        ("beta1", "0.5"),
        ("kind", "adaptive"),
        ("tasks by samples: 4", "12"),
    ]


def test_a_value_report_without_numbers_has_no_facts(build_run: Callable[..., Path]) -> None:
    assert coverage_facts(run_with(build_run, {"advice": None})) == []
