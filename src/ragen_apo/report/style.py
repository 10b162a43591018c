"""The look that plots, slides and page share: colours, and how a number is written.

Colours carry meaning: ACCENT is the trained policy, WARM a second series (evaluation, reference),
RED a failure, greys everything that is only there for comparison.
"""

from __future__ import annotations

from ragen_apo import plural
from ragen_apo.report.load import finite, mapping, pair

INK = "#1c2330"
MUTED = "#5d6778"
FAINT = "#a3acba"
LINE = "#e3e6eb"
GROUND = "#f6f7f9"
PAPER = "#ffffff"
ACCENT = "#0f6f69"
ACCENT_SOFT = "#d9ecea"
WARM = "#c0721f"
RED = "#b3382c"

ABSENT = "–"
"""Stands for an unknown number."""
MAX_METRICS = 20
"""Metrics of the environment's own that are shown, the first if there are more."""


def percent(value: object, digits: int = 1) -> str:
    """A share as a percentage: 0.98 -> `98.0%`."""
    number = finite(value)
    return ABSENT if number is None else f"{100 * number:.{digits}f}%"


def decimal(value: object, digits: int = 2) -> str:
    """A number with a fixed number of digits."""
    number = finite(value)
    return ABSENT if number is None else f"{number:.{digits}f}"


def signed(value: object) -> str:
    """A number with its sign, as rewards are written: `+1.00`."""
    number = finite(value)
    return ABSENT if number is None else f"{number:+.2f}"


def compact(value: object) -> str:
    """A number of unknown size with about three significant digits; integers, unless they are very
    large, with separators.
    """
    number = finite(value)
    if number is None:
        return ABSENT
    if number == int(number) and abs(number) < 1e12:
        return f"{int(number):,}"
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e15 else f"{number:.3g}"


def counted(value: object, noun: str) -> str:
    """A number of things: `1 task`, `2 tasks`; `many tasks` where the number is unknown."""
    number = finite(value)
    return f"many {noun}s" if number is None else plural.counted(int(number), noun)


def interval(bounds: object) -> str:
    """A pair of shares: [0.93, 0.994] -> `93.0–99.4%`."""
    both = pair(bounds)
    if both is None:
        return ABSENT
    low, high = both
    return f"{100 * low:.1f}–{100 * high:.1f}%"


def duration(seconds: object) -> str:
    """Seconds in the largest units that matter: `48 s`, `8 min 20 s`, `2 h 05 min`."""
    number = finite(seconds)
    if number is None:
        return ABSENT
    if number < 60:
        return f"{number:.0f} s" if number >= 10 else f"{number:.1f} s"
    minutes, rest = divmod(round(number), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def words(name: str) -> str:
    """A name of the code as words: `search_loop` -> `search loop`."""
    return name.replace("_", " ")


def metric_label(name: str) -> str:
    """The name of a metric of the environment as a title: `tests_passed` -> `Tests passed`."""
    label = one_line(words(name), 40)
    return label[:1].upper() + label[1:]


def measured(metrics: object) -> str:
    """What the environment measured in an episode: `tests passed 3, coverage 0.75`."""
    shown = list(mapping(metrics).items())[:MAX_METRICS]
    return ", ".join(f"{one_line(words(name), 40)} {compact(value)}" for name, value in shown)


def one_line(text: object, max_characters: int | None = None) -> str:
    """Text without control characters (line breaks become spaces), shortened where it must fit."""
    cleaned = "".join(c if c.isprintable() else " " for c in str(text))
    if max_characters is not None and len(cleaned) > max_characters:
        return cleaned[: max_characters - 1].rstrip() + "…"
    return cleaned
