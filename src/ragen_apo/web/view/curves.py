"""Series as SVG: coordinates for a template, which draws them without any style of its own.

Consumes steps and values; produces points in a box of `WIDTH` by `HEIGHT`. A long series is drawn
by the means of equal stretches, so a page stays small however long a run is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ragen_apo.report.panels import Panel
from ragen_apo.report.style import compact, percent

WIDTH, HEIGHT = 360, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
BOX = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT}
"""What a template needs to know of the picture."""
MAX_POINTS = 160
NUM_TICKS = 4


@dataclass(frozen=True)
class Line:
    """One series in its picture."""

    label: str
    points: str
    """Of a polyline."""
    dots: tuple[tuple[float, float], ...]
    """Where the points are so few that each is seen."""
    values: str
    """`step:value` of each point, for who asks for one by pointer or arrow keys."""
    latest: str


@dataclass(frozen=True)
class Curve:
    """A picture."""

    panel: Panel
    lines: tuple[Line, ...]
    ticks: tuple[tuple[float, str], ...]
    """Height and label of the horizontal lines."""
    first_step: str
    last_step: str


Series = tuple[Sequence[float], Sequence[float]]


def curve(panel: Panel, first: Series, second: Series = ((), ())) -> Curve | None:
    """The picture of one or two series; None where there is nothing to draw."""
    drawn = [_shortened(*each) for each in (first, second)]
    steps = [step for each, _ in drawn for step in each]
    values = [value for _, each in drawn for value in each]
    if not values:
        return None
    low, high = (0.0, _share_bound(values)) if panel.share else _bounds(values)
    left, right = min(steps), max(steps)

    def point(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (
            (step - left) / (right - left) if right > left else 0.5
        )
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)
        return round(x, 1), round(y, 1)

    write = percent if panel.share else compact
    lines: list[Line] = []
    labels = ("training", "evaluation")
    for label, whole, (own_steps, own_values) in zip(labels, (first, second), drawn, strict=True):
        if not own_steps:
            continue
        dots = [point(*each) for each in zip(own_steps, own_values, strict=True)]
        shown = [f"{s:g}:{v:.4g}" for s, v in zip(own_steps, own_values, strict=True)]
        lines.append(
            Line(
                label=label,
                points=" ".join(f"{x},{y}" for x, y in dots),
                dots=tuple(dots) if len(dots) <= 40 else (),
                values=" ".join(shown),
                latest=write(whole[1][-1]),
            )
        )
    ticks = [low + (high - low) * part / NUM_TICKS for part in range(NUM_TICKS + 1)]
    return Curve(
        panel=panel,
        lines=tuple(lines),
        ticks=tuple(
            (point(left, tick)[1], percent(tick, 0) if panel.share else compact(tick))
            for tick in ticks
        ),
        first_step=compact(left),
        last_step=compact(right),
    )


def _shortened(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` points: the last step and the mean of each stretch."""
    size = math.ceil(len(steps) / MAX_POINTS) or 1
    starts = range(0, len(steps), size)
    return (
        [steps[min(start + size, len(steps)) - 1] for start in starts],
        [fmean(values[start : start + size]) for start in starts],
    )


def _share_bound(values: Sequence[float]) -> float:
    """100%, or less where all shares are small."""
    return next((bound for bound in (0.04, 0.2, 0.4) if max(values) <= bound), 1.0)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around all values; 0 is one of them where it is near."""
    low, high = min(values), max(values)
    if low > 0 and low < 0.5 * high:
        low = 0.0
    if high < 0 and high > 0.5 * low:
        high = 0.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        room = max(0.5, 1e-3 * abs(high))
        low, high = low - room, high + room
    unit = 10.0 ** math.floor(math.log10((high - low) / NUM_TICKS))
    step = next(unit * each for each in (1, 2, 2.5, 5, 10, 20) if _fits(low, high, unit * each))
    bottom = math.floor(low / step) * step
    return bottom, bottom + NUM_TICKS * step


def _fits(low: float, high: float, step: float) -> bool:
    return math.floor(low / step) * step + NUM_TICKS * step >= high - 1e-9 * abs(high)
