"""A report names the algorithm of its run, and shows what that algorithm has."""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pptx import Presentation

from ragen_apo.config.algorithms import ALGORITHMS, algorithm_class
from ragen_apo.report import plots
from ragen_apo.report.algorithm import algorithm_of
from ragen_apo.report.failure_analysis import failure_analysis
from ragen_apo.report.findings import headline, key_sentences
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.page import page
from ragen_apo.report.slides import pipeline, slides
from ragen_apo.report.tables import monitor_rows, summary_csv
from tests.sweeps import quick_first

pytestmark = pytest.mark.usefixtures("undrawn")

TRAITS = {name: algorithm_class(name).traits for name in ALGORITHMS}
NAMES = {name: traits.label for name, traits in TRAITS.items()}
MONITORS = {name: algorithm_class(name).monitors for name in ALGORITHMS}
VALUE_ALGORITHMS = ("apo", "apo_turn")


class Text(HTMLParser):
    """What a reader of a page sees: text outside scripts and styles, and what pictures are of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self._hidden = "", False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("script", "style")
        self.text += f" {dict(attrs).get('alt') or ''} "

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


def text_of_page(run: RunData) -> str:
    pictures = [(title, b"png") for title in titles(run)]
    return Text(page(run, curves=pictures)).text.partition("Configuration")[0]


def text_of_slides(run: RunData) -> str:
    presentation: Any = Presentation(io.BytesIO(slides(run)))
    shapes = [shape for slide in presentation.slides for shape in slide.shapes]
    texts = [shape.text_frame.text for shape in shapes if shape.has_text_frame]
    tables = [shape.table for shape in shapes if shape.has_table]
    cells = [cell.text for table in tables for row in table.rows for cell in row.cells]
    return "\n".join(texts + cells)


def titles(run: RunData) -> list[str]:
    return [panel.title for panel, _ in plots.panels(run)]


DOCUMENTS: dict[str, Callable[[RunData], str]] = {
    "page": text_of_page,
    "slides": text_of_slides,
    "table": summary_csv,
    "failure analysis": failure_analysis,
}


def test_an_option_of_a_later_version_leaves_the_algorithm_its_name(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    config = {**run.config, "algorithm": {"name": "grpo", "made_later": 3}}
    assert algorithm_of(dataclasses.replace(run, config=config)).label == "GRPO"


def test_every_algorithm_has_its_traits_and_a_sentence_that_begins_with_its_name() -> None:
    assert len(set(NAMES.values())) == len(NAMES)
    for traits in TRAITS.values():
        assert traits.sentence.startswith(f"{traits.label} ")


@pytest.mark.parametrize("algorithm", quick_first(ALGORITHMS))
def test_the_report_names_the_algorithm_of_the_run_and_has_its_panels_and_never_another(
    algorithm: str, build_run: Callable[..., Path]
) -> None:
    run = load_run(build_run(algorithm=algorithm))
    texts = {name: document(run) for name, document in DOCUMENTS.items()}
    for name, text in texts.items():
        assert NAMES[algorithm] in text, name
        rest = text.replace(NAMES[algorithm], "")
        assert not [other for other in NAMES.values() if other in rest], name
    shown = texts["page"] + texts["slides"]
    has_values, has_critic = algorithm in VALUE_ALGORITHMS, algorithm == "ppo"
    for words in ("V*", "Value store", "Stage 1"):
        assert (words in shown) == has_values, words
    for words in ("Critic", "critic, loss", "critic, explained variance"):
        assert (words in shown) == has_critic, words
    assert "β₁" in shown or not has_values


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_report_shows_the_monitors_that_the_algorithm_declares_and_no_others(
    algorithm: str, build_run: Callable[..., Path]
) -> None:
    """The run has the metrics of all algorithms."""
    run = load_run(build_run(algorithm=algorithm))
    own = MONITORS[algorithm].values()
    every = {monitor for declared in MONITORS.values() for monitor in declared.values()}
    labels = [label for label, *_ in monitor_rows(run)]
    assert len(labels) == len(set(labels))
    assert [label for label in labels if label in {each.label for each in every}] == [
        monitor.label for monitor in own
    ]
    common, warm_start = 3, 2
    assert titles(run)[common:-warm_start] == [each.title for each in own if each.title]


def test_the_rows_and_curves_of_oapl_and_of_apo_by_turn(build_run: Callable[..., Path]) -> None:
    plain = load_run(build_run())
    metrics = [
        {"step": step, "sampler_lag": step - 1, "known_turn_share": 0.75} for step in range(1, 6)
    ]
    shown = {}
    for algorithm in ("oapl", "apo_turn"):
        config = {**plain.config, "algorithm": {"name": algorithm}}
        run = dataclasses.replace(plain, config=config, metrics=metrics)
        shown[algorithm] = (monitor_rows(run), titles(run)[3:-2])
    assert shown == {
        "oapl": (
            [("updates since the policy that sampled", "0", "4")],
            ["Residual variance", "Spread of advantages"],
        ),
        "apo_turn": (
            [("share of turns in states of known value", "75.0%", "75.0%")],
            ["Residual variance", "Turns in known states"],
        ),
    }


@pytest.mark.parametrize(
    ("algorithm", "played"), [("apo", "once each"), ("ppo", "once each"), ("rloo", "8 times each")]
)
def test_the_slides_say_how_often_a_step_plays_a_task(
    algorithm: str, played: str, build_run: Callable[..., Path]
) -> None:
    run = load_run(build_run(algorithm=algorithm))
    assert f"64 tasks a step, {played}" in text_of_slides(run)


@pytest.mark.parametrize(
    ("baseline", "station", "subtracted", "advantage"),
    [
        (
            "mean",
            "Mean  (Stage 1)",
            "The reference’s mean return\n4 reference episodes a task",
            "R − the reference’s mean return (an ablation: no V*)",
        ),
        ("zero", "No baseline", "Nothing is subtracted from R", "R alone (an ablation: no V*)"),
    ],
)
def test_no_station_of_an_ablation_says_that_there_is_a_v_star(
    baseline: str, station: str, subtracted: str, advantage: str, build_run: Callable[..., Path]
) -> None:
    plain = load_run(build_run())
    assert ("Task", "A goal in shop, in words; 397 with known V*") in pipeline(plain)
    config = {**plain.config, "values": {**plain.config["values"], "baseline": baseline}}
    stations = pipeline(dataclasses.replace(plain, config=config))
    assert stations[3:5] == [(station, subtracted), ("Advantage", advantage)]
    others = [*stations[:4], *stations[5:]]
    assert not any("V*" in part for pair in others for part in pair)


def test_the_station_of_v_star_says_that_a_regression_made_it(
    build_run: Callable[..., Path],
) -> None:
    plain = load_run(build_run())
    values = {**plain.config["values"], "estimator": "regression"}
    run = dataclasses.replace(plain, config={**plain.config, "values": values})
    assert pipeline(plain)[3][1].startswith("β₁ log mean exp(R/β₁)\n")
    name, text = pipeline(run)[3]
    assert name == "V*  (Stage 1)"
    assert text == "β₁ log f, fitted to exp(R/β₁)\n4 reference episodes a task\nβ₁ = 0.5"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_station_of_the_slide_has_room_for_its_text(
    algorithm: str, build_run: Callable[..., Path]
) -> None:
    stations = pipeline(load_run(build_run(algorithm=algorithm)))
    assert len(stations) == 8
    for name, text in stations:
        # 14 points in 2.4 inches are 32 characters; below the title a box has room for four lines
        lines = [line for part in text.split("\n") for line in textwrap.wrap(part, 32)]
        assert 1 <= len(lines) <= 4, name


def test_an_algorithm_of_another_version_goes_by_the_name_in_the_configuration(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run(algorithm="star_search"))
    assert headline(run).startswith("star_search solves")
    assert "A*-PO" not in text_of_page(run)


def test_the_report_says_that_the_run_stopped_early_and_why(build_run: Callable[..., Path]) -> None:
    stopped = {"rule": "max_kl", "step": 12, "reason": "kl_per_sequence was above 3 in 3 rows"}
    run = dataclasses.replace(load_run(build_run()), record={"early_stop": stopped})
    sentence = "Training stopped early, after step 12 of 60: kl_per_sequence was above 3 in 3 rows."
    assert sentence in key_sentences(run)
    for document in (text_of_page, text_of_slides):
        assert sentence in document(run)


def test_the_report_says_that_a_run_is_a_control(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    assert not any("control" in each for each in key_sentences(run))
    training = {**run.config["training"], "shuffle_returns": True}
    control = dataclasses.replace(run, config={**run.config, "training": training})
    assert any(each.endswith("this run is a control.") for each in key_sentences(control))


def test_the_report_says_that_adapters_were_trained(build_run: Callable[..., Path]) -> None:
    sentence = (
        "Adapters of rank 16 (LoRA) were trained; the model’s own weights stayed as they were."
    )
    run = load_run(build_run(lora="{rank: 16, alpha: 32}"))
    assert sentence in key_sentences(run)
    assert sentence in text_of_page(run)
    plain = dataclasses.replace(run, config={**run.config, "policy": {"lora": None}})
    assert not any("LoRA" in each for each in key_sentences(plain))
