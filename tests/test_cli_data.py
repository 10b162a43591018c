"""`ragen-apo data`: what people type and read when they get data."""

from pathlib import Path

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment, download
from ragen_apo.environments.webshop.fetch import FetchError
from ragen_apo.environments.webshop.generated import write_generated_files
from tests.command_line import Command


@pytest.fixture(autouse=True)
def _data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path / "data"))


@pytest.fixture
def at_hand(tmp_path: Path) -> Path:
    folder = tmp_path / "hand"
    folder.mkdir()
    write_generated_files(folder, 30)
    for name in ("items_shuffle", "items_ins_v2"):
        (folder / f"{name}.json").rename(folder / f"{name}_1000.json")
    return folder


def test_data_explains_itself(command: Command) -> None:
    assert "webshop" in command("data", "--help").out
    status, out, _ = command("data", "webshop", "--help")
    assert status == 0
    assert all(word in out for word in ("--size", "small", "full", "--from", "--force"))


def test_files_at_hand_are_placed_and_prepared_and_then_found(
    command: Command, at_hand: Path, tmp_path: Path
) -> None:
    status, out, err = command("data", "webshop", "--from", at_hand)
    assert status == 0, err
    folder = tmp_path / "data" / "webshop" / "small"
    assert f"30 products of {folder}" in out
    assert "read products (%): 100/100" in out
    assert WebShopEnvironment().catalog.num_products == 30  # `auto` finds it
    assert "is there already" in command("data", "webshop").out


def test_a_generated_catalogue_is_prepared_ahead(command: Command, tmp_path: Path) -> None:
    status, out, err = command("data", "webshop", "--generated", 40)
    assert status == 0, err
    assert "40 products of generated:40" in out
    assert (tmp_path / "data" / "webshop" / "prepared").is_dir()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--generated", 5, "--from", "."],
        ["--generated", 5, "--force"],
        ["--generated", 5, "--size", "full"],
    ],
)
def test_generated_goes_with_nothing_else(arguments: list, command: Command) -> None:
    status, _, err = command("data", "webshop", *arguments)
    assert status == 2
    assert "--generated goes with none of --size, --from and --force" in err


def test_what_goes_wrong_is_one_message(
    command: Command, at_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = command("data", "webshop", "--size", "full", "--from", at_hand)
    assert status == 2
    assert err.startswith("error: --from ")
    assert "expected the files of --size full" in err
    assert command("data", "webshop", "--size", "medium")[0] != 0

    def no_network(*_: object, **__: object) -> None:
        raise FetchError("Name or service not known")

    monkeypatch.setattr(download, "fetch", no_network)
    status, _, err = command("data", "webshop")
    assert status == 2
    assert "cannot be fetched from https://drive.google.com/" in err
    assert "Name or service not known" in err
    assert "--from" in err
