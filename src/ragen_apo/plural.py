"""A number of things in a sentence: `1 task`, `2 tasks`."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number, with separators, and the noun in its form; `plural` where that is not noun + s.

    >>> counted(1, "task"), counted(1_000, "held-out task"), counted(2, "box", "boxes")
    ('1 task', '1,000 held-out tasks', '2 boxes')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
