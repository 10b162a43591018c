"""An environment in a file that holds something, for adapters that have to close it."""

from __future__ import annotations

from pathlib import Path

HELD = """
from pathlib import Path

from ragen_apo.environments.base import make_environment

LOG = Path(__file__).with_name("held.log")


class Held:
    def __init__(self):
        self.whole = make_environment("shop", {"num_products": 60, "max_turns": 3})
        self.note("open")

    def note(self, word):
        with LOG.open("a") as log:
            log.write(word + "\\n")

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def step(self, action):
        *answer, info = self.whole.step(action)
        return *answer, {**info, "metrics": {"length": len(action)}}

    def close(self):
        self.note("close")


def make_held():
    return Held()
"""


def write_held(folder: Path) -> str:
    """The file in a folder, as environments are named by it."""
    (folder / "held.py").write_text(HELD, encoding="utf-8")
    return f"{folder / 'held.py'}:make_held"


def still_held(folder: Path) -> int:
    """How many of its environments have not been closed, in any process."""
    words = (folder / "held.log").read_text(encoding="utf-8").split()
    return words.count("open") - words.count("close")
