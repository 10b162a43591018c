"""A long text of an episode, a part of it on each page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ragen_apo.web.view import query
from ragen_apo.web.view.episodes import text_of

TEXT_PART = 40_000
"""Characters of a long text on one page."""


def long_text(request: Request, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page of a text shows; raises HTTPException where the episode has no such text."""
    field, turn = query.text(request, "field"), query.number(request, "turn")
    page, whole = query.page(request, TEXT_PART), text_of(row, field, turn)
    if whole is None:
        raise HTTPException(404, f"the episode has no such text: {field!r:.40}")
    return {
        "field": field,
        "turn": turn,
        "part": page.of(whole),
        "num_characters": len(whole),
        "page": page.number,
        "pages": page.links(len(whole)),
    }
