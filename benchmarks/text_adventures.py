"""Milliseconds of a command and of a start: ALFWorld by its own wrapper, and as we play it.

    .textworld/bin/python -m benchmarks.text_adventures [--num-games 6] [--data FOLDER]

`make test-interop` makes that environment. Without `--data` the games are those that
`benchmarks.households` makes in ALFWorld's kitchens, its largest rooms. Both sides play the same
random commands, in turns of a game each.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.households import KINDS, KITCHENS, make_household
from benchmarks.tables import write_page

from ragen_apo.environments.textworld.engine import Engine


class Theirs:
    """ALFWorld's wrapper, which translates and parses for each game and command."""

    def __init__(self, path: Path) -> None:
        import textworld  # pyright: ignore[reportMissingImports]
        from alfworld.agents.environment import (  # pyright: ignore[reportMissingImports]
            alfred_tw_env,
        )

        wanted = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
        self._game = textworld.start(str(path), wanted, [alfred_tw_env.AlfredDemangler])
        self._state = self._game.reset()

    def commands(self) -> list[str]:
        return [word for word in self._state["admissible_commands"] if word != "help"]

    def step(self, command: str) -> None:
        self._state, _, _ = self._game.step(command)


class Ours:
    """The engine of the environment `textworld`."""

    def __init__(self, path: Path) -> None:
        self._engine = Engine(path)
        self._scene = self._engine.scene()

    def commands(self) -> list[str]:
        return list(self._scene.commands)

    def step(self, command: str) -> None:
        self._scene = self._engine.step(command)


THEIRS = "ALFWorld's wrapper"
SIDES: dict[str, Callable[[Path], Theirs | Ours]] = {
    THEIRS: Theirs,
    "ours, the first time": Ours,
    "ours, once more": Ours,
}


def timed(make: Callable[[Path], Theirs | Ours], path: Path, num_commands: int) -> list[float]:
    """Milliseconds of the start, then of each command."""
    draw, marks = random.Random(0), [time.perf_counter()]
    game = make(path)
    for _ in range(num_commands):
        marks.append(time.perf_counter())
        game.step(draw.choice(game.commands()))
    marks.append(time.perf_counter())
    return [1000 * (after - before) for before, after in itertools.pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-games", type=int, default=6)
    parser.add_argument("--num-commands", type=int, default=30)
    parser.add_argument("--data", type=Path, help="a folder of ALFWorld's games")
    arguments = parser.parse_args()
    command = sys.argv  # which their translation changes
    with tempfile.TemporaryDirectory() as folder:
        paths = games(arguments.data, Path(folder), arguments.num_games + 1)  # one to warm up
        times: dict[str, list[list[float]]] = {name: [] for name in SIDES}
        for path, (name, make) in itertools.product(paths, SIDES.items()):
            times[name].append(timed(make, path, arguments.num_commands))
    sys.argv = command
    starts = {name: median(game[0] for game in played[1:]) for name, played in times.items()}
    commands = {
        name: median(command for game in played[1:] for command in game[1:])
        for name, played in times.items()
    }
    rows = [
        (name, *(f"{of[name]:.1f} ({of[name] / of[THEIRS]:.1%})" for of in (starts, commands)))
        for name in SIDES
    ]
    write_page(
        "text_adventures",
        title="Text adventures: ALFWorld's games by its own wrapper and by ours",
        header=("played by", "start, ms (share)", "command, ms (share)"),
        rows=rows,
        notes=f"Medians over {len(paths) - 1} games of {arguments.num_commands} commands. "
        f"The games are {arguments.data or 'those of `benchmarks.households` in kitchens'}.",
    )


def games(data: Path | None, folder: Path, number: int) -> list[Path]:
    """Games of a folder, or households that are made for it."""
    if data is not None:
        return sorted(data.rglob("*.tw-pddl"))[:number]
    pick = [kind for kind in KINDS if kind.startswith("pick")]  # no kitchen has a desk lamp
    kinds = itertools.islice(itertools.cycle(pick), number)
    return [make_household(folder, kind, seed, rooms=KITCHENS) for seed, kind in enumerate(kinds)]


if __name__ == "__main__":
    main()
