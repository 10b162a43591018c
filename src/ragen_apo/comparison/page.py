"""A comparison as one self-contained page, which is printed as PDF too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragen_apo.report.html import data_uri, render


def comparison_page(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    pictures: Mapping[str, bytes],
    *,
    about: Sequence[str],
    runs: Sequence[Mapping[str, str]],
) -> str:
    """The page. `pictures` are PNGs by what their axis counts, `about` are sentences, `runs` has a
    row for each run with its numbers by name.
    """
    return render(
        "comparison.html",
        header=header,
        rows=rows,
        pictures=[(f"Success against {axis}", data_uri(png)) for axis, png in pictures.items()],
        about=about,
        runs=runs,
    )
