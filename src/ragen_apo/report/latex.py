"""Tables for papers: LaTeX that needs the package booktabs and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "−": "$-$",
        "±": r"$\pm$",
        "–": "--",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{character: f"${character}$" for character in "<>|"},
    }
)


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A `tabular` with one line a row; the first column is text, the others are numbers."""
    lines = [r"\begin{tabular}{l" + "r" * (len(header) - 1) + "}", r"\toprule"]
    lines += [_line(header), r"\midrule", *map(_line, rows)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _line(cells: Sequence[str]) -> str:
    r"""A row; behind the `\\` or `\midrule` of the row before, `[` and `*` would be arguments."""
    line = " & ".join(" ".join(cell.split()).translate(_ESCAPES) for cell in cells)
    return f"{'{}' if line.startswith(('[', '*')) else ''}{line} " + r"\\"
