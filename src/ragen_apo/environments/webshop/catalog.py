"""The products of a shop: upstream's files in, an immutable catalogue on disk out.

`read_products` consumes upstream's three files (see docs/webshop.md) by upstream's loading rules
and yields `Product` records. `Catalog` opens a prepared folder (store.py), in which the products
are memory-mapped beside the search index. So any number of environments and processes share one
copy.
"""

import contextlib
import functools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from ragen_apo.environments.webshop.json_streams import stream_json_array, stream_json_object
from ragen_apo.environments.webshop.records import (
    HumanRecord,
    HumanRecords,
    ItemRecord,
    LabelRecord,
    OptionValue,
    check_record,
    malformed,
    shown,
)
from ragen_apo.environments.webshop.search import SearchIndex
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.files import parse_json
from ragen_apo.plural import counted
from ragen_apo.progress import Progress, SilentProgress

_T = TypeVar("_T")

MAX_ASIN_LENGTH = 10
DEFAULT_PRICE = 100.0
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
PROGRESS_EVERY = 1000
PRODUCT_CACHE_SIZE = 4096
QUERY_CACHE_SIZE = 4096
MAX_CACHED_QUERY_LENGTH = 512
"""Longer queries are answered without the cache, so that hostile ones cannot fill the memory."""


@dataclass(frozen=True)
class Product:
    """One product as the shop shows it and the reward judges it."""

    asin: str
    title: str
    description: str
    bullet_points: tuple[str, ...]
    prices: tuple[float, ...]
    """One price, or the two ends from which the price is drawn."""
    price_tag: str
    options: Mapping[str, tuple[str, ...]]
    category: str
    query: str
    product_category: str
    attributes: tuple[str, ...]
    instruction: str | None
    instruction_attributes: tuple[str, ...]
    human_instructions: tuple[HumanRecord, ...]
    """What people wrote for it, and the parts of that which the reward counts."""

    @property
    def document(self) -> str:
        """The text under which the product is found."""
        options = ", and ".join(
            f"{name}: {', '.join(values)}" for name, values in self.options.items()
        )
        bullet = self.bullet_points[0] if self.bullet_points else ""
        return " ".join([self.title, self.description, bullet, options]).lower()


def parse_prices(pricing: str | None) -> tuple[tuple[float, ...], str]:
    """The first number after each `$`, two at most, and the tag that pages show; or 100.0."""
    numbers = [_NUMBER.search(part.replace(",", "")) for part in (pricing or "").split("$")[1:]]
    prices = [float(number[0]) for number in numbers if number] or [DEFAULT_PRICE]
    tag = f"${prices[0]}" if len(prices) == 1 else f"${prices[0]} to ${prices[1]}"
    return tuple(prices[:2]), tag


def parse_options(
    customization: Mapping[str, Sequence[OptionValue] | None],
) -> dict[str, tuple[str, ...]]:
    """Option names and values, lower-cased, `/` spelled ` | `, in the file's order."""
    return {
        name.lower(): tuple(each.value.strip().replace("/", " | ").lower() for each in values)
        for name, values in customization.items()
        if values is not None
    }


def _product(record: ItemRecord, labels: LabelRecord, human: Sequence[HumanRecord]) -> Product:
    """One product from its record in the three files."""
    prices, tag = parse_prices(record.pricing)
    return Product(
        asin=record.asin,
        title=record.name or "",
        description=record.full_description or "",
        bullet_points=tuple(bullet or "" for bullet in record.small_description),
        prices=prices,
        price_tag=tag,
        options=parse_options(record.customization_options),
        category=record.category or "",
        query=record.query.lower().strip(),
        product_category=record.product_category or "",
        attributes=tuple(labels.attributes),
        instruction=labels.instruction,
        instruction_attributes=tuple(labels.instruction_attributes or ()),
        human_instructions=tuple(human),
    )


@dataclass(frozen=True)
class DataFiles:
    """Where upstream's files of one catalogue lie."""

    items: Path
    attributes: Path
    human: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that exist, in a fixed order."""
        return (self.items, self.attributes) + ((self.human,) if self.human else ())


def find_data_files(folder: Path) -> DataFiles:
    """The files of a folder by upstream's names: `items_shuffle<size>.json` and its companions."""
    items = sorted(folder.glob("items_shuffle*.json"))
    attributes = [path.with_name(path.name.replace("shuffle", "ins_v2")) for path in items]
    if len(items) != 1 or not attributes[0].exists():
        found = (
            sorted(path.name for path in folder.glob("*.json")) if folder.is_dir() else "no folder"
        )
        raise EnvironmentDataError(
            f"no single WebShop catalogue in {folder}: found {found}, expected one "
            "items_shuffle<size>.json with its items_ins_v2<size>.json; get them with "
            "`ragen-apo data webshop` or name another folder"
        )
    human = folder / "items_human_ins.json"
    files = DataFiles(items[0], attributes[0], human if human.exists() else None)
    for path in files.paths:
        if not path.is_file():  # a pipe would be waited for, a device has no end
            raise EnvironmentDataError(
                f"{path} is no regular file; expected a JSON file of WebShop"
            )
    return files


def _human_records(path: Path) -> Mapping[str, Sequence[HumanRecord]]:
    """What people wrote about each product, by asin."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise malformed(path, f"expected a JSON file of WebShop; {error}") from error
    return check_record(HumanRecords, content, path=path, location="its content").root


def _numbered(
    values: Iterator[tuple[_T, float]], path: Path, phase: str, progress: Progress
) -> Iterator[tuple[int, _T]]:
    """The records of a streamed file with their numbers from 1, and how far it is read told."""
    number = 0
    progress.start(phase, 100)
    try:
        for number, (value, share) in enumerate(values, 1):
            yield number, value
            if number % PROGRESS_EVERY == 0:
                progress.update(int(100 * share), counted(number, "product"))
    except ValueError as error:
        raise malformed(path, f"behind record {number}: {error}") from error
    progress.update(100, counted(number, "product"))


@contextlib.contextmanager
def _labels(
    path: Path, scratch: Path | None, progress: Progress
) -> Iterator[Callable[[str], LabelRecord]]:
    """What the attributes file has by asin, kept on disk: memory holds the offsets alone."""
    offsets: dict[str, int] = {}
    with tempfile.TemporaryFile(dir=scratch) as file:
        records = _numbered(stream_json_object(path), path, "read attributes (%)", progress)
        for number, (asin, value) in records:
            location = f"record {number} ({shown(asin)})"
            if not isinstance(asin, str):
                raise malformed(path, f"{location} has no text as its key")
            record = check_record(LabelRecord, value, path=path, location=location)
            if len(asin) <= MAX_ASIN_LENGTH:
                offsets[asin] = file.tell()
                file.write(record.model_dump_json().encode() + b"\n")

        def labels_of(asin: str) -> LabelRecord:
            if asin not in offsets:
                return LabelRecord()
            file.seek(offsets[asin])
            return LabelRecord.model_validate_json(file.readline())

        yield labels_of


def read_products(
    files: DataFiles, *, scratch: Path | None = None, progress: Progress | None = None
) -> Iterator[Product]:
    """The products of the files in order, without unnamed, misnamed and repeated ones.

    The attributes are copied to a temporary file in `scratch`.
    """
    progress = progress or SilentProgress()
    human = _human_records(files.human) if files.human else {}
    seen: set[str] = set()
    with _labels(files.attributes, scratch, progress) as labels_of:
        values = stream_json_array(files.items)
        for number, record in _numbered(values, files.items, "read products (%)", progress):
            asin: Any = record.get("asin", "") if isinstance(record, dict) else ""
            if isinstance(asin, str) and (
                asin == "nan" or len(asin) > MAX_ASIN_LENGTH or asin in seen
            ):
                continue
            location = f"record {number}" + (f" ({shown(asin)})" if asin else "")
            checked = check_record(ItemRecord, record, path=files.items, location=location)
            product = _product(checked, labels_of(asin), human.get(asin, ()))
            if not all(map(math.isfinite, product.prices)):
                pricing = shown(checked.pricing)
                raise malformed(
                    files.items, f"{location}, field 'pricing': got {pricing}, expected a price"
                )
            seen.add(asin)
            yield product


PRODUCT = TypeAdapter(Product)
"""Writes a product as JSON, and reads it again."""


@dataclass(frozen=True)
class GoalIndex:
    """The goals of one kind, counted when the catalogue was prepared."""

    products: npt.NDArray[np.int32]
    """Numbers of the products that draw price limits, in upstream's order."""
    ends: npt.NDArray[np.int64]
    """Product i of `products` has the goals ends[i] to ends[i + 1], in the order of drawing."""
    order: npt.NDArray[np.integer]
    """order[n] is the goal that is number n after upstream's shuffle."""


class Catalog:
    """A prepared folder, opened: products by number, search, prices. Immutable and shared.

    A product's number is its index in upstream's file; a document's number is the rank of its asin.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "catalog.json").read_text(encoding="utf-8"))
        self.shared: dict[object, Any] = {}
        """What is derived from the catalogue and shared with it: views, prices and goals."""
        self.fingerprint: str = facts["fingerprint"]
        self.num_products: int = facts["num_products"]
        self.index = SearchIndex(folder)
        self.price_ends = np.load(folder / "price_ends.npy", mmap_mode="r")
        """[num_products, 2] float64; the second end is NaN where there is one price."""
        self._asins = np.load(folder / "asins.npy", mmap_mode="r")
        self._product_of_document = np.load(folder / "product_of_document.npy", mmap_mode="r")
        self._record_ends = np.load(folder / "record_ends.npy", mmap_mode="r")
        self._records = np.memmap(folder / "records.bin", dtype=np.uint8, mode="r")
        self.product: Callable[[int], Product] = functools.lru_cache(PRODUCT_CACHE_SIZE)(
            self._read_product
        )
        """The product of a number."""
        self._search_cached = functools.lru_cache(QUERY_CACHE_SIZE)(self._search)

    def search(self, query: str) -> tuple[int, ...]:
        """The numbers of the at most 50 products found for a lower-cased query, best first."""
        if len(query) > MAX_CACHED_QUERY_LENGTH:
            return self._search(query)
        return self._search_cached(query)

    def _read_product(self, number: int) -> Product:
        start, end = self._record_ends[number : number + 2]
        return PRODUCT.validate_json(self._records[start:end].tobytes())

    def _search(self, query: str) -> tuple[int, ...]:
        return tuple(self._product_of_document[self.index.search(query)].tolist())

    def number_of(self, asin: str) -> int:
        """The number of a product by its asin; raises EnvironmentDataError for an unknown one."""
        wanted = np.bytes_(asin.encode("utf-8"))
        index = int(np.searchsorted(self._asins, wanted))
        if index == len(self._asins) or self._asins[index] != wanted:
            raise EnvironmentDataError(
                f"no product {asin!r} in the catalogue {self.folder} of {self.num_products} "
                "products; "
                "the task belongs to other data: make it with this environment's tasks()"
            )
        return int(self._product_of_document[index])

    def goal_index(self, kind: str) -> GoalIndex:
        """Where the goals of a kind (`synthetic`, `human`) come from."""
        parts = ("products", "ends", "order")
        files = (self.folder / f"{kind}_{part}.npy" for part in parts)
        return GoalIndex(*(np.load(path, mmap_mode="r") for path in files))

    @functools.cached_property
    def asins(self) -> npt.NDArray[np.bytes_]:
        """The ids of the products by number."""
        asins = np.empty_like(self._asins)
        asins[self._product_of_document] = self._asins
        return asins
