"""Boards as text, for grid worlds.

A board is a tuple of rows with one symbol a cell, row 0 at the top. `render` writes it in one of
four ways, and `read_board` reads it back. Symbols stand apart so that a tokenizer sees cells:

    grid           words                    coordinates
    # # # #        wall wall wall wall      4 rows, 4 columns
    # P _ #        wall player floor wall   player: (1, 1)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from ragen_apo.environments.toolkit.named_actions import ActionRules, action_tool
from ragen_apo.environments.toolkit.task_draws import DrawnTasks
from ragen_apo.environments.tools import Tool
from ragen_apo.plural import counted

Board = tuple[str, ...]
Cell = tuple[int, int]
"""Row and column."""
Observation = Literal["grid", "words", "coordinates", "grid_and_coordinates"]

DIRECTIONS: Mapping[str, tuple[int, int]] = {
    "Up": (-1, 0),
    "Down": (1, 0),
    "Left": (0, -1),
    "Right": (0, 1),
}
"""The row and column that each action adds."""


def move_tool(description: str, max_per_turn: int) -> Tool:
    """The tool that moves in these directions."""
    return action_tool(
        "move", description, "direction", names=tuple(DIRECTIONS), max_per_turn=max_per_turn
    )


_SIZE = re.compile(r"(\d+) rows, (\d+) columns")
_CELL = re.compile(r"\((\d+), (\d+)\)")


class GridOptions(DrawnTasks):
    """The options that all grid worlds have."""

    observation: Observation = "grid"
    """How the board is written."""
    surroundings: bool = False
    """Whether the board is followed by what lies next to the player and where the landmarks are."""
    max_turns: int = Field(default=10, ge=1, le=1000)
    """Truncates an episode after this many turns."""
    max_actions_per_turn: int = Field(default=5, ge=1, le=100)
    """How many actions joined by || are carried out in one turn."""
    max_actions: int | None = Field(default=None, ge=1)
    """Truncates an episode after this many actions; null: only turns are counted."""

    @property
    def max_actions_of_episode(self) -> int:
        of_turns = self.max_turns * self.max_actions_per_turn
        return of_turns if self.max_actions is None else min(of_turns, self.max_actions)

    def require_actions(self, needed: int, *, for_what: str) -> None:
        """Raises ValueError where an episode has fewer actions than every board needs."""
        if self.max_actions_of_episode < needed:
            raise ValueError(
                f"no episode can succeed: {for_what} takes at least {counted(needed, 'action')}, "
                f"and an episode has {self.max_actions_of_episode} at most; raise "
                "max_actions, max_turns or max_actions_per_turn"
            )

    def actions_in_words(self, example: str) -> str:
        """The sentences of an environment's rules that say how to act, with a blank behind them."""
        most = self.max_actions_per_turn
        several = f"Join up to {most} by ||, as in {example}. " if most > 1 else ""
        return f"Actions: {', '.join(DIRECTIONS)}. {several}"

    def action_rules(self, *, invalid_reward: float) -> ActionRules:
        """Up, Down, Left and Right within the limits."""
        return ActionRules(
            names=tuple(DIRECTIONS),
            max_per_turn=self.max_actions_per_turn,
            max_per_episode=self.max_actions,
            invalid_reward=invalid_reward,
        )


@dataclass(frozen=True)
class BoardLanguage:
    """The words for the symbols of a board."""

    words: Mapping[str, str]
    """The word for each symbol; a word has no spaces."""
    background: str
    """The symbol that a list of coordinates leaves out."""
    is_walled: bool
    """The outermost cells are walls, which a list of coordinates leaves out as well."""
    player: str
    """The symbols of a cell with the player on it."""
    landmarks: Mapping[str, str]
    """The names of landmarks in `surroundings`, with the symbols of their cells."""
    errands: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """For landmarks that have to be moved: the verb, and the symbols of the target cells."""

    def rules(self, observation: Observation) -> str:
        """How to read an observation, for the environment's rules."""
        left_out = f"; cells not listed are {self.words[self.background]}"
        border = ", the border is wall" if self.is_walled else ""
        coordinates = f"Cells are (row, column) from (0, 0) at the top left{border}{left_out}."
        symbols = ", ".join(f"{symbol} {word}" for symbol, word in self.words.items())
        if observation == "words":
            return "Each line is a row of the board."
        if observation == "coordinates":
            return coordinates
        grid = f"Symbols: {symbols}."
        return grid if observation == "grid" else f"{grid} {coordinates}"


def view(board: Board, options: GridOptions, language: BoardLanguage) -> str:
    """A board as an observation, under the options of its environment."""
    shown = render(board, options.observation, language)
    return f"{shown}\n{surroundings(board, language)}" if options.surroundings else shown


def surroundings(board: Board, language: BoardLanguage) -> str:
    """The cells next to the player, and the way to each landmark:

    Up: border. Down: ice. Left: border. Right: hole.
    goal: 3 down, 2 right.

    A landmark with an errand has a line for each of its cells, with the way it has to go itself:

    box: 1 down, 1 right; push 2 down.
    """
    (player,) = _cells_with(board, language.player)
    lines = [" ".join(beside(board, player, direction, language) for direction in DIRECTIONS)]
    for name, symbols in language.landmarks.items():
        cells = _cells_with(board, symbols)
        if name in language.errands:
            lines += [errand(board, player, cell, name, language) for cell in cells]
        elif cells:
            lines.append(f"{name}: {'; '.join(_way(player, cell) for cell in cells)}.")
    return "\n".join(lines)


def beside(board: Board, cell: Cell, direction: str, language: BoardLanguage) -> str:
    """The neighbour of a cell in a direction, as in `Right: hole.`"""
    row, column = cell[0] + DIRECTIONS[direction][0], cell[1] + DIRECTIONS[direction][1]
    is_inside = 0 <= row < len(board) and 0 <= column < len(board[0])
    return f"{direction}: {language.words[board[row][column]] if is_inside else 'border'}."


def errand(board: Board, player: Cell, cell: Cell, name: str, language: BoardLanguage) -> str:
    """The way to a landmark, and from there to the nearest free target cell, as in
    `box: 1 down, 1 right; push 2 down.`; `here` if it is on one.
    """
    verb, ends = language.errands[name]
    taken = set(_cells_with(board, language.landmarks[name])) - {cell}
    free = [end for end in _cells_with(board, ends) if end not in taken]
    nearest = min(free, key=lambda end: distance(cell, end), default=None)
    onward = f"; {verb} {_way(cell, nearest)}" if nearest else ""
    return f"{name}: {_way(player, cell)}{onward}."


def _cells_with(board: Board, symbols: str) -> list[Cell]:
    return [
        (row, column)
        for row, line in enumerate(board)
        for column, symbol in enumerate(line)
        if symbol in symbols
    ]


def distance(start: Cell, end: Cell) -> int:
    """Rows and columns from one cell to another."""
    return abs(end[0] - start[0]) + abs(end[1] - start[1])


def _way(start: Cell, end: Cell) -> str:
    """`2 up, 1 left`."""
    down, right = end[0] - start[0], end[1] - start[1]
    parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return ", ".join(parts) or "here"


def render(board: Board, observation: Observation, language: BoardLanguage) -> str:
    """The board as text; `read_board` is the inverse."""
    if observation == "grid":
        return "\n".join(" ".join(row) for row in board)
    if observation == "words":
        return "\n".join(" ".join(language.words[symbol] for symbol in row) for row in board)
    if observation == "coordinates":
        return _coordinates(board, language)
    return f"{render(board, 'grid', language)}\n{_coordinates(board, language)}"


def _coordinates(board: Board, language: BoardLanguage) -> str:
    margin = 1 if language.is_walled else 0
    num_rows, num_columns = len(board), len(board[0])
    lines = [f"{num_rows} rows, {num_columns} columns"]
    for symbol, word in language.words.items():
        cells = [
            f"({row}, {column})"
            for row in range(margin, num_rows - margin)
            for column in range(margin, num_columns - margin)
            if board[row][column] == symbol != language.background
        ]
        if cells:
            lines.append(f"{word}: {' '.join(cells)}")
    return "\n".join(lines)


def read_board(text: str, observation: Observation, language: BoardLanguage) -> Board | None:
    """The board that an observation shows, or None where it shows none."""
    if observation == "coordinates":
        return _board_of_coordinates(text, language)
    symbol_of = {
        symbol if observation != "words" else word: symbol
        for symbol, word in language.words.items()
    }
    lines = [line.split() for line in text.splitlines()]
    rows = [
        "".join(symbol_of[cell] for cell in line)
        for line in lines
        if line and all(cell in symbol_of for cell in line)
    ]
    return tuple(rows) or None


def _board_of_coordinates(text: str, language: BoardLanguage) -> Board | None:
    size = _SIZE.search(text)
    if size is None:
        return None
    num_rows, num_columns = int(size[1]), int(size[2])
    cells = [[language.background] * num_columns for _ in range(num_rows)]
    if language.is_walled:
        wall = next(symbol for symbol, word in language.words.items() if word == "wall")
        cells[0] = cells[-1] = [wall] * num_columns
        for row in cells:
            row[0] = row[-1] = wall
    symbol_of = {word: symbol for symbol, word in language.words.items()}
    for line in text.splitlines():
        word, _, listed = line.partition(": ")
        if word in symbol_of:
            for row, column in _CELL.findall(listed):
                cells[int(row)][int(column)] = symbol_of[word]
    return tuple("".join(row) for row in cells)


def symmetric_key(board: Sequence[str]) -> str:
    """The same text for a board and its turned and mirrored images."""
    images: list[str] = []
    image = tuple(board)
    for _ in range(4):
        image = tuple("".join(column) for column in zip(*image[::-1], strict=True))
        images += ["\n".join(image), "\n".join(row[::-1] for row in image)]
    return min(images)
