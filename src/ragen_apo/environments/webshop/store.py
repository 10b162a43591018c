"""Prepared catalogues: built once from upstream's files, stored whole, opened by mapping.

`open_catalog` consumes a data folder, `generated[:products]` or `auto`, and gives a `Catalog`. A
prepared folder is named by a hash of the data's content and the format, so other data never meets
an old index. It has a list of checksums (checked_folders.py): one that was damaged is built again
when it is opened. Opened catalogues are kept weakly: all environments of a process share one.

The folder is `$RAGEN_APO_DATA/webshop/prepared/<hash>`, or lies under the user's data folder.
"""

import contextlib
import functools
import hashlib
import json
import os
import weakref
from array import array
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
from platformdirs import user_data_path

from ragen_apo.environments.webshop.catalog import (
    PRODUCT,
    Catalog,
    DataFiles,
    find_data_files,
    read_products,
)
from ragen_apo.environments.webshop.checked_folders import provide_folder
from ragen_apo.environments.webshop.generated import generated_name, write_generated_files
from ragen_apo.environments.webshop.goals import GoalKind, count_goals, shuffled_order
from ragen_apo.environments.webshop.index_builder import INDEX_FORMAT, IndexBuilder
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.files import sha256_of_file, write_text_atomically
from ragen_apo.progress import Progress, SilentProgress

STORE_FORMAT = 6
CONTENT_SALT: Final = "webshop store 3 index 1"
"""Part of every fingerprint, and so of every environment's version. Change it when the same files
give other products, goals or results; a new format alone leaves stored returns valid."""
AUTO: Final = "auto"
GENERATED: Final = "generated"
MAX_GOALS = 100_000_000
"""Each has a number in memory when goals are shuffled."""
NUM_GENERATED = 1000
MAX_GENERATED = 10_000_000
SIZES: Final = ("small", "full")
HASH_STAMP_BYTES = 1 << 26
"""Larger data files are hashed once; later starts trust their size and time of change."""

_OPEN_CATALOGS: "weakref.WeakValueDictionary[Path, Catalog]" = weakref.WeakValueDictionary()


def data_root() -> Path:
    """The folder for data of this package: `$RAGEN_APO_DATA` or the user's data folder.

    Raises EnvironmentDataError for a user without a home directory, as in a container that has no
    such user.
    """
    if chosen := os.environ.get("RAGEN_APO_DATA"):
        return Path(chosen)
    with contextlib.suppress(RuntimeError):
        # Some versions raise, others name a folder `~` in the current directory.
        if (folder := user_data_path("ragen-apo", appauthor=False)).is_absolute():
            return folder
    raise EnvironmentDataError(
        "there is no folder for data: this user has no home directory (HOME). Set RAGEN_APO_DATA "
        "to a folder that can be written"
    )


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
    progress = progress or SilentProgress()
    data = resolve_data(data)
    root = store or data_root() / "webshop" / "prepared"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if is_generated(data):
            data = str(_generated_folder(data, root, progress))
        files = find_data_files(Path(data))
        content = CONTENT_SALT + "".join(_file_hash(path, root) for path in files.paths)
        fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        folder = (root / f"{fingerprint}-{STORE_FORMAT}.{INDEX_FORMAT}").resolve()
        if folder not in _OPEN_CATALOGS:
            write = functools.partial(_write_catalog, files, fingerprint, progress)
            provide_folder(folder, write, progress=progress)
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


def is_generated(data: str) -> bool:
    """Whether this stands for a generated catalogue, of whatever size."""
    return data.split(":", maxsplit=1)[0] == GENERATED


def _generated_folder(data: str, root: Path, progress: Progress) -> Path:
    """The folder of a generated catalogue in upstream's format, written unless it is there."""
    _, _, size = data.partition(":")
    num_products = int(size) if size.isascii() and size.isdigit() and len(size) < 10 else 0
    if data == GENERATED:
        num_products = NUM_GENERATED
    if not 1 <= num_products <= MAX_GENERATED:
        raise EnvironmentDataError(
            f"data {data[:60]!r}: expected generated:<number of products>, a whole number at least "
            f"1 and at most {MAX_GENERATED:,}"
        )
    folder = root / generated_name(num_products)
    write = functools.partial(write_generated_files, num_products=num_products, progress=progress)
    provide_folder(folder, write, progress=progress)
    return folder


def _file_hash(path: Path, stamps: Path) -> str:
    """The SHA-256 of a file's content; that of a large file is kept in the folder `stamps`."""
    facts = path.stat()
    if facts.st_size < HASH_STAMP_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    key = f"{path.resolve()}|{facts.st_size}|{facts.st_mtime_ns}"
    stamp = stamps / f"stamp-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not stamp.exists():
        write_text_atomically(stamp, sha256_of_file(path))
    return stamp.read_text(encoding="ascii")


def _write_catalog(files: DataFiles, fingerprint: str, progress: Progress, folder: Path) -> None:
    """Writes records, prices, goal counts and the search index, product by product."""
    builder = IndexBuilder(folder, progress=progress)
    asins: list[bytes] = []
    ends, price_ends = array("q", [0]), array("d")
    num_goals = {kind: array("q") for kind in GoalKind}  # of each product; -1: it draws no limit
    total: Counter[GoalKind] = Counter()
    with (folder / "records.bin").open("wb") as records:
        products = read_products(files, scratch=folder, progress=progress)
        for product in products:
            builder.add(product.document)
            data = PRODUCT.dump_json(product)
            records.write(data)
            ends.append(ends[-1] + len(data))
            asins.append(product.asin.encode())
            price_ends.extend((*product.prices, float("nan"))[:2])
            for kind, counts in num_goals.items():
                count = count_goals(product, kind)
                total[kind] += count or 0
                if total[kind] > MAX_GOALS:
                    raise EnvironmentDataError(
                        f"{files.items}: with product {product.asin} there are more than "
                        f"{MAX_GOALS:,} goals, one for each combination of its options; expected "
                        "fewer: take options or products out"
                    )
                counts.append(-1 if count is None else count)
    if not asins:
        raise EnvironmentDataError(f"{files.items} holds no product; expected at least one")
    order = np.array(sorted(range(len(asins)), key=asins.__getitem__), dtype=np.int32)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    builder.finish(ranks)
    arrays = {
        "record_ends": np.array(ends, np.int64),
        "price_ends": np.array(price_ends, np.float64).reshape(-1, 2),
        "asins": np.array([asins[number] for number in order]),
        "product_of_document": order,
    }
    progress.start("shuffle goals", len(num_goals))
    for num_done, (kind, counts) in enumerate(num_goals.items(), 1):
        of_product = np.array(counts, np.int64)
        drawing = np.flatnonzero(of_product >= 0)
        arrays |= {
            f"{kind.value}_products": drawing.astype(np.int32),
            f"{kind.value}_ends": np.append(0, np.cumsum(of_product[drawing])),
            f"{kind.value}_order": shuffled_order(total[kind]),
        }
        progress.update(num_done)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values, allow_pickle=False)
    facts = {"fingerprint": fingerprint, "num_products": len(asins)}
    (folder / "catalog.json").write_text(json.dumps(facts), encoding="utf-8")
