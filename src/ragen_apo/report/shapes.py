"""A presentation, and the few shapes on its slides: boxes, arrows, text and tables, in inches."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pptx import Presentation
from pptx.dml.color import RGBColor
from pptx.enum.shapes import MSO_CONNECTOR, MSO_SHAPE
from pptx.enum.text import MSO_ANCHOR, PP_ALIGN
from pptx.oxml import parse_xml
from pptx.oxml.ns import nsdecls, qn
from pptx.util import Inches, Pt

from ragen_apo.report.style import ACCENT_SOFT, FAINT, INK, LINE, PAPER, one_line

WIDTH, HEIGHT = 13.333, 7.5
MARGIN = 0.6
FONT = "Calibri"
_TITLE_ONLY = 5
"""The layout with a title and nothing else."""


def presentation(title: str, slides: Sequence[Callable[[Any], None]]) -> bytes:
    """A `.pptx` file; each function draws on a slide of its own."""
    made = Presentation()
    made.slide_width, made.slide_height = Inches(WIDTH), Inches(HEIGHT)
    made.core_properties.title = one_line(title, 255)
    made.core_properties.author = "ragen-apo"
    for draw in slides:
        draw(made.slides.add_slide(made.slide_layouts[_TITLE_ONLY]))
    stream = io.BytesIO()
    made.save(stream)
    return stream.getvalue()


@dataclass(frozen=True)
class Box:
    """A rectangle on the slide, in inches."""

    left: float
    top: float
    width: float
    height: float

    @property
    def lengths(self) -> list[Inches]:
        """Left, top, width and height in the units of python-pptx."""
        return [Inches(self.left), Inches(self.top), Inches(self.width), Inches(self.height)]

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class Line:
    """One paragraph: its text and how it looks."""

    text: str
    size: float = 12
    color: str = INK
    bold: bool = False
    space_after: float = 0


def rgb(color: str) -> RGBColor:
    """A `#rrggbb` colour as python-pptx has it."""
    return RGBColor.from_string(color.lstrip("#").upper())


def write_lines(frame: Any, lines: Sequence[Line], *, align: Any = PP_ALIGN.LEFT) -> None:
    """Fills a text frame with paragraphs; control characters are dropped, nothing is autofitted."""
    frame.word_wrap = True
    for number, line in enumerate(lines):
        paragraph = frame.paragraphs[0] if number == 0 else frame.add_paragraph()
        paragraph.alignment = align
        paragraph.space_after = Pt(line.space_after)
        run = paragraph.add_run()
        run.text = one_line(line.text)
        run.font.name, run.font.size, run.font.bold = FONT, Pt(line.size), line.bold
        run.font.color.rgb = rgb(line.color)


def fitting(lines: Sequence[Line], box: Box, *, smallest: float = 9) -> list[Line]:
    """The lines, smaller where they would leave the box; what does not fit even then is left out.

    By estimate: a letter is half as wide as the font is high, and a line 1.2 times as high.
    """
    size = max((line.size for line in lines), default=smallest)
    while size > smallest and _height(lines, size, box.width) > box.height:
        size -= 1
    fitted = [replace(line, size=min(line.size, size)) for line in lines]
    while len(fitted) > 1 and _height(fitted, size, box.width) > box.height:
        fitted[-2:] = [replace(fitted[-1], text="The page has more.")]
    return fitted


def _height(lines: Sequence[Line], size: float, width: float) -> float:
    """Of lines of this size in a box of this width, in inches."""
    points = 0.0
    for line in lines:
        points += 1.2 * size * math.ceil(len(line.text) * size / 2 / (72 * width))
        points += line.space_after
    return points / 72


def add_text(slide: Any, box: Box, lines: Sequence[Line]) -> None:
    """Paragraphs without a frame around them."""
    frame = slide.shapes.add_textbox(*box.lengths).text_frame
    frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
    write_lines(frame, lines)


def set_title(slide: Any, box: Box, line: Line) -> None:
    """Writes the slide's title placeholder, so that outlines and screen readers find it."""
    title = slide.shapes.title
    title.left, title.top, title.width, title.height = box.lengths
    frame = title.text_frame
    frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
    frame.vertical_anchor = MSO_ANCHOR.TOP
    write_lines(frame, [line])


def add_box(
    slide: Any, box: Box, lines: Sequence[Line], *, fill: str = PAPER, border: str = LINE
) -> None:
    """Paragraphs at the top of a rounded rectangle."""
    shape = slide.shapes.add_shape(MSO_SHAPE.ROUNDED_RECTANGLE, *box.lengths)
    shape.adjustments[0] = 0.08
    shape.fill.solid()
    shape.fill.fore_color.rgb = rgb(fill)
    shape.line.color.rgb, shape.line.width = rgb(border), Pt(1.25)
    _drop_theme(shape)
    frame = shape.text_frame
    frame.margin_left = frame.margin_right = frame.margin_top = Inches(0.14)
    frame.margin_bottom = Inches(0.06)
    frame.vertical_anchor = MSO_ANCHOR.TOP
    write_lines(frame, lines)


def add_arrow(
    slide: Any, points: Sequence[tuple[float, float]], *, color: str = FAINT, width: float = 1.75
) -> None:
    """A path of straight lines through the points, with an arrow head at its end."""
    for number, (start, end) in enumerate(itertools.pairwise(points), 1):
        line = slide.shapes.add_connector(MSO_CONNECTOR.STRAIGHT, *map(Inches, (*start, *end)))
        line.line.color.rgb, line.line.width = rgb(color), Pt(width)
        _drop_theme(line)
        if number == len(points) - 1:
            head = f'<a:tailEnd {nsdecls("a")} type="triangle" w="med" len="med"/>'
            line.line._get_or_add_ln().append(parse_xml(head))


def _drop_theme(shape: Any) -> None:
    """Removes the reference to the theme's style, which adds a shadow."""
    for reference in shape._element.findall(qn("p:style")):
        shape._element.remove(reference)


def add_picture(slide: Any, image: Any, box: Box, *, description: str) -> None:
    """A picture that fills the box, with its description for those who cannot see it."""
    picture = slide.shapes.add_picture(image, *box.lengths)
    picture._element.nvPicPr.cNvPr.set("descr", description)


def add_table(
    slide: Any, box: Box, rows: Sequence[Sequence[str]], *, widths: Sequence[float], strong_row: int
) -> None:
    """A table with a header row; numbers to the right, one row emphasised, hairlines only."""
    shape = slide.shapes.add_table(len(rows), len(widths), *box.lengths)
    table = shape.table
    properties = shape._element.graphic.graphicData.tbl.tblPr
    for flag in ("firstRow", "bandRow"):
        properties.set(flag, "0")
    for column, width in zip(table.columns, widths, strict=True):
        column.width = Inches(width)
    for number, (cells, row) in enumerate(zip(rows, table.rows, strict=True)):
        row.height = Inches(box.height / len(rows))
        for column, (text, cell) in enumerate(zip(cells, row.cells, strict=True)):
            align = PP_ALIGN.RIGHT if column > 0 else PP_ALIGN.LEFT
            _write_cell(cell, text, header=number == 0, strong=number == strong_row, align=align)


def _write_cell(cell: Any, text: str, *, header: bool, strong: bool, align: Any) -> None:
    cell.margin_left = cell.margin_right = Inches(0.08)
    cell.margin_top = cell.margin_bottom = Inches(0.03)
    cell.vertical_anchor = MSO_ANCHOR.MIDDLE
    cell.fill.solid()
    cell.fill.fore_color.rgb = rgb(ACCENT_SOFT if strong else PAPER)
    line = Line(text, size=11 if header else 13, bold=strong or header)
    write_lines(cell.text_frame, [line], align=align)
    _underline_cell(cell, FAINT if header else LINE)


def _underline_cell(cell: Any, color: str) -> None:
    """A hairline below the cell and none elsewhere; python-pptx has no call for cell borders."""
    properties = cell._tc.get_or_add_tcPr()
    borders = [
        f'<a:{tag} {nsdecls("a")} w="0"><a:noFill/></a:{tag}>' for tag in ("lnL", "lnR", "lnT")
    ]
    borders.append(
        f'<a:lnB {nsdecls("a")} w="9525"><a:solidFill><a:srgbClr val="{color.lstrip("#")}"/>'
        "</a:solidFill></a:lnB>"
    )
    fill = properties.find(qn("a:solidFill"))
    for border in borders:
        fill.addprevious(parse_xml(border))
