"""Series as pictures."""

import pytest

from ragen_apo.report.panels import Panel
from ragen_apo.web.view.curves import HEIGHT, MAX_POINTS, WIDTH, curve

LOSS = Panel("Loss", "loss")


def test_nothing_is_drawn_of_nothing() -> None:
    assert curve(LOSS, ([], [])) is None


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [5.0, 5.0],
        [-1e-9, 1e-9],
        [1e12, -1e12],
        [0.2, 0.9],
        [3.0, 4.0, 1e-3],
        [2.0**63] * 2,
        [1e300],
        [-1e300],
        [1.7e18, 1.7e18 + 256],
    ],
)
def test_every_point_lies_in_the_picture(values: list[float]) -> None:
    drawn = curve(LOSS, (list(range(len(values))), values))
    assert drawn is not None
    for point in drawn.lines[0].points.split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    num_labels, differ_by = len({label for _, label in drawn.ticks}), max(values) - min(values)
    is_too_fine = 0 < differ_by < 1e-12 * max(values)  # for the digits of a label
    assert num_labels == len(drawn.ticks) or len(values) == 1 or is_too_fine


def test_a_long_series_is_drawn_by_its_means() -> None:
    drawn = curve(LOSS, (list(range(1, 100_001)), [1.0, 3.0] * 50_000))
    assert drawn is not None
    pairs = [pair.split(":") for pair in drawn.lines[0].values.split()]
    assert len(pairs) <= MAX_POINTS
    assert all(float(value) == pytest.approx(2.0, abs=0.01) for _, value in pairs)
    assert float(pairs[-1][0]) == 100_000


def test_last_is_the_last_value_and_no_mean() -> None:
    drawn = curve(LOSS, (list(range(1, 1001)), [0.0] * 999 + [1.0]))
    assert drawn is not None
    assert drawn.lines[0].latest == "1"


def test_two_series_share_an_axis() -> None:
    panel = Panel("Success", "success_rate", evaluation_key="eval_success_rate", share=True)
    drawn = curve(panel, ([1, 2], [0.5, 0.6]), ([2], [1.0]))
    assert drawn is not None
    assert [line.label for line in drawn.lines] == ["training", "evaluation"]
    assert drawn.lines[1].latest == "100.0%"
    assert drawn.ticks[-1][1] == "100%"
