"""Common to the pages of the report: their templates, and the parts that make a page one file."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from ragen_apo.printable import printable
from ragen_apo.report import style

COLORS: Mapping[str, str] = {
    name.lower().replace("_", "-"): color
    for name, color in vars(style).items()
    if str(color).startswith("#")
}


def templates(loader: jinja2.BaseLoader, **options: Any) -> jinja2.Environment:
    """Templates whose values are escaped: markup by Jinja, characters that steer or hide by
    `printable`. A name that nobody gave is an error.
    """
    made = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    made.filters["code_marked"] = code_marked
    return made


def _shown(value: Any) -> Any:
    """A value as it goes into a page; numbers and our own markup stay."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _own_templates() -> jinja2.Environment:
    return templates(jinja2.PackageLoader("ragen_apo.report"))


def render(template: str, **context: Any) -> str:
    """A page; what the context holds is escaped where it stands in the markup."""
    return _own_templates().get_template(template).render(colors=COLORS, **context)


def code_marked(text: str) -> Markup:
    """Escaped text; the parts between backticks are marked as code."""
    forms = itertools.cycle([Markup("{}"), Markup("<code>{}</code>")])
    return Markup("").join(
        form.format(part) for form, part in zip(forms, text.split("`"), strict=False)
    )


def data_uri(image: bytes) -> str:
    """A PNG as an address, so that the page needs no file beside it."""
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")
