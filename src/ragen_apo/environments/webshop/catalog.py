"""The products of a shop: upstream's files in, an immutable catalogue on disk out.

`read_products` consumes upstream's three files (see docs/webshop.md) by upstream's loading rules
and yields `Product` records; `Catalog` opens a prepared folder (store.py) in which they lie
memory-mapped beside the search index, so any number of environments and processes share one copy.
"""

import functools
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from ragen_apo.environments.webshop.search import SearchIndex
from ragen_apo.errors import EnvironmentDataError

MAX_ASIN_LENGTH = 10
DEFAULT_PRICE = 100.0
NO_ATTRIBUTES: Final = ("DUMMY_ATTR",)
READ_CHARACTERS = 1 << 20
MAX_RECORD_CHARACTERS = 1 << 26
"""A product's record is far smaller; a file that seems to have a larger one is malformed."""
PRODUCT_CACHE_SIZE = 4096
QUERY_CACHE_SIZE = 4096
MAX_CACHED_QUERY_LENGTH = 512
"""Longer queries are answered without the cache, so that hostile ones cannot fill the memory."""


@dataclass(frozen=True)
class HumanInstruction:
    """What a person wrote for a product, and the parts of it that the reward counts."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


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
    human_instructions: tuple[HumanInstruction, ...]

    @property
    def document(self) -> str:
        """The text under which the product is found."""
        options = ", and ".join(
            f"{name}: {', '.join(values)}" for name, values in self.options.items()
        )
        bullet = self.bullet_points[0] if self.bullet_points else ""
        return " ".join([self.title, self.description, bullet, options]).lower()


def parse_prices(pricing: str | None) -> tuple[tuple[float, ...], str]:
    """The first two numbers after a `$` and the tag that pages show; without a number 100.0."""
    prices: list[float] = []
    for part in (pricing or "").split("$")[1:]:
        try:
            prices.append(float(re.sub(r"[^\d.]", "", part)))
        except ValueError:
            continue
    if not prices:
        prices = [DEFAULT_PRICE]
    tag = f"${prices[0]}" if len(prices) == 1 else f"${prices[0]} to ${prices[1]}"
    return tuple(prices[:2]), tag


def parse_options(customization: Any) -> dict[str, tuple[str, ...]]:
    """Option names and values, lower-cased, `/` spelled ` | `, in the file's order."""
    options: dict[str, tuple[str, ...]] = {}
    for name, contents in (customization or {}).items():
        if contents is not None:
            options[name.lower()] = tuple(
                content["value"].strip().replace("/", " | ").lower() for content in contents
            )
    return options


def parse_product(
    record: Mapping[str, Any], labels: Mapping[str, Any], human: tuple[HumanInstruction, ...]
) -> Product:
    """One product from its record in the three files."""
    prices, tag = parse_prices(record.get("pricing"))
    bullets = record.get("small_description") or ""
    return Product(
        asin=record["asin"],
        title=record["name"] or "",
        description=record.get("full_description") or "",
        bullet_points=tuple(bullet or "" for bullet in bullets)
        if isinstance(bullets, list)
        else (bullets,),
        prices=prices,
        price_tag=tag,
        options=parse_options(record.get("customization_options")),
        category=record["category"] or "",
        query=record["query"].lower().strip(),
        product_category=record["product_category"] or "",
        attributes=tuple(labels.get("attributes", NO_ATTRIBUTES)),
        instruction=labels.get("instruction"),
        instruction_attributes=tuple(labels.get("instruction_attributes") or ()),
        human_instructions=human,
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
    return DataFiles(items[0], attributes[0], human if human.exists() else None)


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentDataError(
            f"{path} cannot be read: {error}; expected a JSON file of WebShop; get it anew"
        ) from error


def _human_instructions(records: list[Mapping[str, Any]]) -> tuple[HumanInstruction, ...]:
    return tuple(
        HumanInstruction(
            text=record["instruction"],
            attributes=tuple(record["instruction_attributes"]),
            options=tuple(record["instruction_options"]),
        )
        for record in records
    )


def stream_json_array(path: Path) -> Iterator[tuple[Any, float]]:
    """The values of a JSON array one by one, each with the share of the file read so far.

    Raises ValueError for what is no JSON array.
    """
    decoder = json.JSONDecoder()
    size = max(path.stat().st_size, 1)
    buffer, position, opened = "", 0, False
    with path.open("rb") as file, io.TextIOWrapper(file, encoding="utf-8") as stream:
        while True:
            position = _skip_separators(buffer, position)
            following = buffer[position : position + 1]
            if following and not opened:
                if following != "[":
                    raise ValueError(f"expected [ at its beginning, got {following!r}")
                opened, position = True, position + 1
                continue
            if following == "]":
                return
            try:
                value, end = decoder.raw_decode(buffer, position)
            except json.JSONDecodeError:
                value, end = None, len(buffer)
                if len(buffer) - position > MAX_RECORD_CHARACTERS:
                    raise
            if end < len(buffer):
                yield value, file.tell() / size
                position = end
            else:  # A value that ends with what was read may go on.
                buffer, position = buffer[position:] + _read_more(stream), 0


def _read_more(stream: TextIO) -> str:
    more = stream.read(READ_CHARACTERS)
    if not more:
        raise ValueError("the array has no end")
    return more


def _skip_separators(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def read_products(files: DataFiles) -> Iterator[tuple[Product, float]]:
    """The products of the files in order, without unnamed, misnamed and repeated ones.

    Each comes with the share of the items file that is read.
    """
    attributes = _load_json(files.attributes)
    human = _load_json(files.human) if files.human else {}
    seen: set[str] = set()
    record: Any = None
    try:
        for record, share in stream_json_array(files.items):
            asin = record["asin"]
            if asin == "nan" or len(asin) > MAX_ASIN_LENGTH or asin in seen:
                continue
            seen.add(asin)
            written = _human_instructions(human.get(asin, []))
            yield parse_product(record, attributes.get(asin, {}), written), share
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise EnvironmentDataError(
            f"{files.items} is malformed at or after {str(record)[:200]!r} "
            f"({type(error).__name__}: {error}); expected upstream's JSON list (docs/webshop.md)"
        ) from error


def product_to_json(product: Product) -> list[Any]:
    """The product as a JSON list; `product_from_json` is its inverse."""
    human = [[h.text, h.attributes, h.options] for h in product.human_instructions]
    values = [getattr(product, name) for name in Product.__dataclass_fields__]
    return [*values[:-1], human]


def product_from_json(values: list[Any]) -> Product:
    """The inverse of `product_to_json`."""
    fields = dict(zip(Product.__dataclass_fields__, values, strict=True))
    for name in ("bullet_points", "prices", "attributes", "instruction_attributes"):
        fields[name] = tuple(fields[name])
    fields["options"] = {name: tuple(options) for name, options in fields["options"].items()}
    fields["human_instructions"] = tuple(
        HumanInstruction(text, tuple(attributes), tuple(options))
        for text, attributes, options in fields["human_instructions"]
    )
    return Product(**fields)


class Catalog:
    """A prepared folder, opened: products by number, search, prices. Immutable, shared, not
    pickled.

    A product's number is its place in upstream's file; a document's number is the rank of its asin.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "catalog.json").read_text(encoding="utf-8"))
        self.fingerprint: str = facts["fingerprint"]
        self.num_products: int = facts["num_products"]
        self.index = SearchIndex(folder)
        self.price_ends = np.load(folder / "price_ends.npy", mmap_mode="r")
        """[num_products, 2] float64; the second end is NaN where there is one price."""
        self.instructed = np.load(folder / "instructed.npy", mmap_mode="r")
        """Numbers of the products with an instruction for synthetic goals."""
        self.with_human = np.load(folder / "with_human.npy", mmap_mode="r")
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
        return product_from_json(json.loads(self._records[start:end].tobytes()))

    def _search(self, query: str) -> tuple[int, ...]:
        return tuple(self._product_of_document[self.index.search(query)].tolist())

    def number_of(self, asin: str) -> int:
        """The number of a product by its asin; raises EnvironmentDataError for an unknown one."""
        wanted = np.bytes_(asin.encode("utf-8"))
        place = int(np.searchsorted(self._asins, wanted))
        if place == len(self._asins) or self._asins[place] != wanted:
            raise EnvironmentDataError(
                f"no product {asin!r} in the catalogue {self.folder} of {self.num_products} "
                "products; "
                "the task belongs to other data: make it with this environment's tasks()"
            )
        return int(self._product_of_document[place])

    def products(self) -> Iterator[Product]:
        """All products in upstream's order."""
        return map(self._read_product, range(self.num_products))
