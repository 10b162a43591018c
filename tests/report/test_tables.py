"""The tables: exact CSV, the order of methods, monitors and coverage."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pptx import Presentation

from ragen_apo.files import write_json_lines_atomically
from ragen_apo.report.failure_analysis import failure_analysis
from ragen_apo.report.findings import headline, key_sentences
from ragen_apo.report.latex import latex_table
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.model_card import model_card
from ragen_apo.report.style import duration, interval, one_line, percent
from ragen_apo.report.tables import (
    category_rows,
    method_rows,
    monitor_rows,
    summary_csv,
    summary_latex,
)
from ragen_apo.report.write import write_report


def change_results(directory: Path, **changes: object) -> RunData:
    path = directory / "evaluation" / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return load_run(directory)


def test_the_csv_has_the_methods_in_order_with_four_decimals(
    build_run: Callable[..., Path],
) -> None:
    summary = {"success_rate": 0.5, "avg_reward": 1 / 3, "avg_steps": 4, "episodes": 2}
    run = change_results(
        build_run(),
        success_rate=0.98,
        avg_reward=0.987654,
        avg_steps=2.05,
        baselines={
            "random": {**summary, "success_rate": 0.002},
            "zero-shot": summary,
            "heuristic": {**summary, "avg_reward": -0.1},
            "reference": {**summary, "avg_steps": None},
        },
    )
    # The last three columns have a test of their own.
    rows = [line.rsplit(",", 3)[0] + "\n" for line in summary_csv(run).splitlines()]
    assert "".join(rows) == (
        "method,success_rate,avg_reward,avg_steps\n"
        "A*-PO (trained),0.9800,0.9877,2.0500\n"
        "reference (warm start),0.5000,0.3333,\n"
        "heuristic,0.5000,-0.1000,4.0000\n"
        "random,0.0020,0.3333,4.0000\n"
        "zero-shot,0.5000,0.3333,4.0000\n"
    )


def test_what_the_environment_measures_has_columns_of_its_own(
    build_run: Callable[..., Path],
) -> None:
    summary = {"success_rate": 0.5, "avg_reward": 0.5, "avg_steps": 4}
    run = change_results(
        build_run(),
        **summary,
        episodes=100,
        success_ci95=[0.40383, 0.59617],
        tasks=100,
        metrics={"tests_passed": 2.5, "tasks": 0.0000025},
        baselines={"random": {**summary, "metrics": {"coverage": 1 / 3}}},
    )
    assert summary_csv(run) == (
        "method,success_rate,avg_reward,avg_steps,tests_passed,tasks,coverage,"
        "episodes,success_ci95_low,success_ci95_high\n"
        "A*-PO (trained),0.5000,0.5000,4.0000,2.5,2.5e-06,,100,0.4038,0.5962\n"
        "random,0.5000,0.5000,4.0000,,,0.333333,,,\n"
    )


def test_the_latex_table_has_a_line_for_each_method(build_run: Callable[..., Path]) -> None:
    run = change_results(build_run(), baselines={}, episodes=100, success_rate=0.91)
    lines = summary_latex(run).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrr}"
    (row,) = [line for line in lines if line.startswith("A*-PO (trained) & 100 & 91.0\\% & ")]
    assert row.endswith(r"\\")


def test_hostile_names_stay_text_in_latex() -> None:
    text = latex_table(("run", "x"), [(r"\input{/etc/passwd} $1 & 2% _#^~<|>", "−1 ± 2\n")])
    escaped = (
        r"\textbackslash{}input\{/etc/passwd\} \$1 \& 2\% \_\#\textasciicircum{}\textasciitilde{}"
        "$<$$|$$>$"
    )
    assert text.splitlines()[4] == escaped + r" & $-$1 $\pm$ 2 \\"


def test_a_name_is_no_argument_of_the_line_before_it_in_latex() -> None:
    lines = latex_table(("run", "x"), [("[fast] B", "1"), ("*C", "2"), ("D [*]", "3")]).splitlines()
    assert lines[4:7] == [r"{}[fast] B & 1 \\", r"{}*C & 2 \\", r"D [*] & 3 \\"]


def test_baselines_that_were_not_played_have_no_row(build_run: Callable[..., Path]) -> None:
    run = change_results(build_run(), baselines={})
    assert [row.label for row in method_rows(run)] == ["A*-PO (trained)"]


def test_the_policy_of_an_untrained_run_is_not_called_trained(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run(trained=False))
    assert method_rows(run)[0].label == "policy (not trained)"
    assert headline(run).startswith("Not trained: 91.0% of 100 held-out tasks")
    assert any("not trained by A*-PO" in sentence for sentence in key_sentences(run))


@pytest.mark.slow
def test_a_run_that_lost_its_rows_was_trained_all_the_same(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    (directory / "metrics.jsonl").unlink()
    run = load_run(directory)
    assert method_rows(run)[0].label == "A*-PO (trained)"
    assert headline(run).startswith("A*-PO solves 91.0% of 100 held-out tasks")
    assert "The rows of Stage 2 are lost (metrics.jsonl), and with them the curves." in (
        key_sentences(run)
    )
    written = {path.name for path in write_report(directory)}
    assert "model_card.md" in written and "learning_curves.png" not in written
    page = (directory / "report" / "report.html").read_text("utf-8")
    assert "No learning curves: the run has lost its" in page
    assert not re.search("not trained|untrained|Train it with", page, re.IGNORECASE)
    slides = Presentation(str(directory / "report" / "slides.pptx")).slides
    texts = [s.text_frame.text for slide in slides for s in slide.shapes if s.has_text_frame]
    assert any("metrics.jsonl is lost" in text for text in texts)
    assert not any("not trained" in text.lower() for text in texts)


def test_the_findings_compare_with_the_reference_and_name_the_weak_spots(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    # 91 of 100 against 40 of 103: 91.0 - 38.8 = 52.2 points
    assert headline(run) == "A*-PO solves 91.0% of 100 held-out tasks (95% interval 83.8–95.2%)"
    assert key_sentences(run) == [
        "+52.2 points against the reference (warm start): 38.8% to 91.0%; "
        "the intervals do not overlap.",
        "The reference imitates the scripted policy ‘teacher’.",
        "2.34 turns per episode on average, 4.31 before training; average reward 1.00.",
        "Weakest category: home, 75.0% of 12 episodes.",
        "Most frequent failure: wrong purchase, 4 of 9.",
        "The whole run took 4 min 23 s; the longest phase was stage 2 with 1 min 33 s.",
    ]


def test_of_several_weakest_categories_none_is_named(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    rates = {"a": 0.5, "b": 0.0, "c": 0.0, "d": 0.2}
    categories = {name: {"success_rate": rate, "episodes": 4} for name, rate in rates.items()}
    run = dataclasses.replace(run, results={**run.results, "by_category": categories})
    assert "Weakest categories: 2 of 4 at 0.0%." in key_sentences(run)


@pytest.mark.parametrize(
    ("config", "record", "sentence"),
    [
        (
            {"warm_start": {"enabled": False}, "policy": {"path": "Qwen/Qwen3-0.6B"}},
            {},
            "The reference is the model Qwen/Qwen3-0.6B.",
        ),
        ({"warm_start": {"enabled": False}}, {}, "The reference is untrained."),
        (
            {"warm_start": {"enabled": True, "demonstrations": {"num_steps": 0}}},
            {},
            "The reference has seen no demonstrations.",
        ),
        (
            {
                "warm_start": {
                    "enabled": True,
                    "demonstrations": {"num_steps": 9, "recordings": "mine.jsonl"},
                }
            },
            {"data": "1,000 products of generated"},
            "The reference imitates the recorded episodes of mine.jsonl; tasks are made of 1,000 "
            "products of generated.",
        ),
        ({}, {"data": "8 levels"}, "Tasks are made of 8 levels."),
    ],
)
def test_the_findings_say_what_the_reference_has_learned_from(
    config: dict, record: dict, sentence: str, build_run: Callable[..., Path]
) -> None:
    run = dataclasses.replace(load_run(build_run()), config=config, record=record)
    assert sentence in key_sentences(run)
    methods = [row.label for row in method_rows(run)]
    enabled = config.get("warm_start", {}).get("enabled")
    assert ("reference (warm start)" if enabled else "reference") in methods


def test_findings_without_numbers_are_left_out(build_run: Callable[..., Path]) -> None:
    run = dataclasses.replace(
        load_run(build_run()),
        results={"success_rate": math.nan, "baselines": None},
        config={},
        record={},
    )
    assert headline(run) == "A*-PO solves – of 100 tasks"
    assert key_sentences(run) == []


def test_tasks_that_were_played_again_are_not_counted_twice(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    again = dataclasses.replace(run, results={**run.results, "episodes": 100, "tasks": 13})
    assert "of 100 episodes of 13 held-out tasks (95% interval" in headline(again)


def test_categories_are_ordered_by_success(build_run: Callable[..., Path]) -> None:
    rates = [row.success_rate or 0.0 for row in category_rows(load_run(build_run()))]
    assert rates == sorted(rates, reverse=True)


def test_monitors_compare_the_first_and_the_last_tenth_of_the_steps(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    rows = [{"step": n, "success_rate": n / 20, "loss": math.nan} for n in range(1, 21)]
    # of 20 steps the first two are 0.05 and 0.10, the last two 0.95 and 1.00
    assert monitor_rows(dataclasses.replace(run, metrics=rows)) == [
        ("success rate (training rollouts)", "7.5%", "97.5%")
    ]


def test_a_monitor_that_was_not_recorded_in_a_tenth_says_of_which_step_it_is(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    rows: list[dict[str, float]] = [{"step": n} for n in range(1, 41)]
    rows[10]["mutual_information"] = 1.25
    rows[30]["mutual_information"] = 1.5
    ((_, *shown),) = monitor_rows(dataclasses.replace(run, metrics=rows))
    assert shown == ["1.25 (step 11)", "1.5 (step 31)"]


def test_numbers_are_written_for_people() -> None:
    assert (percent(0.12345), percent(None), interval([0.1, math.nan])) == ("12.3%", "–", "–")
    assert interval([0.93, 0.9945]) == "93.0–99.5%"
    assert [duration(s) for s in (3.21, 59.4, 500, 7500)] == [
        "3.2 s", "59 s", "8 min 20 s", "2 h 05 min",
    ]  # fmt: skip
    assert one_line("a\x07b\nc", 4) == "a b…"


def test_a_run_that_only_distils_is_not_called_untrained(build_run: Callable[..., Path]) -> None:
    directory = build_run(trained=False)
    write_json_lines_atomically(directory / "distillation.jsonl", [{"step": 1, "loss": 1.0}])
    run = load_run(directory)
    assert method_rows(run)[0].label == "policy (distilled)"
    assert headline(run).startswith("The distilled policy solves 91.0% of 100 held-out tasks")
    assert any("made no step of Stage 2" in sentence for sentence in key_sentences(run))
    assert "The policy was distilled from its reference." in failure_analysis(run)
    assert "not trained" not in f"{failure_analysis(run)} {model_card(run)}".lower()
