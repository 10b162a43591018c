"""A generated catalogue in upstream's format: the default where no real data is present.

Consumes a number of products; writes `items_shuffle.json`, `items_ins_v2.json` and
`items_human_ins.json` as upstream has them. Product i is a function of i alone, so a larger
catalogue begins with the smaller one. Search is not trivial in it: kinds share words, brands and
features, three products in ten are near-duplicates of an earlier one, and prices overlap.
"""

import contextlib
import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ragen_apo.progress import Progress, SilentProgress
from ragen_apo.seeding import derive_seed

GENERATOR_VERSION = 2
DUPLICATE_SHARE = 0.3
DUPLICATE_REACH = 40
DESIGN_CACHE_SIZE = 2 * DUPLICATE_REACH
PROGRESS_EVERY = 1000
INSTRUCTION_SHARE = 0.4
NUM_INSTRUCTABLE = 10_000
"""Later products are there to be searched among; a million of them makes no more goals."""
HUMAN_SHARE = 0.05
_WORDS = yaml.safe_load(Path(__file__).with_name("generated_words.yaml").read_text("utf-8"))
BRANDS, ADJECTIVES, AUDIENCES = _WORDS["brands"], _WORDS["adjectives"], _WORDS["audiences"]
COLORS, SIZES, CLOSINGS = _WORDS["colors"], _WORDS["sizes"], _WORDS["closings"]
SLOTS: Mapping[str, Sequence[str]] = _WORDS["slots"]
_SLOT = re.compile(r"\{(?:(\d+)-(\d+)|(\w+))\}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUM_ASINS = 36**8
_ASIN_STEP = 1_299_709_111_237
"""Shares no factor with 36^8, so that different products get different ids."""


@dataclass(frozen=True)
class Kind:
    """One kind of product."""

    query: str
    category: str
    path: Sequence[str]
    nouns: Sequence[str]
    materials: Sequence[str]
    features: Sequence[str]
    other: Mapping[str, Any]
    """An option besides size and color: its `name` and templates of its `values`."""
    price_range: tuple[float, float]
    sizes: str = ""
    """The name of a list of sizes; empty: the kind has no sizes."""


KINDS = [Kind(**kind) for kind in _WORDS["kinds"]]


@dataclass(frozen=True)
class _Design:
    """What is decided about a product before its texts are written."""

    kind: Kind
    brand: str
    adjectives: tuple[str, ...]
    material: str
    features: tuple[str, ...]
    audience: str
    price: float


def generated_name(num_products: int) -> str:
    """The folder name of the generated catalogue of this size and generator version."""
    return f"generated-v{GENERATOR_VERSION}-{num_products}"


def generated_asin(number: int) -> str:
    """The product id of the product of this number."""
    rest = (number * _ASIN_STEP + 7_777_777) % _NUM_ASINS
    letters: list[str] = []
    for _ in range(8):
        rest, digit = divmod(rest, 36)
        letters.append(_DIGITS[digit])
    return "B0" + "".join(letters)


def _source(number: int, purpose: str) -> random.Random:
    return random.Random(derive_seed("webshop-generated", GENERATOR_VERSION, purpose, number))


@functools.lru_cache(DESIGN_CACHE_SIZE)
def _original_design(number: int) -> _Design:
    source = _source(number, "design")
    kind = source.choice(KINDS)
    low, high = kind.price_range
    return _Design(
        kind=kind,
        brand=source.choice(BRANDS),
        adjectives=tuple(source.sample(ADJECTIVES, 2)),
        material=source.choice(kind.materials),
        features=tuple(source.sample(kind.features, min(len(kind.features), source.randint(3, 6)))),
        audience=source.choice(AUDIENCES),
        price=round(low * (high / low) ** source.random(), 2),
    )


@functools.lru_cache(DESIGN_CACHE_SIZE)
def _design(number: int) -> _Design:
    """The product's own design, or that of an earlier product with small changes."""
    source = _source(number, "family")
    if number == 0 or source.random() >= DUPLICATE_SHARE:
        return _original_design(number)
    model = _original_design(number - source.randint(1, min(number, DUPLICATE_REACH)))
    own = _original_design(number)
    return replace(
        model,
        brand=own.brand if source.random() < 0.5 else model.brand,
        material=source.choice(model.kind.materials),
        features=(*model.features[:-1], source.choice(model.kind.features)),
        price=round(model.price * source.uniform(0.8, 1.25), 2),
    )


def _pricing(price: float, source: random.Random) -> str:
    draw = source.random()
    if draw < 0.09:
        return ""
    if draw < 0.18:
        return f"${price} - ${round(price * source.uniform(1.1, 1.9), 2)}"
    return f"${price}"


def _filled(template: str, source: random.Random) -> str:
    """The template with a word for each {list} and a number for each {from-to}."""

    def filling(slot: re.Match[str]) -> str:
        low, high, words = slot.groups()
        return source.choice(SLOTS[words]) if words else str(source.randint(int(low), int(high)))

    return _SLOT.sub(filling, template)


def _values(templates: Sequence[str], source: random.Random, *, most: int) -> list[str]:
    """Different values, two or more if the templates have them, in the order of their draws."""
    number = source.randint(2, most)
    drawn = (_filled(source.choice(templates), source) for _ in range(4 * number))
    return list(itertools.islice(dict.fromkeys(drawn), number))


def _options(design: _Design, source: random.Random) -> dict[str, list[dict[str, str]]] | str:
    """Sizes, colors and one option more, as the kind has them; half of the products have none.

    Most of their values are made up: an agent that shops here cannot know them by heart.
    """
    if source.random() < 0.5:
        return ""
    options: dict[str, list[str]] = {}
    if design.kind.sizes:
        options["Size"] = _values(SIZES[design.kind.sizes], source, most=6)
    if source.random() < 0.7:
        options["Color"] = _values(COLORS, source, most=8)
    if source.random() < 0.3 or not options:
        options[design.kind.other["name"]] = _values(design.kind.other["values"], source, most=5)
    return {name: [{"value": value} for value in values] for name, values in options.items()}


def _title(design: _Design, source: random.Random) -> str:
    kind = design.kind
    noun = source.choice(kind.nouns)
    parts = [design.brand, *design.adjectives, design.material, noun]
    extras = [f"with {feature.title()}" for feature in source.sample(design.features, 1)]
    extras.append(f"for {design.audience}")
    return f"{' '.join(parts).title()} {' '.join(extras)}, {source.choice(kind.nouns).title()}"


def _bullets(design: _Design, source: random.Random) -> list[str]:
    noun = source.choice(design.kind.nouns)
    bullets = [
        f"{feature.upper()}: this {noun} is made of {design.material}; {source.choice(CLOSINGS)} "
        for feature in design.features
    ]
    return [*bullets, f"Made for {design.audience} by {design.brand}. "]


def product_record(number: int) -> dict[str, Any]:
    """The record of a product in `items_shuffle.json`."""
    design, source = _design(number), _source(number, "texts")
    title = _title(design, source)
    description = ""
    if source.random() < 0.7:
        features = " and ".join(design.features[:3])
        description = f"{title}. {features.capitalize()}. {source.choice(CLOSINGS).capitalize()}."
    return {
        "asin": generated_asin(number),
        "name": title,
        "full_description": description,
        "small_description": _bullets(design, source),
        "pricing": _pricing(design.price, source),
        "customization_options": _options(design, source),
        "images": [],
        "category": design.kind.category,
        "query": design.kind.query,
        "product_category": " \u203a ".join(design.kind.path),
    }


def attribute_record(number: int) -> dict[str, Any]:
    """The record of a product in `items_ins_v2.json`: its attributes, for some an instruction."""
    design, source = _design(number), _source(number, "instruction")
    attributes = list(dict.fromkeys([*design.features, design.material]))
    record: dict[str, Any] = {"attributes": attributes}
    if number < NUM_INSTRUCTABLE and source.random() < INSTRUCTION_SHARE:
        asked = source.sample(attributes, min(len(attributes), source.randint(1, 4)))
        before, after = asked[:2], asked[2:]
        instruction = f"Find me {', '.join(before)} {design.kind.query}"
        if after:
            instruction += f" with {', '.join(after)}"
        record |= {"instruction": instruction, "instruction_attributes": asked}
    return record


def human_record(number: int) -> list[dict[str, Any]] | None:
    """What `items_human_ins.json` has for a product, for one in twenty."""
    if number >= NUM_INSTRUCTABLE:
        return None
    design, source = _design(number), _source(number, "human")
    if source.random() >= HUMAN_SHARE:
        return None
    options = product_record(number)["customization_options"] or {}
    wanted = [source.choice(values)["value"].lower() for values in options.values()]
    asked = source.choice(design.features)
    noun = source.choice(design.kind.nouns)
    opening = source.choice(("i am looking for a", "i need a", "can you find me a", "i want a"))
    in_words = f" in {' and '.join(wanted)}" if wanted else ""
    return [
        {
            "asin": generated_asin(number),
            "instruction": f"{opening} {noun} that is {asked}{in_words}.",
            "instruction_attributes": [asked],
            "instruction_options": wanted,
        }
    ]


@contextlib.contextmanager
def _json_file(path: Path, brackets: str) -> Iterator[Callable[[str], object]]:
    """Writes one JSON document, entry by entry as they come."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(brackets[0])
        separators = itertools.chain(["\n"], itertools.repeat(",\n"))
        yield lambda entry: stream.write(next(separators) + entry)
        stream.write(f"\n{brackets[1]}\n")


def write_generated_files(
    folder: Path, num_products: int, progress: Progress | None = None
) -> None:
    """Writes the three files of the generated catalogue of this size."""
    progress = progress or SilentProgress()
    progress.start("generate products", num_products)
    with (
        _json_file(folder / "items_shuffle.json", "[]") as write_item,
        _json_file(folder / "items_ins_v2.json", "{}") as write_attributes,
        _json_file(folder / "items_human_ins.json", "{}") as write_human,
    ):
        for number in range(num_products):
            key = f'"{generated_asin(number)}": '
            write_item(json.dumps(product_record(number)))
            write_attributes(key + json.dumps(attribute_record(number)))
            instructions = human_record(number)
            if instructions is not None:
                write_human(key + json.dumps(instructions))
            if number % PROGRESS_EVERY == 0:
                progress.update(number)
        progress.update(num_products)
