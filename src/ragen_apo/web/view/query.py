"""What an address asks for. A page's whole state stands in it, so that a link to it lasts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ragen_apo.web.pages import url

MAX_CHARACTERS = 2000
MAX_DIGITS = 12

Item = TypeVar("Item")


def text(request: Request, name: str, default: str = "") -> str:
    """A parameter as it is."""
    value = request.query_params.get(name, default)
    if len(value) > MAX_CHARACTERS:
        raise HTTPException(400, f"{name} is too long")
    return value


def number(request: Request, name: str, default: int = 0) -> int:
    """A parameter that is a whole number from 0."""
    return whole_number(name, text(request, name, str(default)))


def whole_number(name: str, value: str) -> int:
    """The value of a field as a number; raises HTTPException where it is not a whole one from 0."""
    if not (value.isascii() and value.isdigit()) or len(value) > MAX_DIGITS:
        raise HTTPException(400, f"{name}: got {value[:40]!r}, expected a whole number from 0")
    return int(value)


def choice(request: Request, name: str, options: Collection[str]) -> str:
    """A parameter that is one of some words; the first where it is absent."""
    value = text(request, name) or next(iter(options))
    if value not in options:
        expected = ", ".join(options)
        raise HTTPException(400, f"{name}: got {value[:40]!r}, expected one of {expected}")
    return value


@dataclass(frozen=True)
class Page:
    """One page of a long list."""

    number: int
    """From 1."""
    size: int

    @property
    def start(self) -> int:
        """The index of its first item."""
        return (self.number - 1) * self.size

    def within(self, num_items: int) -> Page:
        """This page, or the last one of a list that has become shorter."""
        return Page(min(self.number, self._last(num_items)), self.size)

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        return items[self.start : self.start + self.size]

    def links(self, num_items: int) -> Sequence[int]:
        """The pages to link: the first, the last and those around; 0 stands for a gap."""
        last = self._last(num_items)
        near = {1, last, *range(max(1, self.number - 2), min(last, self.number + 2) + 1)}
        numbers: list[int] = []
        for number in sorted(near):
            if numbers and number - numbers[-1] > 1:
                numbers.append(0)
            numbers.append(number)
        return numbers

    def _last(self, num_items: int) -> int:
        return max(1, -(-num_items // self.size))


def page(request: Request, size: int) -> Page:
    """The page that an address names, the first where it names none."""
    return Page(max(1, number(request, "page", 1)), size)


FILES = {"evaluation": "episodes", "training": "rollouts"}
"""Where episodes are from, and the run's file."""
REFERENCE = "reference"
"""Episodes of Stage 1, from the value store."""


@dataclass(frozen=True)
class EpisodeKey:
    """Names an episode: in a file by its number, in the value store by conditions and task too."""

    run: str = ""
    source: str = ""
    number: int = 0
    """In the file, or of the sample."""
    conditions: str = ""
    task: str = ""

    def url(self, path: str = "/episode", **parameters: object) -> str:
        """The address of a page about the episode."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return url(path, **own, **parameters)


def episode_key(request: Request) -> EpisodeKey:
    """The episode that an address names."""
    return EpisodeKey(
        run=text(request, "run"),
        source=choice(request, "source", [*FILES, REFERENCE]),
        number=number(request, "number"),
        conditions=text(request, "conditions"),
        task=text(request, "task"),
    )
