"""Pages from the templates: `page("view/runs.html", {...})`.

Everything that a template shows is escaped: markup by Jinja, characters that steer or hide by
`printable`. A name that a template uses and nobody gave is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ragen_apo.errors import RagenApoError
from ragen_apo.printable import printable

FOLDER = Path(__file__).parent


@cache
def templates() -> Environment:
    """The templates of all rooms, each in a folder of its own under `templates/`."""
    return Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def _shown(value: Any) -> Any:
    """A value as it goes into a page; numbers and our own markup stay."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def page(template: str, context: Mapping[str, Any], *, status: int = 200) -> HTMLResponse:
    """The answer with a page."""
    return HTMLResponse(templates().get_template(template).render(context), status)


def error_page(_: Request, error: Exception) -> Response:
    """What was wrong with a request, in the words of its error."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, RagenApoError):
        status, message = 404, str(error)
    else:
        status, message = 500, "this page could not be made; the terminal shows why"
    return page("error.html", {"status": status, "message": message}, status=status)
