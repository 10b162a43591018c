"""The shop's products: an immutable catalogue read once per file and shared by all instances.

A catalogue file is JSON: `{"name": text, "products": [{"id", "title", "category", "price",
"attributes", "split"}, ...]}`. Loading refuses anything else with an `EnvironmentDataError`.
`python -m benchmarks.make_catalogue` wrote the built-in one.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragen_apo.config.messages import describe_problems
from ragen_apo.environments.shop.search import SearchIndex, normalise
from ragen_apo.errors import ConfigError, EnvironmentDataError
from ragen_apo.files import require_regular_file

MAX_PRODUCT_ID = 999_999_999

_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f\x85\u2028\u2029]*$")]
"""Without a character that ends a line or steers a terminal."""
_Text = Annotated[
    str,
    Field(
        min_length=1, max_length=200, pattern=r"^[^\s;\x00-\x1f][^;\x00-\x1f\x7f\x85\u2028\u2029]*$"
    ),
]
"""A line that begins with no blank, and can stand in a list that `;` divides."""


class _ProductRow(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: int = Field(ge=1, le=MAX_PRODUCT_ID)
    title: _Text
    category: _Text
    price: float = Field(ge=0, allow_inf_nan=False)
    attributes: dict[_Line, _Line] = {}
    split: Literal["train", "test"]


class _CatalogueFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    products: list[_ProductRow] = Field(min_length=1)


@dataclass(frozen=True)
class Product:
    """One thing that can be bought."""

    product_id: int
    title: str
    category: str
    price: float
    attributes: tuple[tuple[str, str], ...]
    split: str

    @property
    def listing(self) -> str:
        """How a results line names the product: the id to click or buy, then the title.

        The id comes first because a title is often the end of another one: one title follows an id,
        but several ids may follow the words of a title.
        """
        return f"{self.product_id} {self.title}"

    @property
    def details(self) -> str:
        """The product's own page in one line."""
        price = f"{self.price:.2f}".removesuffix(".00")
        facts = ", ".join([self.category, f"${price}", *(value for _, value in self.attributes)])
        return f"{self.listing}: {facts}."


@dataclass(frozen=True, eq=False)
class Catalogue:
    """All products on offer, in catalogue order, with their search index."""

    path: str | None
    num_products: int | None
    products: tuple[Product, ...]
    content_hash: str
    """Changes with any field of any product on offer."""
    by_id: Mapping[int, Product] = field(repr=False)
    index: SearchIndex = field(repr=False)

    @property
    def categories(self) -> tuple[str, ...]:
        """The names of the categories in alphabetical order."""
        return tuple(sorted({product.category for product in self.products}))

    def __reduce__(self) -> tuple[Any, ...]:
        return load_catalogue, (self.path, self.num_products)


@functools.lru_cache(maxsize=16)
def load_catalogue(path: str | None = None, num_products: int | None = None) -> Catalogue:
    """The catalogue of a file (None: the project's own), or its first `num_products` products.

    "First" is in an order that takes the categories in turn, so that each stays represented; ids
    are kept. Raises EnvironmentDataError for an unusable file, ConfigError for too many products.
    The same file gives the same object.
    """
    products = _read_products(path)
    if num_products is not None:
        if num_products > len(products):
            raise ConfigError(
                f"environment.num_products: got {num_products}, expected at most {len(products)}, "
                "the size of the catalogue; leave it out to use all products"
            )
        chosen = set(_categories_in_turn(products)[:num_products])
        products = tuple(product for product in products if product in chosen)
    return Catalogue(
        path=path,
        num_products=num_products,
        products=products,
        content_hash=hashlib.sha256(repr(products).encode()).hexdigest()[:12],
        by_id={product.product_id: product for product in products},
        index=SearchIndex((product.product_id, product.title) for product in products),
    )


def _categories_in_turn(products: Sequence[Product]) -> list[Product]:
    """Every category's first product, then every category's second, and so on."""
    num_seen: Counter[str] = Counter()
    ranked: list[tuple[int, str, int]] = []
    for position, product in enumerate(products):
        ranked.append((num_seen[product.category], product.category, position))
        num_seen[product.category] += 1
    return [products[position] for _, _, position in sorted(ranked)]


def _read_products(path: str | None) -> tuple[Product, ...]:
    source = Path(path) if path else Path(__file__).with_name("catalogue.json")
    name = path or "the built-in catalogue"
    try:
        require_regular_file(source)
        content = json.loads(source.read_text(encoding="utf-8"))
        rows = _CatalogueFile.model_validate(content).products
    except OSError as error:
        raise EnvironmentDataError(
            f"cannot read the shop catalogue {name} ({error.strerror or error}); expected a JSON "
            "file; check environment.catalogue"
        ) from error
    except ValidationError as error:
        problems = "\n".join(describe_problems(error, _CatalogueFile, where="catalogue"))
        raise EnvironmentDataError(
            f"the shop catalogue {name} is not usable:\n{problems}\n"
            "correct the file, or leave environment.catalogue out to use the built-in one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise EnvironmentDataError(
            f"the shop catalogue {name} is not JSON ({error}); expected "
            '{"name": ..., "products": [...]}; correct the file or environment.catalogue'
        ) from error
    _refuse_twins(rows, name)
    return tuple(
        Product(
            product_id=row.id,
            title=row.title,
            category=row.category,
            price=row.price,
            attributes=tuple(row.attributes.items()),
            split=row.split,
        )
        for row in rows
    )


def _refuse_twins(rows: Sequence[_ProductRow], name: str) -> None:
    """Refuses two products with one id, or that no search could tell apart."""
    seen_ids: dict[int, str] = {}
    seen_tokens: dict[frozenset[str], str] = {}
    for row in rows:
        tokens = normalise(row.title)
        if row.id in seen_ids:
            raise EnvironmentDataError(
                f"the shop catalogue {name} has id {row.id} twice ({seen_ids[row.id]!r} and "
                f"{row.title!r}); expected unique ids; give one of them another id"
            )
        if not tokens:
            raise EnvironmentDataError(
                f"the shop catalogue {name} has the title {row.title!r} (id {row.id}), in which "
                "search reads no word; expected ASCII letters or digits; rename it"
            )
        if tokens in seen_tokens:
            raise EnvironmentDataError(
                f"the shop catalogue {name} has the title {row.title!r} (id {row.id}), which "
                f"search cannot tell from {seen_tokens[tokens]!r}; expected titles that differ in "
                "a word after normalisation; rename one of them"
            )
        seen_ids[row.id] = row.title
        seen_tokens[tokens] = row.title
