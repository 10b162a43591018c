"""Downloads from a server on this machine that stalls, cuts off and lies."""

import contextlib
import errno
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from ragen_apo.environments.webshop import download, fetch
from ragen_apo.environments.webshop.download import download_data
from ragen_apo.environments.webshop.fetch import FetchError, Patience
from ragen_apo.environments.webshop.generated import write_generated_files
from ragen_apo.environments.webshop.json_streams import READ_CHARACTERS, stream_json_array
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.progress import SilentProgress
from tests.sweeps import quick_first

CALM = Patience(timeout_seconds=20, max_attempts=3, first_wait_seconds=0.0)
HURRIED = Patience(timeout_seconds=0.2, max_attempts=3, first_wait_seconds=0.0)
"""For servers that stall. On a busy machine a good one may seem to: count no requests with it."""
DATA = json.dumps([f"value {number}" for number in range(2000)]).encode()
NOT_FOUND_PAGE = b"<!DOCTYPE html><html><title>Error &amp; 404</title></html>"


class Request(BaseHTTPRequestHandler):
    """One request; the server's list of behaviours for the path says how to answer."""

    server: "Server"

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        behaviours = self.server.behaviours.setdefault(self.path, [])
        (behaviours.pop(0) if behaviours else serve)(self)

    @property
    def content(self) -> bytes:
        return self.server.files.get(self.path.partition("?")[0], DATA)

    @property
    def offset(self) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else 0

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | named).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.files: dict[str, bytes] = {}
        self.behaviours: dict[str, list[Behaviour]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error here."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


Behaviour = Callable[[Request], None]


def serve(request: Request) -> None:
    """As a good server does."""
    content, offset = request.content, request.offset
    if offset and offset >= len(content):
        request.answer(416, b"", Content_Range=f"bytes */{len(content)}")
    elif offset:
        span = f"bytes {offset}-{len(content) - 1}/{len(content)}"
        request.answer(206, content[offset:], Content_Range=span)
    else:
        request.answer(200, content)


def serve_whole(request: Request) -> None:
    """Ignores Range."""
    request.answer(200, request.content)


def cut_after(num_bytes: int) -> Behaviour:
    """Sends so many of the bytes asked for and hangs up."""

    def behave(request: Request) -> None:
        content, offset = request.content, request.offset
        length = str(len(content) - offset)
        span = f"bytes {offset}-{len(content) - 1}/{len(content)}" if offset else ""
        piece = content[offset : offset + num_bytes]
        request.answer(206 if offset else 200, piece, Content_Length=length, Content_Range=span)

    return behave


def stall_after(num_bytes: int) -> Behaviour:
    """Sends so many of the bytes asked for and then nothing, without hanging up."""

    def behave(request: Request) -> None:
        cut_after(num_bytes)(request)
        request.wfile.flush()
        request.server.closing.wait(5)

    return behave


def never_answer(request: Request) -> None:
    request.server.closing.wait(5)


def status(code: int, body: bytes = b"", **headers: str) -> Behaviour:
    return lambda request: request.answer(code, body, **headers)


def page(body: bytes, kind: str = "text/html; charset=utf-8") -> Behaviour:
    return status(200, body, Content_Type=kind)


def claim_length(length: int) -> Behaviour:
    return lambda request: request.answer(200, request.content, Content_Length=str(length))


def without_length(num_bytes: int) -> Behaviour:
    return lambda request: request.answer(200, request.content[:num_bytes], Content_Length="")


def chunked_and_cut(request: Request) -> None:
    request.protocol_version = "HTTP/1.1"
    body = b"%x\r\n%s\r\n" % (500, request.content[:500])
    request.answer(200, body, Content_Length="", Transfer_Encoding="chunked", Connection="close")


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running.files.clear()
    running.behaviours.clear()
    running.requests.clear()
    return running


Get = Callable[..., Path]


@pytest.fixture
def get(server: Server, tmp_path: Path) -> Get:
    """Fetches the file of the server by these behaviours, one for each request."""

    def run(*behaviours: Behaviour, before: bytes | None = None, patience: Patience = CALM) -> Path:
        path = tmp_path / "file.part"
        if before is not None:
            path.write_bytes(before)
            path.with_name("file.part.state").write_text(
                json.dumps({"total": len(DATA), "etag": None})
            )
        server.behaviours["/file"] = list(behaviours)
        fetch.fetch(
            f"{server.address}/file", path, max_bytes=len(DATA) + 100, patience=patience,
            progress=SilentProgress(),
        )  # fmt: skip
        return path

    return run


# One file


@pytest.mark.parametrize(
    ("behaviours", "ranges"),
    [
        ([serve], [None]),
        ([cut_after(1000)], [None, "bytes=1000-"]),
        ([cut_after(1000), cut_after(1), cut_after(50)], [None, 1000, 1001, 1051]),
        ([status(503), status(500), serve], [None, None, None]),
        ([status(429, Retry_After="0"), serve], [None, None]),
        ([cut_after(900), status(502), serve], [None, 900, 900]),
        ([cut_after(900), serve_whole], [None, 900]),
        ([claim_length(len(DATA) + 10)], [None, f"bytes={len(DATA)}-", None]),
        ([chunked_and_cut], [None, 500]),
        ([without_length(len(DATA))], [None]),
    ],
)
def test_the_file_is_whole_in_the_end(
    behaviours: list[Behaviour], ranges: list[Any], get: Get, server: Server
) -> None:
    assert get(*behaviours).read_bytes() == DATA
    expected = [f"bytes={r}-" if isinstance(r, int) else r for r in ranges]
    assert [asked for _, asked in server.requests] == expected


@pytest.mark.parametrize("behaviour", [never_answer, stall_after(0), stall_after(700)])
def test_a_server_that_stalls_is_asked_again(
    behaviour: Behaviour, get: Get, server: Server
) -> None:
    assert get(behaviour, patience=HURRIED).read_bytes() == DATA
    assert len(server.requests) >= 2


def test_a_server_that_stalls_every_time_is_given_up(get: Get) -> None:
    with pytest.raises(FetchError, match=r"time.*3 attempts"):
        get(*[never_answer] * 9, patience=HURRIED)


def test_what_an_earlier_call_left_is_continued(get: Get, server: Server) -> None:
    assert get(before=DATA[:1234]).read_bytes() == DATA
    assert server.requests == [("/file", "bytes=1234-")]


def test_a_complete_file_asks_nothing(get: Get, server: Server) -> None:
    assert get(before=DATA).read_bytes() == DATA
    assert server.requests == []


def test_a_file_that_changed_meanwhile_starts_over(get: Get, server: Server) -> None:
    server.files["/file"] = DATA + b" "
    assert get(before=DATA[:1234]).read_bytes() == DATA + b" "
    assert [asked for _, asked in server.requests] == ["bytes=1234-", None]


def test_a_beginning_of_unknown_origin_starts_over(get: Get, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    assert get().read_bytes() == DATA


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (status(503), "503"),
        (cut_after(0), "received 0 bytes"),
    ],
)
def test_a_server_that_never_gets_further_is_given_up(
    behaviour: Behaviour, said: str, get: Get, server: Server
) -> None:
    with pytest.raises(FetchError, match=f"{said}.*3 attempts"):
        get(*[behaviour] * 9)
    assert len(server.requests) == 3


def test_a_server_that_ignores_range_and_cuts_at_one_place_is_given_up(
    get: Get, server: Server
) -> None:
    def cut(request: Request) -> None:
        request.answer(200, DATA[:100], Content_Length=str(len(DATA)))

    with pytest.raises(FetchError, match="received 100 bytes"):
        get(*[cut] * 9)
    assert len(server.requests) == 4  # the first one brought something new


@pytest.mark.parametrize("code", [403, 404, 410])
def test_a_refusal_is_final_and_quotes_the_page(code: int, get: Get, server: Server) -> None:
    with pytest.raises(FetchError, match=f"{code} .*titled 'Error & 404'"):
        get(status(code, NOT_FOUND_PAGE))
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["text/html", "application/octet-stream", "application/json", ""])
def test_a_page_is_never_stored_whatever_it_is_called(kind: str, get: Get, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="page came instead of the file, titled 'Error & 404'"):
        get(page(b" \n" + NOT_FOUND_PAGE, kind))
    assert not list(tmp_path.glob("file*"))


def test_a_page_instead_of_the_rest_is_not_appended(get: Get, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="page came"):
        get(page(NOT_FOUND_PAGE), before=DATA[:1234])
    assert (tmp_path / "file.part").read_bytes() == DATA[:1234]


FORM = b"""<!DOCTYPE html><html><head><title>Google Drive - Virus scan warning</title></head><body>
<form id="download-form" action="/confirmed?export=download" method="get">
<input type="submit" value="Download anyway"/><input type="hidden" name="id" value="A B">
<input type="hidden" name="confirm" value="t"><input type="hidden" name="uuid" value="1-2">
</form></body></html>"""


def test_the_virus_scan_warning_is_confirmed(get: Get, server: Server) -> None:
    confirmed = "/confirmed?export=download&id=A+B&confirm=t&uuid=1-2"
    server.behaviours[confirmed] = [cut_after(400)]
    assert get(page(FORM), page(FORM)).read_bytes() == DATA
    assert server.requests == [
        ("/file", None), (confirmed, None), ("/file", "bytes=400-"), (confirmed, "bytes=400-"),
    ]  # fmt: skip


def test_warnings_without_end_are_given_up(get: Get, server: Server) -> None:
    again = "/confirmed?export=download&id=A+B&confirm=t&uuid=1-2"
    server.behaviours[again] = [page(FORM)] * 9
    with pytest.raises(FetchError, match="again and again"):
        get(page(FORM))


def test_a_confirmation_that_leaves_http_is_not_followed(get: Get) -> None:
    with pytest.raises(FetchError, match="'file'"):
        get(page(FORM.replace(b"/confirmed", b"file:///etc/passwd")))


def test_redirections_keep_the_range(get: Get, server: Server) -> None:
    moved = status(302, Location="/elsewhere")
    assert get(moved, before=DATA[:1234]).read_bytes() == DATA
    assert server.requests[-1] == ("/elsewhere", "bytes=1234-")


@pytest.mark.parametrize(
    "address", ["http://[::1", "http://127.0.0.1:x/", f"http://{'x' * 70}.invalid/"]
)
@pytest.mark.parametrize("form", [False, True])
def test_an_address_that_is_none_is_one_message(address: str, form: bool, get: Get) -> None:
    moved = status(302, Location=address)
    if form:
        moved = page(FORM.replace(b"/confirmed", address.encode()))
    with pytest.raises(FetchError, match=r"the server's answer leads nowhere|in location header"):
        get(*[moved] * 9)


def endless(request: Request) -> None:
    """A body without a length that goes on until the other side hangs up."""
    request.answer(200, DATA, Content_Length="")
    with contextlib.suppress(OSError):
        while not request.server.closing.is_set():
            request.wfile.write(DATA)


def test_a_body_without_length_or_end_is_given_up_and_nothing_of_it_is_kept(
    get: Get, tmp_path: Path
) -> None:
    with pytest.raises(FetchError, match=r"longer than \d\d,\d+ bytes and so is not the one"):
        get(endless)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_said_to_be_far_too_long_is_not_fetched(get: Get, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="longer than"):
        get(claim_length(10**15))
    assert not list(tmp_path.iterdir())


def test_the_proxy_of_the_environment_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    path = tmp_path / "file"
    address = "http://nowhere.invalid/file"
    fetch.fetch(address, path, max_bytes=10**6, patience=CALM, progress=SilentProgress())
    assert path.read_bytes() == DATA
    assert server.requests == [("http://nowhere.invalid/file", None)]


# The data of a size


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small catalogue under the names of the small data."""
    folder = tmp_path_factory.mktemp("upstream")
    write_generated_files(folder, 60)
    for name in ("items_shuffle", "items_ins_v2"):
        (folder / f"{name}.json").rename(folder / f"{name}_1000.json")
    return folder


@pytest.fixture
def upstream(
    server: Server, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Server:
    """The server in place of Google Drive, and a fresh data folder."""
    for remote in download.SOURCES["small"]:
        server.files[f"/{remote.drive_id}"] = (files / remote.name).read_bytes()
    monkeypatch.setattr(download, "DRIVE_ADDRESS", f"{server.address}/{{drive_id}}")
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path))
    return server


ITEMS, ATTRIBUTES, HUMAN = (remote.name for remote in download.SOURCES["small"])
ITEMS_PATH = f"/{download.SOURCES['small'][0].drive_id}"


def small(**options: Any) -> Path:
    return download_data("small", progress=SilentProgress(), patience=CALM, **options)


def assert_in_place(folder: Path, files: Path) -> None:
    for name in (ITEMS, ATTRIBUTES, HUMAN):
        content = (files / name).read_bytes()
        assert (folder / name).read_bytes() == content
        line = f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        assert line in (folder / "SHA256SUMS").read_text()
    assert len(list(folder.iterdir())) == 4
    beside = {path.name for path in folder.parent.iterdir() if path.name[0] != "."}
    assert beside == {"small", "prepared"}


def test_the_files_are_put_in_place_with_their_checksums(
    upstream: Server, files: Path, tmp_path: Path
) -> None:
    folder = small()
    assert folder == tmp_path / "webshop" / "small"
    assert_in_place(folder, files)


def test_a_second_call_compares_and_downloads_nothing(upstream: Server) -> None:
    folder = small()
    upstream.requests.clear()
    assert small() == folder
    assert upstream.requests == []
    with (folder / ITEMS).open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(EnvironmentDataError, match=r"is not what was downloaded.*--force"):
        small()


def test_force_downloads_anew(upstream: Server, files: Path) -> None:
    folder = small()
    (folder / ITEMS).write_bytes(b"damaged")
    small(force=True)
    assert_in_place(folder, files)


def test_the_folder_appears_only_when_every_file_is_there(
    upstream: Server, files: Path, tmp_path: Path
) -> None:
    upstream.behaviours[ITEMS_PATH] = [cut_after(2000), *[cut_after(0)] * 3]
    with pytest.raises(EnvironmentDataError, match=r"2,000 bytes of it are kept.*--from"):
        small()
    assert not (tmp_path / "webshop" / "small").exists()
    assert_in_place(small(), files)
    assert (ITEMS_PATH, "bytes=2000-") in upstream.requests


def test_files_that_are_there_are_not_fetched_again(upstream: Server) -> None:
    human_path = f"/{download.SOURCES['small'][2].drive_id}"
    upstream.behaviours[human_path] = [status(404)]
    with pytest.raises(EnvironmentDataError, match="404"):
        small()
    upstream.requests.clear()
    small()
    assert upstream.requests == [(human_path, None)]


WRONG_CONTENTS = {
    "an object": (b"{}", r"expected \[ at its beginning"),
    "an empty file": (b"", "cut off"),
    "text": (b"Quota exceeded", "got 'Q'"),
    "zipped": (b"\x1f\x8b\x08\x00abc", "invalid start byte"),
    "the beginning of a list": (b'[{"asin": "B1"', "cut off"),
    "a missing comma": (
        b'[{"asin": "B1" "name": "a"}, {"asin": "B2"}]',
        "Expecting ',' delimiter in '.*\"name\"",
    ),
    "single quotes": (b"[{'asin': 'B1'}]", "Expecting property name .* in "),
}


@pytest.mark.parametrize("name", quick_first(WRONG_CONTENTS))
def test_wrong_content_is_an_error_until_it_is_fetched_anew(
    name: str, upstream: Server, files: Path, tmp_path: Path
) -> None:
    right = upstream.files[ITEMS_PATH]
    upstream.files[ITEMS_PATH], said = WRONG_CONTENTS[name]
    with pytest.raises(EnvironmentDataError, match=f"{ITEMS} is malformed: .*{said}.*--force"):
        small()
    assert not (tmp_path / "webshop" / "small").exists()
    upstream.files[ITEMS_PATH] = right
    assert_in_place(small(force=True), files)


def test_a_file_that_ends_in_a_number_is_cut_off_also_behind_a_value_of_many_blocks(
    tmp_path: Path,
) -> None:
    """The first value cannot be read from the first block; that is no fault of the file."""
    file = tmp_path / "values.json"
    file.write_text(f'["{"x" * 3 * READ_CHARACTERS}", 12')
    with pytest.raises(ValueError, match="cut off"):
        list(stream_json_array(file))


def test_files_at_hand_are_copied(upstream: Server, files: Path) -> None:
    assert_in_place(small(source=files), files)
    assert upstream.requests == []
    small(source=files)
    (files / "other").mkdir()
    for name in (ITEMS, ATTRIBUTES):
        (files / "other" / name).write_bytes((files / name).read_bytes() + b"\n")
    with pytest.raises(EnvironmentDataError, match=r"differs from .*--force"):
        small(source=files / "other")
    folder = small(source=files / "other", force=True)
    assert not (folder / HUMAN).exists()
    shutil.copy(files / HUMAN, files / "other" / HUMAN)
    with pytest.raises(EnvironmentDataError, match=rf"small has no {HUMAN}, and .*--force"):
        small(source=files / "other")


def test_files_at_hand_are_checked(upstream: Server, files: Path, tmp_path: Path) -> None:
    (tmp_path / "hand").mkdir()
    with pytest.raises(
        EnvironmentDataError, match=f"{ITEMS} and {ATTRIBUTES} is no regular file, found"
    ):
        small(source=tmp_path / "hand")
    with pytest.raises(EnvironmentDataError, match="no folder"):
        small(source=tmp_path / "nowhere")
    for name in (ITEMS, ATTRIBUTES):
        (tmp_path / "hand" / name).write_bytes((files / name).read_bytes()[:-9])
    with pytest.raises(EnvironmentDataError, match=f"hand/{ATTRIBUTES} is malformed: .*cut off"):
        small(source=tmp_path / "hand")
    assert not (tmp_path / "webshop" / "small").exists()


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the content of files."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a copy of the first `keep`."""
    return tmp_path_factory.mktemp("downloaded") / "webshop"


@pytest.fixture
def keep(tmp_path: Path, upstream: Server, downloaded: Path) -> Path:
    """The folder in which the command keeps data, with the small data in place."""
    if downloaded.exists():
        shutil.copytree(downloaded, tmp_path / "webshop")
    else:
        small()
        shutil.copytree(tmp_path / "webshop", downloaded)
    return tmp_path / "webshop"


@pytest.mark.parametrize(
    "name",
    quick_first(["small.copy", "small.partial-mine", "small-2", "full", "full.partial-0123abcd"]),
)
@pytest.mark.parametrize("force", [False, True])
def test_a_source_beside_the_target_is_only_read_whatever_its_name(
    name: str, force: bool, keep: Path, files: Path
) -> None:
    shutil.copytree(files, keep / name, dirs_exist_ok=True)
    before = content_of(keep / name)
    small(source=keep / name, force=force)
    assert content_of(keep / name) == before
    assert (keep / "small" / ITEMS).read_bytes() == (files / ITEMS).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["small", "small/inside", "small.download", "small.download/in", "small.partial-0123abcd"],
)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("linked", ["", "folder", "files"])
def test_a_source_in_a_folder_that_the_command_clears_is_refused_before_anything_changes(
    name: str, force: bool, linked: str, keep: Path, files: Path, tmp_path: Path
) -> None:
    source = keep / name
    shutil.copytree(files, source, dirs_exist_ok=True)
    if linked == "folder":
        source = tmp_path / "link"
        source.symlink_to(keep / name)
    elif linked == "files":
        source = tmp_path / "hand"
        source.mkdir()
        for path in (keep / name).glob("*.json"):
            (source / path.name).symlink_to(path)
    before = content_of(tmp_path)
    with pytest.raises(EnvironmentDataError, match=r"--from .* lies where this command itself"):
        small(source=source, force=force)
    assert content_of(tmp_path) == before


def test_a_source_above_the_target_is_only_read(keep: Path, files: Path) -> None:
    shutil.copytree(files, keep, dirs_exist_ok=True)
    before = content_of(keep)
    small(source=keep, force=True)
    assert content_of(keep) == before


def test_a_target_that_is_a_link_is_replaced_and_what_it_led_to_stays(
    keep: Path, files: Path, tmp_path: Path
) -> None:
    (keep / "small").rename(tmp_path / "elsewhere")
    (keep / "small").symlink_to(tmp_path / "elsewhere")
    before = content_of(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentDataError, match="lies where this command itself"):
        small(source=tmp_path / "elsewhere", force=True)
    small(force=True)
    assert not (keep / "small").is_symlink()
    assert content_of(tmp_path / "elsewhere") == before
    assert_in_place(keep / "small", files)


@pytest.mark.parametrize("force", [False, True])
def test_a_source_with_a_damaged_record_is_refused_and_what_is_there_stays(
    force: bool, upstream: Server, files: Path, tmp_path: Path
) -> None:
    if force:
        small()
    shutil.copytree(files, tmp_path / "hand")
    records = json.loads((files / ITEMS).read_bytes())
    records[40]["name"] = ["no text"]
    (tmp_path / "hand" / ITEMS).write_text(json.dumps(records))
    before = content_of(tmp_path)
    with pytest.raises(
        EnvironmentDataError,
        match=f"{tmp_path}/hand/{ITEMS} is malformed: record 41 .*field 'name'",
    ):
        small(source=tmp_path / "hand", force=force)
    after = content_of(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if "partial" in name]


@pytest.mark.slow
def test_a_download_with_a_damaged_record_is_kept_until_force_and_not_put_in_place(
    upstream: Server, files: Path, tmp_path: Path
) -> None:
    records = json.loads((files / ITEMS).read_bytes())
    wrong = json.dumps([*records, {"asin": "B2"}]).encode()
    for content, said in ((wrong, "record 61"), (b'[{"a": 1}]', "asin"), (b"[]", "no product")):
        upstream.files[ITEMS_PATH] = content
        for force in (True, False):
            with pytest.raises(EnvironmentDataError, match=f"{said}.*anew with --force"):
                small(force=force)
    assert not (tmp_path / "webshop" / "small").exists()
    upstream.files[ITEMS_PATH] = (files / ITEMS).read_bytes()
    assert_in_place(small(force=True), files)


def test_attributes_of_no_product_are_refused(upstream: Server, tmp_path: Path) -> None:
    upstream.files[f"/{download.SOURCES['small'][1].drive_id}"] = b'{"error": {"code": 403}}'
    with pytest.raises(EnvironmentDataError, match="no instruction in what was downloaded"):
        small()
    assert not (tmp_path / "webshop" / "small").exists()


def test_a_file_in_the_place_of_the_target_stays(upstream: Server, tmp_path: Path) -> None:
    (tmp_path / "webshop").mkdir()
    (tmp_path / "webshop" / "small").write_text("mine")
    with pytest.raises(EnvironmentDataError, match="small is no folder; move it away"):
        small(force=True)
    assert (tmp_path / "webshop" / "small").read_text() == "mine"


def test_a_full_disk_is_said_before_the_download(
    upstream: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentDataError, match=r"cannot be stored in .*more bytes are needed"):
        small()


def test_a_disk_that_fills_up_keeps_what_came(
    upstream: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download, "write_checksums", full)
        with pytest.raises(
            EnvironmentDataError, match=r"cannot be stored.*No space left.*continues"
        ):
            small()
    upstream.requests.clear()
    small()
    assert upstream.requests == []


def test_a_folder_that_cannot_be_written_is_named(
    upstream: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(EnvironmentDataError, match="RAGEN_APO_DATA"):
        small()


def test_a_second_download_at_the_same_time_is_refused(upstream: Server, tmp_path: Path) -> None:
    (tmp_path / "webshop").mkdir()
    with (
        FileLock(tmp_path / "webshop" / ".small.lock"),
        pytest.raises(EnvironmentDataError, match="another process"),
    ):
        small()


def test_without_a_network_the_message_says_what_else_can_be_done(
    upstream: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "DRIVE_ADDRESS", "http://127.0.0.1:9/{drive_id}")
    with pytest.raises(EnvironmentDataError, match=r"cannot be fetched.*refused.*--from"):
        small()


def test_the_table_names_upstreams_files() -> None:
    for size, remotes in download.SOURCES.items():
        assert [remote.required for remote in remotes] == [True, True, False]
        end = "_1000.json" if size == "small" else ".json"
        assert [r.name for r in remotes[:2]] == [f"items_shuffle{end}", f"items_ins_v2{end}"]
        assert all(re.fullmatch(r"[\w-]{33}", remote.drive_id) for remote in remotes)
