"""One file over HTTP, however the network behaves: resumed, retried, never a page for a file.

`fetch` consumes an address and a path; afterwards the path holds every byte that the server has for
the address, or FetchError says why not and the path keeps what came, for the next call to go on
from. Beside it, `<name>.state` remembers of which version of the file the beginning is.

- A server that stalls, cuts off, or answers 408, 429 or 5xx is asked again, with growing waits, as
  long as it keeps sending something new; `max_attempts` counts the attempts without news.
- A beginning is continued with `Range`; where the server ignores it, or has another version or
  length than before, the file starts over.
- HTML is never stored. A page that asks for a confirmation (Google Drive's virus-scan warning) is
  answered; any other page is an error that quotes its title.

Proxies come from the environment (`https_proxy`, `no_proxy`), as urllib reads them. Nothing here
judges the content: a length that the server understates, or a connection without a length, shows
only when the file is read. What is longer than `max_bytes` is given up, whether the server says so
or never comes to an end.
"""

import contextlib
import errno
import html.parser
import http.client
import json
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

READ_BYTES = 1 << 18
MAX_PAGE_BYTES = 1 << 20
MAX_CONFIRMATIONS = 3
SPARE_DISK_BYTES = 1 << 20
_RETRIED_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")

Told = Callable[[int, int | None], None]
"""Told how many bytes are there and how many there will be, where that is known."""


class FetchError(Exception):
    """The file cannot be had; says what came instead."""


class _TemporaryError(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, reason: str, wait_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class _StartOverError(Exception):
    """The beginning at hand belongs to another version of the file."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server, and how often to ask."""

    timeout_seconds: float = 30.0
    """For a connection, and for each next piece of data."""
    max_attempts: int = 6
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
    told: Told,
    say: Callable[[str], None],
) -> None:
    """Makes `path` the file at `url`, continuing what is there; raises FetchError.

    Of a file of more than `max_bytes` nothing is kept. `say` hears why the server is asked again.
    OSError is left to the caller: it is about the disk, never about the network.
    """
    download = _Download(url, path, max_bytes, patience, told)
    most = path.stat().st_size if path.exists() else 0
    in_vain = 0
    while True:
        try:
            download.attempt()
            return
        except _StartOverError:
            download.discard()
            reason, wait = "the server's file keeps changing", 0.0
        except _TemporaryError as error:
            reason, wait = str(error), error.wait_seconds
        size = path.stat().st_size if path.exists() else 0
        in_vain = 0 if size > most else in_vain + 1
        most = max(most, size)
        if in_vain >= patience.max_attempts:
            raise FetchError(f"{reason} ({in_vain} attempts in a row brought nothing new)")
        growing = patience.first_wait_seconds * 2 ** max(in_vain - 1, 0)
        wait = min(max(growing, wait), patience.max_wait_seconds)
        say(f"{reason}; asking again in {wait:.0f} s")
        time.sleep(wait)


def forget(path: Path) -> None:
    """Removes a file that was being fetched and what is remembered of it."""
    path.unlink(missing_ok=True)
    _state_path(path).unlink(missing_ok=True)


def _state_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.state")


class _Download:
    """The attempts to fetch one file."""

    def __init__(
        self, url: str, path: Path, max_bytes: int, patience: Patience, told: Told
    ) -> None:
        self._url, self._path, self._max_bytes = url, path, max_bytes
        self._patience, self._told = patience, told
        self._state = _state_path(path)
        # Confirmations may hang on a cookie.
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

    def attempt(self) -> None:
        """One try: the file is whole afterwards, or an exception says what happened."""
        offset = self._path.stat().st_size if self._path.exists() else 0
        version = self._version() if offset else None
        if offset and version is None:
            raise _StartOverError
        if version is not None and version["total"] == offset:
            return
        headers = {"User-Agent": "ragen-apo", "Accept": "*/*"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            with contextlib.closing(self._open(headers)) as response:
                self._receive(response, offset, version)
        except urllib.error.HTTPError as error:
            with error:
                self._explain_status(error, offset)
        except (ValueError, OverflowError, http.client.InvalidURL) as error:
            # What urllib and the sockets say to addresses such as http://[::1 or http://host:port.
            raise FetchError(f"the server's answer leads nowhere: {error}") from error
        except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException) as error:
            raise _TemporaryError(_describe(error)) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise FetchError(f"the server's certificate is not valid: {error.reason}") from None
            raise _TemporaryError(_describe(error.reason)) from error

    def discard(self) -> None:
        """Forgets the beginning at hand."""
        forget(self._path)

    def _open(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        """The answer that carries data: pages that ask for a confirmation are answered."""
        url = self._url
        for _ in range(MAX_CONFIRMATIONS):
            request = urllib.request.Request(url, headers=headers)
            response = self._opener.open(request, timeout=self._patience.timeout_seconds)
            if response.headers.get_content_type() != "text/html":
                return response
            with contextlib.closing(response):
                page = response.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
            url = _confirmation(page, response.url)
        raise FetchError("the server asks for a confirmation again and again")

    def _receive(
        self, response: http.client.HTTPResponse, offset: int, version: dict | None
    ) -> None:
        """Stores the data of an answer behind, or instead of, what is there."""
        start, total = _placement(response)
        now = {"total": total, "etag": response.headers.get("ETag")}
        if start not in (0, offset) or (start and not _same_version(now, version)):
            raise _StartOverError
        if total is not None:
            self._check_size(total)
            self._check_room(total - start)
        first = response.read1(READ_BYTES)
        if start == 0:
            _refuse_html(first)
            self._state.write_text(json.dumps(now), encoding="utf-8")
        done = start
        with self._path.open("ab" if start else "wb") as stream:
            while first:
                self._check_size(done + len(first))
                stream.write(first)
                done += len(first)
                self._told(done, total)
                first = response.read1(READ_BYTES)
        if total is not None and done < total:
            raise _TemporaryError(f"the connection broke off after {done:,} of {total:,} bytes")

    def _version(self) -> dict | None:
        try:
            version = json.loads(self._state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return version if isinstance(version, dict) and {"total", "etag"} <= set(version) else None

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            self.discard()
            raise FetchError(
                f"the file is longer than {self._max_bytes:,} bytes and so is not the one that is "
                "expected"
            )

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._path.parent).free
        if free < needed + SPARE_DISK_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"{needed:,} more bytes are needed, {free:,} are free",
                str(self._path),
            )

    def _explain_status(self, error: urllib.error.HTTPError, offset: int) -> None:
        """Turns an HTTP error into the exception that fits; returns where the file is whole."""
        if error.code == _RANGE_NOT_SATISFIABLE and offset:
            match = _CONTENT_RANGE.fullmatch(error.headers.get("Content-Range", ""))
            if match is not None and match[2] == str(offset):
                return
            raise _StartOverError
        reason = f"HTTP status {error.code} {error.reason}"
        if error.code in _RETRIED_STATUSES:
            wait = error.headers.get("Retry-After", "")
            raise _TemporaryError(reason, float(wait) if wait.isascii() and wait.isdigit() else 0.0)
        raise FetchError(f"{reason}{_title_of(error)}")


def _same_version(now: dict, before: dict | None) -> bool:
    if before is None or now["etag"] != before["etag"]:
        return False
    return before["total"] is None or now["total"] == before["total"]


def _describe(error: object) -> str:
    text = str(error) or type(error).__name__
    return f"no answer in time ({text})" if isinstance(error, TimeoutError) else text


def _placement(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Where the data of an answer begins in the file, and the length of the file if it is told."""
    if response.status == _PARTIAL_CONTENT:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None or match[1] is None:
            raise FetchError("the server sent a part of the file and did not say which")
        return int(match[1]), int(match[2]) if match[2] != "*" else None
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isascii() and length.isdigit() else None


def _refuse_html(beginning: bytes) -> None:
    if beginning.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise FetchError(
            "a page came instead of the file" + _title(beginning.decode(errors="replace"))
        )


def _title_of(error: urllib.error.HTTPError) -> str:
    try:
        return _title(error.read(MAX_PAGE_BYTES).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException):
        return ""


def _title(page: str) -> str:
    match = re.search(r"<title[^>]*>(.*?)</title>", page, re.DOTALL | re.IGNORECASE)
    title = " ".join(html.unescape(match[1]).split())[:200] if match else ""
    return f", titled {title!r}" if title else ""


class _ConfirmationForm(html.parser.HTMLParser):
    """Finds the form, or in older pages the link, that says to download anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.action = ""
        self.fields: dict[str, str] = {}
        self.link = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "form" and not self.action and "download" in values.get("id", ""):
            self.action, self._inside = values.get("action", ""), True
        elif tag == "input" and self._inside and values.get("name"):
            self.fields[values["name"]] = values.get("value", "")
        elif tag == "a" and "confirm=" in values.get("href", "") and not self.link:
            self.link = values["href"]

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._inside = False


def _confirmation(page: str, url: str) -> str:
    """The address behind a page that asks for a confirmation; raises FetchError for others."""
    form = _ConfirmationForm()
    form.feed(page)
    if form.action:
        target = urllib.parse.urlsplit(urllib.parse.urljoin(url, form.action))
        fields = dict(urllib.parse.parse_qsl(target.query)) | form.fields
        target = target._replace(query=urllib.parse.urlencode(fields))
    elif form.link:
        target = urllib.parse.urlsplit(urllib.parse.urljoin(url, form.link))
    else:
        raise FetchError("a page came instead of the file" + _title(page))
    if target.scheme != urllib.parse.urlsplit(url).scheme:
        raise FetchError(f"the confirmation leads to {target.scheme!r}, which is not followed")
    return target.geturl()
