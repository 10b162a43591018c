"""The pictures: drawn from whole, partial and hostile runs."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ragen_apo.report import plots
from ragen_apo.report.drawing import DOTS_PER_INCH, png_bytes
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.panels import stage_two_panels

PHONE_PIXELS = 420
SMALLEST_TEXT_POINTS = 9.5
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def all_pictures(run: RunData) -> list[bytes]:
    figures = [row.draw(run) for row in plots.FIGURES.values()]
    return [png_bytes(figure) for figure in figures if figure is not None]


@pytest.mark.slow
def test_a_whole_run_gives_three_pictures_and_again_the_same_bytes(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    pictures = all_pictures(run)
    assert len(pictures) == 3
    for picture in pictures:
        assert picture.startswith(PNG_SIGNATURE)
    assert all_pictures(run) == pictures


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_absent_null_or_not_finite_are_left_out(
    build_run: Callable[..., Path],
) -> None:
    metrics = [
        {"step": 1, "success_rate": math.nan, "return_mean": None},
        {"step": 2, "success_rate": 0.5, "kl_per_sequence": math.inf},
        {},
    ]
    results = {
        "by_category": {"books": {"success_rate": math.nan, "success_ci95": [0, None]}},
        "failures": {"timeout": {"count": None}},
    }
    run = dataclasses.replace(
        load_run(build_run()), metrics=metrics, results=results, warm_start=[{"phase": "copy"}]
    )
    for picture in all_pictures(run):
        assert picture.startswith(PNG_SIGNATURE)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_names_with_markup_and_control_characters_are_drawn_as_they_are(
    build_run: Callable[..., Path],
) -> None:
    summary = {"episodes": 3, "success_rate": 1.0, "success_ci95": [0.4, 1.0]}
    results = {"by_category": {"$\\frac{$ \x07 \n <b>": summary}, "failures": {"$_$": {"count": 2}}}
    run = dataclasses.replace(load_run(build_run()), results=results)
    for picture in all_pictures(run):
        assert picture.startswith(PNG_SIGNATURE)


def test_a_name_with_an_emoji_is_drawn_without_a_warning(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    category = run.results["by_category"]["home"]
    results = {**run.results, "by_category": {"party \U0001f389": category}}
    with warnings.catch_warnings(record=True) as caught:
        png_bytes(plots.by_category(dataclasses.replace(run, results=results)))
    assert not caught


def test_a_run_without_results_gives_pictures_that_say_so(build_run: Callable[..., Path]) -> None:
    run = dataclasses.replace(load_run(build_run()), results={}, metrics=[], warm_start=[])
    pictures = all_pictures(run)
    assert len(pictures) == 2  # there is nothing to say of curves: the page says why
    for picture in pictures:
        assert picture.startswith(PNG_SIGNATURE)


def test_the_running_mean_looks_to_both_sides_and_keeps_the_length() -> None:
    # the means of 0, 3; of 0, 3, 6; of 3, 6, 9; of 6, 9
    assert plots.running_mean([0, 3, 6, 9], window=1) == [1.5, 3.0, 6.0, 7.5]


def test_a_curve_of_two_points_is_not_smoothed_flat() -> None:
    assert plots.smoothed([6.8, 5.9]) is None
    assert plots.smoothed([1.0] * 9) is None
    assert plots.smoothed([1.0] * 10) == [1.0] * 10


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_text_in_the_pictures_is_ten_pixels_high_on_a_phone(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    curves = [picture for _, picture in plots.curve_pictures(run)]
    assert len(curves) == 6
    for picture in all_pictures(run) + curves:
        pixels = int.from_bytes(picture[16:20], "big")  # the width in the header of a PNG
        inches = pixels / DOTS_PER_INCH
        assert SMALLEST_TEXT_POINTS / 72 * PHONE_PIXELS / inches >= 10


def test_what_was_distilled_is_the_evaluation_before_the_first_step(
    build_run: Callable[..., Path],
) -> None:
    metrics = [
        {"step": 1, "success_rate": 0.4, "return_mean": 0.3},
        {"step": 2, "success_rate": 0.5, "return_mean": 0.4, "eval_success_rate": 0.9},
    ]
    distillation = [
        {"step": 32, "reference_version": 0, "loss": 0.1},
        {"step": 32, "reference_version": 0, "eval_success_rate": 0.75},
        {"step": 40, "reference_version": 1, "eval_success_rate": 0.95},
    ]
    run = dataclasses.replace(load_run(build_run()), metrics=metrics, distillation=distillation)
    figure = plots.learning_curves(run)
    assert figure is not None
    (points,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "evaluation"]
    assert np.array_equal(points.get_xydata(), [[0, 0.75], [2, 0.9]])


def test_what_the_environment_measures_has_a_curve_each_and_at_most_twenty(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    names = [f"environment/count_{number}" for number in range(30)]
    rows = [{**row, **dict.fromkeys(names, 2.0)} for row in run.metrics]
    drawn = stage_two_panels(dataclasses.replace(run, metrics=rows))
    assert [panel.title for panel in drawn[3:23]] == [f"Count {number}" for number in range(20)]
    assert len(drawn) == len(stage_two_panels(run)) + 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["$\\frac{$", "\x1b[31m", "x" * 5000])
@pytest.mark.parametrize("values", [(1.7e308, -1.7e308), (math.nan, 10**400)])
def test_what_was_measured_is_drawn_whatever_its_name_and_its_values(
    name: str, values: tuple[float, float], build_run: Callable[..., Path]
) -> None:
    run = load_run(build_run())
    rows = [
        {**row, f"environment/{name}": values[number % 2]} for number, row in enumerate(run.metrics)
    ]
    assert plots.curve_pictures(dataclasses.replace(run, metrics=rows))


@pytest.mark.parametrize(
    ("played", "is_drawn"),
    [
        ({}, True),
        ({"num_episodes": 7}, True),
        ({"split": "train"}, False),
        ({"temperature": 1}, False),
    ],
)
def test_the_reference_is_drawn_beside_evaluations_of_the_same_kind_only(
    played: dict[str, object], is_drawn: bool, build_run: Callable[..., Path]
) -> None:
    run = load_run(build_run())
    config = {**run.config, "evaluation": {"split": "test", "temperature": 0.0}}
    results = {**run.results, "evaluation": {"split": "test", "temperature": 0.0, **played}}
    figure = plots.learning_curves(dataclasses.replace(run, config=config, results=results))
    assert figure is not None
    labels = {line.get_label() for axes in figure.axes for line in axes.lines}
    assert ("reference" in labels) is is_drawn
