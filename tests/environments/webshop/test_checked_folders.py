"""Prepared catalogues whose files were damaged are noticed and made anew."""

import os
import shutil
from pathlib import Path

import pytest

from ragen_apo.environments.webshop import checked_folders
from ragen_apo.environments.webshop.generated import generated_name
from ragen_apo.environments.webshop.store import open_catalog
from ragen_apo.progress import SilentProgress


class ToldProgress(SilentProgress):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, phase: str, total: int) -> None:
        self.told.append(phase)

    def say(self, text: str) -> None:
        self.told.append(text)


PREPARED = [
    "asins.npy", "catalog.json", "checksums.json", "counts.npy", "documents.npy", "human_ends.npy",
    "human_order.npy", "human_products.npy", "index.json", "length_bytes.npy", "max_scores.npy",
    "offsets.npy", "price_ends.npy", "product_of_document.npy", "record_ends.npy", "records.bin",
    "scores.npy", "synthetic_ends.npy", "synthetic_order.npy", "synthetic_products.npy",
    "term_bytes.npy", "term_ends.npy", "term_rows.npy",
]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    del files["checksums.json"]  # has the times as well
    return files


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which a catalogue of five products is prepared."""
    root = tmp_path_factory.mktemp("prepared")
    folder = open_catalog("generated:5", store=root).folder
    assert sorted(path.name for path in folder.iterdir()) == PREPARED
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.parametrize("damage", ["a flipped bit", "cut", "missing", "a folder"])
def test_a_damaged_prepared_catalogue_is_noticed_and_built_again(
    name: str, damage: str, prepared: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(prepared.parent, store)
    folder = store / prepared.name
    path, before = folder / name, contents(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "a flipped bit":
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    if damage == "a folder":
        path.mkdir()
    progress = ToldProgress()
    assert open_catalog("generated:5", store=store, progress=progress).num_products == 5
    assert contents(folder) == before
    assert f"{folder} is damaged (" in progress.told[0]
    assert not list(store.glob("*.partial-*"))


def test_what_a_killed_preparation_left_goes_with_the_next(prepared: Path, tmp_path: Path) -> None:
    left = tmp_path / f"{prepared.name}.partial-0123abcd"
    left.mkdir()
    (left / "records.bin").touch()
    open_catalog("generated:5", store=tmp_path)
    assert (tmp_path / prepared.name).is_dir()
    assert not left.exists()


def test_an_undamaged_prepared_catalogue_is_not_built_again(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared.parent, tmp_path / "store")
    progress = ToldProgress()
    open_catalog("generated:5", store=tmp_path / "store", progress=progress)
    assert progress.told == []


def test_damaged_generated_files_are_made_anew_and_no_other_catalogue(
    prepared: Path, tmp_path: Path
) -> None:
    shutil.copytree(prepared.parent, tmp_path / "store")
    items = tmp_path / "store" / generated_name(5) / "items_shuffle.json"
    content = items.read_bytes()
    items.write_bytes(content.replace(b"a", b"e", 1))
    catalog = open_catalog("generated:5", store=tmp_path / "store")
    assert catalog.folder.name == prepared.name
    assert items.read_bytes() == content


def test_a_large_file_is_hashed_again_only_where_its_time_has_changed(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_folders, "TRUSTED_BYTES", 0)
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)  # keeps times
    records = folder / "records.bin"
    status, content = records.stat(), bytearray(records.read_bytes())
    content[0] ^= 1
    records.write_bytes(content)
    assert checked_folders.damage_of(folder) == "records.bin is not what was written"
    os.utime(records, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert checked_folders.damage_of(folder) == ""


def test_a_file_in_the_place_of_a_prepared_folder_is_replaced(
    prepared: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(prepared.parent, store)
    shutil.rmtree(store / prepared.name)
    (store / prepared.name).write_text("")
    assert open_catalog("generated:5", store=store).num_products == 5
    assert not list(store.glob("*.partial-*"))
