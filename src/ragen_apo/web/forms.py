"""The fields of forms that pages send by POST."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_FORM_BYTES = 64 * 1024

Form = Mapping[str, str]


async def read_form(request: Request) -> Form:
    """The fields of a form that is not too long; the last of equal names."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, f"a form has at most {MAX_FORM_BYTES:,} bytes")
    text = body.decode("utf-8", "replace")
    return dict(parse_qsl(text, keep_blank_values=True, errors="replace"))
