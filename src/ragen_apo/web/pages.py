"""Pages from the templates: `page_of("view/runs.html", find="mine")`.

Everything that a template shows is escaped: markup by Jinja, characters that steer or hide by
`printable`. A name that a template uses and nobody gave is an error.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ragen_apo.errors import RagenApoError
from ragen_apo.report.html import templates
from ragen_apo.report.style import compact, counted, decimal, interval, measured, percent, signed

FOLDER = Path(__file__).parent


@cache
def _templates() -> Environment:
    """The templates of all rooms, each in a folder of its own under `templates/`."""
    made = templates(FileSystemLoader(FOLDER / "templates"))
    # Numbers are written as the report does.
    tools = (url, percent, signed, decimal, compact, counted, interval, measured)
    made.globals |= {tool.__name__: tool for tool in tools}
    return made


def url(path: str, **parameters: object) -> str:
    """An address of this server; parameters that are None, empty or 0 are left out."""
    given = {name.rstrip("_"): value for name, value in parameters.items() if value}
    return f"{path}?{urlencode(given, errors='surrogatepass')}" if given else path


def render(template: str, **context: Any) -> str:
    """A page, or a part of one, in HTML."""
    return _templates().get_template(template).render(context)


def page_of(template: str, **context: Any) -> HTMLResponse:
    """The answer with a page."""
    return HTMLResponse(render(template, **context))


def error_page(_: Request, error: Exception) -> Response:
    """What was wrong with a request, in the words of its error."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, RagenApoError):
        status, message = 404, str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        status, message = 404, f"{error.filename}: {error.strerror}"
    else:
        status, message = 500, "this page could not be made; the terminal shows why"
    return HTMLResponse(render("error.html", status=status, message=message), status)
