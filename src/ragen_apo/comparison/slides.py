"""Two slides of a comparison: the curves, and the table with what its numbers mean."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ragen_apo.report.shapes import (
    HEIGHT,
    MARGIN,
    WIDTH,
    Box,
    Line,
    add_picture,
    add_table,
    add_text,
    fitting,
    presentation,
    set_title,
)
from ragen_apo.report.style import MUTED

MAX_ROWS = 10
"""Algorithms on the slide; the files have all of them."""
SHOWN = ("time to", "success")
"""Beginnings of the columns that a slide has room for."""
LETTER = 0.09
"""Width of one in a cell, in inches."""
_HEADING = Box(MARGIN, 0.42, WIDTH - 2 * MARGIN, 0.55)
_CURVES = (8.0, 5.0)
"""Proportions of the pictures."""


def comparison_slides(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    pictures: Mapping[str, bytes],
    *,
    about: Sequence[str],
    lines: str,
) -> bytes:
    """The `.pptx` file. `pictures` are PNGs by what their axis counts, `about` are sentences.

    `lines` says what is drawn in them.
    """
    return presentation(
        "ragen-apo: comparison",
        [
            partial(_curves, pictures=pictures, lines=lines),
            partial(_table, header=header, rows=rows, about=about),
        ],
    )


def _curves(slide: Any, pictures: Mapping[str, bytes], lines: str) -> None:
    set_title(slide, _HEADING, Line("Success against cost", size=26, bold=True))
    gap = 0.4
    width = (WIDTH - 2 * MARGIN - gap * (len(pictures) - 1)) / len(pictures)
    for number, (axis, picture) in enumerate(pictures.items()):
        box = Box(MARGIN + number * (width + gap), 1.7, width, width * _CURVES[1] / _CURVES[0])
        add_picture(slide, io.BytesIO(picture), box, description=f"Success against {axis}")
    below = Box(MARGIN, HEIGHT - 1.0, WIDTH - 2 * MARGIN, 0.4)
    add_text(slide, below, [Line(lines, size=12, color=MUTED)])


def _table(
    slide: Any, header: Sequence[str], rows: Sequence[Sequence[str]], about: Sequence[str]
) -> None:
    set_title(slide, _HEADING, Line("Each algorithm", size=26, bold=True))
    columns = [index for index, name in enumerate(header) if index == 0 or name.startswith(SHOWN)]
    shown = [[cells[index] for index in columns] for cells in (header, *rows[:MAX_ROWS])]
    width = WIDTH - 2 * MARGIN
    longest = [max(map(len, column)) + 2 for column in zip(*shown, strict=True)]
    widths = [width * letters / sum(longest) for letters in longest]
    lines_of_cell = math.ceil(sum(longest) * LETTER / width)
    box = Box(MARGIN, 1.2, width, (0.16 + 0.22 * lines_of_cell) * len(shown))
    add_table(slide, box, shown, widths=widths, strong_row=len(shown))
    notes = [*about, "comparison.csv has every number."]
    lines = [Line(text, size=12, color=MUTED, space_after=4) for text in notes]
    below = Box(MARGIN, box.bottom + 0.3, width, HEIGHT - box.bottom - 0.6)
    add_text(slide, below, fitting(lines, below))
