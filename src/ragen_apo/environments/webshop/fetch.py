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

Proxies come from the environment (`https_proxy`, `no_proxy`), as httpx2 reads them. If a server
states too small a length, or a connection has no length, this shows only when the file is read.
"""

import errno
import html
import itertools
import json
import re
import shutil
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

from ragen_apo.progress import Progress

MAX_PAGE_BLOCKS = 64
"""A page of more is not read to its end; a block has at most some 64 kB."""
MAX_CONFIRMATIONS = 3
_RANGE_NOT_SATISFIABLE = 416
_RETRIED_STATUSES: Final = {408, _RANGE_NOT_SATISFIABLE, 425, 429, 500, 502, 503, 504}
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
    most = path.stat().st_size if path.exists() else 0
    in_vain = 0
    headers = {"User-Agent": "ragen-apo", "Accept-Encoding": "identity"}
    # One client for all: confirmations may hang on a cookie.
    with httpx2.Client(
        headers=headers, timeout=patience.timeout_seconds, follow_redirects=True
    ) as client:
        while True:
            try:
                return _attempt(client, url, path, max_bytes, progress)
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, ValueError) as error:
                raise FetchError(f"the server's answer leads nowhere: {error}") from error
            except (httpx2.RequestError, _InterruptedError) as error:
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


def _read_state(path: Path) -> dict[str, Any] | None:
    """The `total` length and `etag` of the file whose beginning `path` is; None: unknown."""
    try:
        state = json.loads(_state_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and path.exists() else None


def _attempt(
    client: httpx2.Client, url: str, path: Path, max_bytes: int, progress: Progress
) -> None:
    """One try: the file is whole afterwards, or an exception says what happened."""
    state = _read_state(path)
    offset = path.stat().st_size if state is not None else 0
    if state is not None and state.get("total") == offset:
        return
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    for _ in range(MAX_CONFIRMATIONS):
        with client.stream("GET", url, headers=headers) as response:
            blocks = response.iter_raw()
            block = next(blocks, b"")
            if response.is_error:
                _raise_for_status(response, path, block)
            is_rest = response.status_code == httpx2.codes.PARTIAL_CONTENT
            if not is_rest and block.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
                page = b"".join([block, *itertools.islice(blocks, MAX_PAGE_BLOCKS)])
                url = _confirmed(page.decode("utf-8", "replace"), str(response.url))
                continue
            if is_rest:
                done, total = offset, _total_of_rest(response, path, offset, state or {})
            else:
                length = response.headers.get("Content-Length")
                done, total = 0, int(length) if length else None
            _check_length(path, max(total or 0, done + len(block)), max_bytes)
            _check_room(path, (total or 0) - done)
            if not is_rest:
                forget(path)
                state_text = json.dumps({"total": total, "etag": response.headers.get("ETag")})
                _state_path(path).write_text(state_text, encoding="utf-8")
            progress.start(f"download {path.stem} (MB)", -(-(total or 0) // _MEGABYTE))
            with path.open("ab") as stream:
                for piece in itertools.chain([block], blocks):
                    done += len(piece)
                    _check_length(path, done, max_bytes)
                    stream.write(piece)
                    progress.update(-(-done // _MEGABYTE))
            return
    raise FetchError("the server asks for a confirmation again and again")


def _total_of_rest(
    response: httpx2.Response, path: Path, offset: int, known: Mapping[str, Any]
) -> int:
    """The length of the whole file, of which the server sends all but the first `offset` bytes.

    `known` is what it said when it sent those. Forgets them where it has another file now.
    """
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    total = int(match[2]) if match and int(match[1]) == offset else None
    same_tag = known.get("etag") == response.headers.get("ETag")
    if total is None or not same_tag or known.get("total", 0) not in (None, total):
        forget(path)
        raise _InterruptedError("the server's file has changed")
    return total


def _raise_for_status(response: httpx2.Response, path: Path, page: bytes) -> None:
    reason = f"HTTP status {response.status_code} {response.reason_phrase}"
    if response.status_code not in _RETRIED_STATUSES:
        raise FetchError(reason + _title(page.decode("utf-8", "replace")))
    if response.status_code == _RANGE_NOT_SATISFIABLE:
        forget(path)
    raise _InterruptedError(reason)


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
