"""Prepared catalogues: built once from upstream's files, stored whole, opened by mapping.

`open_catalog` consumes a data folder, `generated[:products]` or `auto`, and gives a `Catalog`. A
prepared folder is named by a hash of the data's content and of the format, so other data never
meets an old index. Builders write beside the place and rename; of two that finish together the
first stays. Opened catalogues are kept weakly: all environments of a process share one.

The folder is `$RAGEN_APO_DATA/webshop/prepared/<hash>`, or lies under the user's data folder.
"""

import hashlib
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from ragen_apo.environments.webshop.catalog import (
    Catalog,
    DataFiles,
    Product,
    find_data_files,
    product_to_json,
    read_products,
)
from ragen_apo.environments.webshop.generated import generated_name, write_generated_files
from ragen_apo.environments.webshop.search import INDEX_FORMAT, IndexBuilder
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.files import PARTIAL_MARK, sync_to_disk

STORE_FORMAT = 1
AUTO: Final = "auto"
GENERATED: Final = "generated"
SIZES: Final = ("small", "full")
HASH_STAMP_BYTES = 1 << 26
"""Larger data files are hashed once; later starts trust their size and time of change."""

Progress = Callable[[int, int], None]
"""Told how many of how many products are done."""

_OPEN_CATALOGS: "weakref.WeakValueDictionary[Path, Catalog]" = weakref.WeakValueDictionary()


def data_root() -> Path:
    """The folder for data of this package: `$RAGEN_APO_DATA` or the user's data folder."""
    chosen = os.environ.get("RAGEN_APO_DATA")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "ragen-apo"


def real_data_folder(size: str) -> Path:
    """Where the downloaded files of a size (`small`, `full`) lie."""
    return data_root() / "webshop" / size


def resolve_data(data: str) -> str:
    """What `auto` stands for: the downloaded small data, else the full, else the generated."""
    if data != AUTO:
        return data
    present = (real_data_folder(size) for size in SIZES)
    return next((str(folder) for folder in present if folder.is_dir()), GENERATED)


def open_catalog(
    data: str, *, store: Path | None = None, progress: Progress | None = None
) -> Catalog:
    """The catalogue of a data folder, `generated[:products]` or `auto`, prepared where necessary.

    Raises EnvironmentDataError for missing or malformed data or a store that cannot be written.
    """
    data = resolve_data(data)
    root = store or data_root() / "webshop" / "prepared"
    try:
        root.mkdir(parents=True, exist_ok=True)
        files = _generated_files(data, root) if _is_generated(data) else find_data_files(Path(data))
        fingerprint = fingerprint_files(files.paths, stamps=root)
        folder = (root / fingerprint).resolve()
        if not (folder / "catalog.json").exists():
            _prepare(files, folder, fingerprint, progress)
    except OSError as error:
        raise EnvironmentDataError(
            f"the WebShop catalogue cannot be prepared in {root}: {error}; expected a folder that "
            "can be written; set RAGEN_APO_DATA or the option `store`"
        ) from error
    return open_prepared(folder)


def open_prepared(folder: Path) -> Catalog:
    """The catalogue of a prepared folder; one object for all that ask in this process."""
    catalog = _OPEN_CATALOGS.get(folder)
    if catalog is None:
        try:
            catalog = Catalog(folder)
        except (OSError, ValueError, KeyError) as error:
            raise EnvironmentDataError(
                f"the prepared catalogue {folder} cannot be opened: {error}; remove it, it is "
                "built again from the data"
            ) from error
        _OPEN_CATALOGS[folder] = catalog
    return catalog


def _is_generated(data: str) -> bool:
    return data.split(":", maxsplit=1)[0] == GENERATED


def _generated_files(data: str, root: Path) -> DataFiles:
    """Writes the generated catalogue in upstream's format, unless it is there."""
    _, _, size = data.partition(":")
    if size and not (size.isascii() and size.isdigit() and int(size) > 0):
        raise EnvironmentDataError(
            f"data {data!r}: got the size {size!r}, expected generated:<number of products>"
        )
    num_products = int(size or 1000)
    folder = root / generated_name(num_products)
    if not folder.exists():
        _write_first(folder, lambda partial: write_generated_files(partial, num_products))
    return find_data_files(folder)


def fingerprint_files(paths: Iterable[Path], *, stamps: Path) -> str:
    """A hash of the files' content and of the prepared format."""
    digest = hashlib.sha256(f"webshop store {STORE_FORMAT} index {INDEX_FORMAT}".encode())
    for path in paths:
        digest.update(_file_hash(path, stamps).encode())
    return digest.hexdigest()[:16]


def _file_hash(path: Path, stamps: Path) -> str:
    facts = path.stat()
    if facts.st_size < HASH_STAMP_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    key = f"{path.resolve()}|{facts.st_size}|{facts.st_mtime_ns}"
    stamp = stamps / f"stamp-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if stamp.exists():
        return stamp.read_text(encoding="utf-8")
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    partial = stamp.with_name(f"{stamp.name}{PARTIAL_MARK}{uuid.uuid4().hex[:8]}")
    partial.write_text(digest.hexdigest(), encoding="utf-8")
    partial.replace(stamp)
    return digest.hexdigest()


def _write_first(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a fresh folder and renames it to `folder`, unless another was faster."""
    partial = folder.with_name(f"{folder.name}{PARTIAL_MARK}{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        write(partial)
        for path in sorted(partial.iterdir()):
            sync_to_disk(path)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _prepare(files: DataFiles, folder: Path, fingerprint: str, progress: Progress | None) -> None:
    products = list(read_products(files))
    if not products:
        raise EnvironmentDataError(f"{files.items} holds no product; expected at least one")

    def write(partial: Path) -> None:
        _write_products(partial, products, progress)
        facts = {"fingerprint": fingerprint, "num_products": len(products)}
        (partial / "catalog.json").write_text(json.dumps(facts), encoding="utf-8")

    _write_first(folder, write)


def _write_products(folder: Path, products: list[Product], progress: Progress | None) -> None:
    """Writes records, prices, goal lists and the search index of the products."""
    order = sorted(range(len(products)), key=lambda number: products[number].asin.encode())
    rank = {number: document for document, number in enumerate(order)}
    builder = IndexBuilder(folder, num_documents=len(products))
    records = bytearray()
    ends = [0]
    price_ends = np.full((len(products), 2), np.nan)
    for number, product in enumerate(products):
        builder.add(rank[number], product.document)
        records += json.dumps(product_to_json(product), separators=(",", ":")).encode()
        ends.append(len(records))
        price_ends[number, : len(product.prices)] = product.prices
        if progress is not None:
            progress(number + 1, len(products))
    builder.finish()
    instructed = [n for n, product in enumerate(products) if product.instruction is not None]
    with_human = [n for n, product in enumerate(products) if product.human_instructions]
    arrays = {
        "records": np.frombuffer(records, np.uint8),
        "record_ends": np.array(ends, np.int64),
        "price_ends": price_ends,
        "instructed": np.array(instructed, np.int32),
        "with_human": np.array(with_human, np.int32),
        "asins": np.array([products[number].asin.encode() for number in order]),
        "product_of_document": np.array(order, np.int32),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
