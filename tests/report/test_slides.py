"""The two slides, read back with python-pptx."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pptx import Presentation

from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.shapes import Box, Line, fitting
from ragen_apo.report.slides import pipeline, slides

pytestmark = pytest.mark.usefixtures("undrawn")


def read_slides(run: RunData) -> list[Any]:
    return list(Presentation(io.BytesIO(slides(run))).slides)


def texts(slide: Any) -> str:
    found = [shape.text_frame.text for shape in slide.shapes if shape.has_text_frame]
    for shape in slide.shapes:
        if shape.has_table:
            found += [cell.text for row in shape.table.rows for cell in row.cells]
    return "\n".join(found)


def pictures(slide: Any) -> list[str]:
    return [
        shape._element.nvPicPr.cNvPr.get("descr")
        for shape in slide.shapes
        if shape.shape_type == 13
    ]


@pytest.mark.slow
def test_there_are_two_slides_an_overview_and_the_results(build_run: Callable[..., Path]) -> None:
    overview, results = read_slides(load_run(build_run()))
    for station in ("Task", "Rollout", "Trajectory", "V*", "Advantage", "Loss", "Checkpoint",
                    "Evaluation"):  # fmt: skip
        assert station in texts(overview)
    for number in ("β₁ = 0.5", "β₂ = 0.05", "4 reference episodes", "64 tasks", "3,840", "91.0%"):
        assert number in texts(overview)
    assert results.shapes.title.text_frame.text == (
        "A*-PO solves 91.0% of 100 held-out tasks (95% interval 83.8–95.2%)"
    )
    for text in (
        "A*-PO (trained)",
        "reference (warm start)",
        "heuristic",
        "random",
        "+52.2 points",
    ):
        assert text in texts(results)
    assert pictures(results) == ["Success rate over the training steps", "Success rate by category"]


def test_stations_say_who_sampled_and_what_was_chosen(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    parts = {"values": {"store": "other/values.sqlite"}, "training": {"best_of": 2}}
    config = {**run.config, **{name: {**run.config[name], **part} for name, part in parts.items()}}
    stations = dict(pipeline(dataclasses.replace(run, config=config)))
    assert stations["Rollout"].endswith("tasks a step, once each, the best of 2 episodes")
    assert "reference episodes of another run" in stations["V*  (Stage 1)"]


def test_every_shape_lies_on_its_slide(build_run: Callable[..., Path]) -> None:
    presentation: Any = Presentation(io.BytesIO(slides(load_run(build_run()))))
    for slide in presentation.slides:
        for shape in slide.shapes:
            assert shape.left >= 0
            assert shape.top >= 0
            assert shape.left + shape.width <= presentation.slide_width
            assert shape.top + shape.height <= presentation.slide_height


@pytest.mark.slow
def test_an_untrained_run_has_no_curve_and_says_so(build_run: Callable[..., Path]) -> None:
    overview, results = read_slides(load_run(build_run(trained=False)))
    assert "Not trained in this run" in texts(overview)
    assert "This run has no Stage 2 metrics" in texts(results)
    assert pictures(results) == ["Failed episodes by pattern", "Success rate by category"]


def test_the_slides_of_a_copy_do_not_say_where_the_run_was(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    results = {**run.results, "policy": "/old/place/policy"}
    shown = [texts(each) for each in read_slides(dataclasses.replace(run, results=results))]
    assert not [text for text in shown if "/old" in text]


def test_control_characters_and_missing_numbers_do_no_harm(build_run: Callable[..., Path]) -> None:
    run = dataclasses.replace(
        load_run(build_run()),
        config={"values": {"beta1": None}},
        record={},
        value_report={},
        results={"baselines": {"a\x07b": {}}, "policy": "p\x0b" * 50, "by_category": {"\x01": {}}},
    )
    assert "a b" in texts(read_slides(run)[1])


@pytest.mark.parametrize("num_sentences", [1, 3, 14, 60])
def test_sentences_are_as_large_as_there_is_room_for(num_sentences: int) -> None:
    box = Box(0, 0, 6.0, 3.0)
    text = 12 * "seven letters a word "
    lines = fitting([Line(text, size=13, space_after=7)] * num_sentences, box)
    # A letter of Calibri is half as wide as the font is high.
    height = sum(1.2 * each.size * -(-len(each.text) * each.size // (2 * 72 * 6)) for each in lines)
    assert height + 7 * len(lines) <= 72 * box.height
    sizes = {line.size for line in lines}
    assert sizes == ({13} if num_sentences == 1 else {9} if num_sentences > 3 else sizes)
    assert (lines[-1].text == "The page has more.") is (num_sentences > 3)
    assert len(lines) == num_sentences or lines[-1].text != text
