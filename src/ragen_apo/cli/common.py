"""What the commands share: the application, its console, and arguments that are checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

import ragen_apo
from ragen_apo.console import PrintableConsole, write_line
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.errors import ConfigError
from ragen_apo.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cyclopts import Token


def examples(*commands: str) -> str:
    """The end of a help page: commands to copy, one a line (an indented block of Markdown)."""
    return "Examples:\n\n" + "\n".join(f"    ragen-apo {command}" for command in commands)


app = App(
    name="ragen-apo",
    help_epilogue=examples(
        "train --config configs/smoke.yaml --run-dir runs/smoke", "play shop", "train --help"
    ),
    help="Train language-model agents on multi-turn tasks with A*-PO, PPO, GRPO and others.",
    version=ragen_apo.__version__,
    suppress_keyboard_interrupt=False,  # `main` says what an interrupted run keeps
)
console = PrintableConsole(markup=False, quiet=this_worker().rank > 0)
"""Under torchrun the first process speaks for all."""


def say(text: str) -> None:
    """Prints one line."""
    write_line(console, text)


def whole_number(least: int, most: int = 1_000_000) -> Parameter:
    """An argument that is a whole number within bounds; 1e3 is one, as in a configuration."""

    def convert(_: type, tokens: Sequence[Token]) -> int:
        text = tokens[0].value
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value.is_integer() and least <= value <= most):
            got = repr(text[:40]) if math.isnan(value) else f"{value:g}"
            raise ConfigError(
                f"{tokens[0].keyword}: got {got}, expected a whole number at least {least} and at "
                f"most {most:,}"
            )
        return int(value)

    return Parameter(converter=convert)


def _given_path(_: type, tokens: Sequence[Token]) -> Path:
    if not tokens[0].value:
        raise ConfigError(
            f"{tokens[0].keyword} is empty; expected a path (a variable of the shell may be unset)"
        )
    return Path(tokens[0].value)


Folder = Annotated[Path, Parameter(converter=_given_path)]
"""Where something is written: nothing stands for the present folder but a dot."""
Number = Annotated[int, whole_number(1)]
NumberOrZero = Annotated[int, whole_number(0, 1_000_000_000)]
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""Any number of `--key value`, whose names are checked later."""
TrustRemoteCode = Annotated[bool, Parameter(negative=())]
"""Trust is said on the command line: a run directory may come from somebody else."""


def print_policies(title: str, rows: Mapping[str, tuple[float, float, float]]) -> None:
    """A table of success rate, reward and steps by the name of a policy."""
    from rich.table import Table

    table = Table(title=title)
    for heading in ("policy", "success", "average reward", "average steps"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, (success, reward, steps) in rows.items():
        table.add_row(printable(name), f"{success:.1%}", f"{reward:.3f}", f"{steps:.2f}")
    console.print(table)
