"""One file over HTTP, however the network behaves: resumed, retried, never a page for a file.

`fetch` consumes an address and a path. Afterwards the path has every byte that the server has for
the address. Otherwise FetchError says why not, and the path keeps what arrived, for the next call
to continue. The file `<name>.state` beside it records the version of the file to which this
beginning belongs.

- If a server stalls, cuts off, or answers 408, 429 or 5xx, the request is repeated with growing
  pauses, as long as the server keeps sending something new.
- A beginning is continued with `Range`. If the server ignores this, or has another version or
  length than before, the file starts again.
- HTML is never stored. If a page has a form that asks for a confirmation (Google Drive's virus-scan
  warning), the form is answered. Any other page is an error that quotes its title.

Proxies come from the environment (`https_proxy`, `no_proxy`), as urllib reads them. If a server
states too small a length, or a connection has no length, this shows only when the file is read.
"""

import contextlib
import errno
import html
import http.client
import json
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ragen_apo.progress import Progress

READ_BYTES = 1 << 18
MAX_PAGE_BYTES = 1 << 20
MAX_CONFIRMATIONS = 3
_RANGE_NOT_SATISFIABLE = 416
_RETRIED_STATUSES: Final = {408, _RANGE_NOT_SATISFIABLE, 425, 429, 500, 502, 503, 504}
_PARTIAL_CONTENT = 206
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_FORM_OR_FIELD = re.compile(r"<(form|input)\b([^>]*)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')

_MEGABYTE = 1_000_000


class FetchError(Exception):
    """The file cannot be had; says what came instead."""


class _InterruptedError(Exception):
    """An attempt ended before the file was whole."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server, and how often to ask."""

    timeout_seconds: float = 30.0
    """For a connection, and for each next piece of data."""
    max_attempts: int = 6
    """In a row that bring nothing new."""
    first_wait_seconds: float = 1.0
    """Doubles with each attempt in vain."""
    max_wait_seconds: float = 60.0


DEFAULT_PATIENCE: Final = Patience()


def fetch(
    url: str,
    path: Path,
    *,
    max_bytes: int,
    patience: Patience = DEFAULT_PATIENCE,
    progress: Progress,
) -> None:
    """Makes `path` the file at `url`, continuing what is there; raises FetchError.

    Of a file of more than `max_bytes` nothing is kept. OSError is left to the caller: it is about
    the disk, never about the network.
    """
    # Confirmations may hang on a cookie.
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    most = path.stat().st_size if path.exists() else 0
    in_vain = 0
    while True:
        try:
            return _attempt(opener, url, path, max_bytes, patience.timeout_seconds, progress)
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code} {error.reason}"
            with error:
                if error.code not in _RETRIED_STATUSES:
                    raise FetchError(reason + _title_of(error)) from error
            if error.code == _RANGE_NOT_SATISFIABLE:
                forget(path)
        except (ValueError, OverflowError, http.client.InvalidURL) as error:
            # What urllib and the sockets say to addresses such as http://[::1 or http://host:port.
            raise FetchError(f"the server's answer leads nowhere: {error}") from error
        except (
            _InterruptedError, TimeoutError, ConnectionError, ssl.SSLError, urllib.error.URLError,
            http.client.HTTPException,
        ) as error:  # fmt: skip
            reason = str(error) or type(error).__name__
        size = path.stat().st_size if path.exists() else 0
        in_vain = 0 if size > most else in_vain + 1
        most = max(most, size)
        if in_vain >= patience.max_attempts:
            raise FetchError(f"{reason} ({in_vain} attempts in a row brought nothing new)")
        wait = patience.first_wait_seconds * 2 ** max(in_vain - 1, 0)
        wait = min(wait, patience.max_wait_seconds)
        progress.say(f"{reason}; asking again in {wait:.0f} s")
        time.sleep(wait)


def forget(path: Path) -> None:
    """Removes a file that was being fetched and what is remembered of it."""
    path.unlink(missing_ok=True)
    _state_path(path).unlink(missing_ok=True)


def _state_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.state")


def _read_state(path: Path) -> dict | None:
    """The `total` length and `etag` of the file whose beginning `path` is; None: unknown."""
    try:
        state = json.loads(_state_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and path.exists() else None


def _attempt(
    opener: urllib.request.OpenerDirector,
    url: str,
    path: Path,
    max_bytes: int,
    timeout_seconds: float,
    progress: Progress,
) -> None:
    """One try: the file is whole afterwards, or an exception says what happened."""
    state = _read_state(path)
    offset = path.stat().st_size if state is not None else 0
    if state is not None and state.get("total") == offset:
        return
    headers = {"User-Agent": "ragen-apo"} | ({"Range": f"bytes={offset}-"} if offset else {})
    for _ in range(MAX_CONFIRMATIONS):
        request = urllib.request.Request(url, headers=headers)
        with opener.open(request, timeout=timeout_seconds) as response:
            total = response.length
            block = response.read1(READ_BYTES)
            is_rest = response.status == _PARTIAL_CONTENT
            if not is_rest and block.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
                page = (block + response.read(MAX_PAGE_BYTES)).decode("utf-8", "replace")
                url = _confirmed(page, response.url)
                continue
            etag = response.headers.get("ETag")
            if is_rest:
                total = _total_of_the_same(response, offset, etag, state)
                if total is None:
                    forget(path)
                    raise _InterruptedError("the server's file has changed")
            done = offset if is_rest else 0
            _check_length(path, max(total or 0, done + len(block)), max_bytes)
            _check_room(path, (total or 0) - done)
            if not is_rest:
                forget(path)
                state_text = json.dumps({"total": total, "etag": etag})
                _state_path(path).write_text(state_text, encoding="utf-8")
            progress.start(f"download {path.stem} (MB)", -(-(total or 0) // _MEGABYTE))
            with path.open("ab") as stream:
                while block:
                    stream.write(block)
                    done += len(block)
                    progress.update(-(-done // _MEGABYTE))
                    block = response.read1(READ_BYTES)
                    _check_length(path, done + len(block), max_bytes)
            if total is not None and done < total:
                raise _InterruptedError(
                    f"the connection broke off after {done:,} of {total:,} bytes"
                )
            return
    raise FetchError("the server asks for a confirmation again and again")


def _total_of_the_same(
    response: http.client.HTTPResponse, offset: int, etag: str | None, state: dict | None
) -> int | None:
    """The length of the file that this is the rest of; None if it is not the one at hand."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or state is None or int(match[1]) != offset or state.get("etag") != etag:
        return None
    return int(match[2]) if state.get("total") in (None, int(match[2])) else None


def _check_length(path: Path, length: int, max_bytes: int) -> None:
    if length > max_bytes:
        forget(path)
        raise FetchError(
            f"the file is longer than {max_bytes:,} bytes and so is not the one that is expected"
        )


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        reason = f"{needed:,} more bytes are needed, {free:,} are free"
        raise OSError(errno.ENOSPC, reason, str(path))


def _title_of(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return _title(error.read(MAX_PAGE_BYTES).decode("utf-8", "replace"))
    return ""


def _title(page: str) -> str:
    match = re.search(r"<title[^>]*>(.*?)</title>", page, re.DOTALL | re.IGNORECASE)
    title = " ".join(html.unescape(match[1]).split())[:200] if match else ""
    return f", titled {title!r}" if title else ""


def _confirmed(page: str, url: str) -> str:
    """Where the form of the page at `url` leads; raises FetchError where none asks to download."""
    tags = [
        (tag.lower(), {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)})
        for tag, text in _FORM_OR_FIELD.findall(page)
    ]
    actions = [
        attributes.get("action", "")
        for tag, attributes in tags
        if tag == "form" and "download" in attributes.get("id", "")
    ]
    if not actions:
        raise FetchError("a page came instead of the file" + _title(page))
    fields = {a["name"]: a.get("value", "") for tag, a in tags if tag == "input" and "name" in a}
    target = urllib.parse.urlsplit(urllib.parse.urljoin(url, actions[0]))
    if target.scheme != urllib.parse.urlsplit(url).scheme:
        raise FetchError(f"the confirmation leads to {target.scheme!r}, which is not followed")
    query = urllib.parse.urlencode(dict(urllib.parse.parse_qsl(target.query)) | fields)
    return target._replace(query=query).geturl()
