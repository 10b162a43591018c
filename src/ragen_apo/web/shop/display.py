"""What a page of a shop shows, whichever shop it is.

A button carries the text that the environment executes when it is pressed: people act in the same
words as the agent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Button:
    """Something to press."""

    label: str
    action: str
    """The environment's text for it."""


@dataclass(frozen=True)
class Choice:
    """A value of an option."""

    value: str
    action: str | None
    """None where the environment has no text that selects it."""
    is_selected: bool


@dataclass(frozen=True)
class OptionGroup:
    """An option and its values."""

    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Card:
    """A product among results."""

    title: str
    number: str
    look: Button
    price: str = ""
    """Empty where the environment does not say it here."""
    buy: Button | None = None


@dataclass(frozen=True)
class Product:
    """A product's own page."""

    title: str
    price: str
    facts: tuple[tuple[str, str], ...]
    """Names and values."""
    options: tuple[OptionGroup, ...] = ()
    buttons: tuple[Button, ...] = ()
    """Further pages about it."""
    buy: Button | None = None


@dataclass(frozen=True)
class Text:
    """A page of text about a product."""

    heading: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Results:
    """Products that a search has found."""

    heading: str
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class ShopPage:
    """The open page; parts that it does not have are None or empty."""

    query: str = ""
    """The last search."""
    welcome: str = ""
    """Of the page that an episode begins with."""
    results: Results | None = None
    product: Product | None = None
    text: Text | None = None
    buttons: tuple[Button, ...] = ()
    """The ways on and back."""


@dataclass(frozen=True)
class RewardPart:
    """A line of the bill."""

    name: str
    value: str
    meaning: str
