"""Progress on a terminal: bars for people, plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ragen_apo.printable import printable
from ragen_apo.progress import SilentProgress

PLAIN_LINE_EVERY_SECONDS = 15.0
WIDE = 115
"""Characters in a line of the terminal: enough for all columns and the longest note."""
DESCRIPTIONS = {
    "tokenizer": "texts for the tokenizer",
    "teacher": "warm start: the teacher",
    "copy": "warm start: copying",
    "demonstrations": "warm start: demonstrations",
    "stage 1": "stage 1: reference values",
    "stage 2": "stage 2: training",
    "evaluation": "evaluation",
}


class PrintableConsole(Console):
    """A console that escapes control characters, since its texts may be foreign."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As Rich does, with the texts made printable; tables bring printable cells themselves."""
        texts = (printable(each) if isinstance(each, str) else each for each in objects)
        super().print(*texts, **options)


def write_line(console: Console, text: str, *, style: str | None = None) -> None:
    """One line as it is: without markup, and not wrapped, which would break what people copy."""
    console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)


class WarningsOfRank(SilentProgress):
    """The `Progress` of a rank after the first: it only warns, and names the rank."""

    def __init__(self, rank: str) -> None:
        self._rank = rank

    def warn(self, message: str) -> None:
        """Writes to the standard error, where torchrun shows the lines of every rank."""
        write_line(PrintableConsole(stderr=True), f"{self._rank}: {message}")


class ConsoleProgress:
    """A `Progress` (see `ragen_apo.progress`) on a console; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars: Progress | None = None
        if console.is_terminal:
            # Without room for everything Rich would cut every number, so two columns make way.
            is_wide = console.width >= WIDE
            self._bars = Progress(
                TextColumn("{task.description:<26}"),
                *([BarColumn(bar_width=24)] if is_wide else []),
                MofNCompleteColumn(),
                *([TimeElapsedColumn()] if is_wide else []),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", style="dim", markup=False),
                console=console,
            )
        self._bar: TaskID | None = None
        self._name, self._total, self._done, self._note = "", 0, 0, ""
        self._last_line = self._started = 0.0

    def __enter__(self) -> ConsoleProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_phase()
        if self._bars is not None:
            self._bars.stop()

    def start(self, phase: str, total: int) -> None:
        """Opens a bar, or prints that the phase begins."""
        self._finish_phase()
        self._name, self._total = DESCRIPTIONS.get(phase, phase), total
        self._done, self._note = 0, ""
        self._started = self._last_line = time.monotonic()
        if self._bars is not None:
            self._bar = self._bars.add_task(self._name, total=total, note="")

    def update(self, done: int, note: str = "") -> None:
        """Moves the bar; plain output gets a line every few seconds."""
        self._done, self._note = done, printable(note) or self._note
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=done, note=self._note)
        elif time.monotonic() - self._last_line > PLAIN_LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            self._print_line()

    def say(self, message: str) -> None:
        """Prints a sentence above the bars."""
        write_line(self.console, message)

    warn = say

    def _finish_phase(self) -> None:
        if not self._name:
            return
        if self._bars is None:
            self._print_line(suffix=f"  in {time.monotonic() - self._started:.0f} s")
        elif self._bar is not None:
            # A phase that reached its goal early is complete.
            self._bars.update(self._bar, total=self._done or self._total)
        self._name = ""

    def _print_line(self, suffix: str = "") -> None:
        line = f"{self._name}: {self._done}/{self._total}  {self._note}{suffix}"
        write_line(self.console, line)
