"""Common to all pictures: the frame of a plot, and its PNG bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ragen_apo.report.style import FAINT, INK, LINE, MUTED

DOTS_PER_INCH = 180


def style_axes(axes: Axes, title: str) -> None:
    """Title on the left, a light grid, no frame but the bottom."""
    axes.set_title(
        title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=9, parse_math=False
    )
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=LINE, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)


def legend_below(
    figure: Figure, axes: Axes, *, num_columns: int, named: Mapping[str, Artist] | None = None
) -> None:
    """One legend below all panels of a figure, from a panel that has all its lines.

    Or of lines by names of any kind: matplotlib leaves labels that begin with `_` out.
    """
    handles, labels = axes.get_legend_handles_labels()
    if named is not None:
        handles, labels = list(named.values()), list(named)
    if not labels:
        return
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=num_columns, frameon=False,
        labelcolor=MUTED, fontsize=9.5,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.set_dpi(DOTS_PER_INCH)
    with warnings.catch_warnings():
        # A name of the environment's may have emoji: the font has a box for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": "ragen-apo"})
    return buffer.getvalue()
