"""Sokoban without text: rooms, the solver, and a generator that plays backwards.

A level is made from its end: boxes stand on the targets of a random room and are pulled away, so
it can be solved by the same moves in reverse. The solver then counts the pushes that it needs.
Cells are numbered row by row; a room's border is wall, so that a step from a floor cell always
leads to a cell.
"""

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ragen_apo.environments.toolkit.grid_text import DIRECTIONS, Board, Cell

SYMBOLS = "#_OXP*S"
WALL, FLOOR, TARGET, BOX, PLAYER, BOX_ON_TARGET, PLAYER_ON_TARGET = SYMBOLS

MAX_STATES = 5_000
"""The number of states after which the solver gives up."""
_MAX_STATES_OF_LEVEL = 2_000
"""The same limit for generated levels, so that scripted policies stay fast."""
_MAX_WALL_SHARE = 0.35
_PULLS_PER_PUSH = 4


@dataclass(frozen=True)
class Room:
    """The fixed part of a level."""

    num_rows: int
    num_columns: int
    walls: frozenset[int]
    targets: frozenset[int]

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """The number that each direction adds to a cell's."""
        return {name: row * self.num_columns + column for name, (row, column) in DIRECTIONS.items()}

    def cell(self, number: int) -> Cell:
        """Row and column of a cell."""
        return divmod(number, self.num_columns)


@dataclass(frozen=True)
class State:
    """The moving part of a level."""

    player: int
    boxes: frozenset[int]


@dataclass(frozen=True)
class Solution:
    """Moves that put all boxes on targets with the fewest possible pushes."""

    moves: tuple[str, ...]
    num_pushes: int


def read_level(board: Sequence[str]) -> tuple[Room, State]:
    """The level that a board shows; raises ValueError for a board that is none."""
    num_rows, num_columns = len(board), len(board[0]) if board else 0
    text = "".join(board)
    cells = dict(enumerate(text))

    def cells_with(symbols: str) -> frozenset[int]:
        return frozenset(cell for cell, symbol in cells.items() if symbol in symbols)

    room = Room(
        num_rows,
        num_columns,
        cells_with(WALL),
        cells_with(TARGET + BOX_ON_TARGET + PLAYER_ON_TARGET),
    )
    boxes, players = cells_with(BOX + BOX_ON_TARGET), cells_with(PLAYER + PLAYER_ON_TARGET)
    border = {
        cell
        for cell in cells
        if cell // num_columns in (0, num_rows - 1) or cell % num_columns in (0, num_columns - 1)
    }
    if any(len(row) != num_columns for row in board) or set(text) - set(SYMBOLS):
        raise ValueError("the board's rows differ in length or hold unknown symbols")
    if not border <= room.walls or len(players) != 1 or not len(boxes) == len(room.targets) > 0:
        raise ValueError(
            "the board needs walls around it, one player, and as many boxes as targets"
        )
    return room, State(next(iter(players)), boxes)


def draw_board(room: Room, state: State) -> Board:
    """The board of a level; the inverse of `read_level`."""
    symbols = [FLOOR] * (room.num_rows * room.num_columns)
    for cell in room.walls:
        symbols[cell] = WALL
    for cell in room.targets:
        symbols[cell] = TARGET
    for cell in state.boxes:
        symbols[cell] = BOX_ON_TARGET if cell in room.targets else BOX
    symbols[state.player] = PLAYER_ON_TARGET if state.player in room.targets else PLAYER
    text = "".join(symbols)
    width = room.num_columns
    return tuple(text[start : start + width] for start in range(0, len(text), width))


def move(room: Room, state: State, direction: str) -> State:
    """The state after one step or push; the same state where the way is blocked."""
    offset = room.offsets[direction]
    ahead = state.player + offset
    if ahead in room.walls:
        return state
    if ahead not in state.boxes:
        return State(ahead, state.boxes)
    beyond = ahead + offset
    if beyond in room.walls or beyond in state.boxes:
        return state
    return State(ahead, state.boxes - {ahead} | {beyond})


def walks(room: Room, state: State) -> dict[int, tuple[int, str]]:
    """All cells the player can walk to, each with the cell before it and the step between them.

    The player's own cell stands for itself, with an empty step.
    """
    came_from = {state.player: (state.player, "")}
    queue = deque([state.player])
    while queue:
        cell = queue.popleft()
        for direction, offset in room.offsets.items():
            ahead = cell + offset
            if ahead not in came_from and ahead not in room.walls and ahead not in state.boxes:
                came_from[ahead] = (cell, direction)
                queue.append(ahead)
    return came_from


def walk_to(cell: int, came_from: dict[int, tuple[int, str]]) -> list[str]:
    """The steps of a shortest way to a cell of `walks`."""
    steps: list[str] = []
    while came_from[cell][1]:
        cell, step = came_from[cell]
        steps.append(step)
    return steps[::-1]


def pushes(
    room: Room, state: State, reached: dict[int, tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    """Every box that can be pushed now, with the direction, in a fixed order."""
    for box in sorted(state.boxes):
        for direction, offset in room.offsets.items():
            beyond = box + offset
            if box - offset in reached and beyond not in room.walls and beyond not in state.boxes:
                yield box, direction


@functools.lru_cache(maxsize=1024)
def push_distances(room: Room) -> dict[int, int]:
    """For each cell, how many pushes bring a lone box to a target; dead cells are missing."""
    distances = dict.fromkeys(room.targets, 0)
    queue = deque(sorted(room.targets))
    while queue:
        cell = queue.popleft()
        for offset in room.offsets.values():
            box, player = cell - offset, cell - 2 * offset
            if box not in distances and box not in room.walls and player not in room.walls:
                distances[box] = distances[cell] + 1
                queue.append(box)
    return distances


@functools.lru_cache(maxsize=8192)
def solve(room: Room, state: State, *, max_states: int = MAX_STATES) -> Solution | None:
    """A solution with the fewest pushes, or None: there is none within `max_states` states.

    A* over the boxes and the region the player can walk in; the lower bound is the sum of the
    boxes' distances to their nearest targets. Sets of cells are integers with one bit a cell. The
    plan does not depend on the player's cell in its region, so a new plan in the middle of a walk
    continues that walk.
    """
    distances = push_distances(room)
    if not state.boxes <= distances.keys():
        return None
    floor = ~_bits(room.walls) & ((1 << room.num_rows * room.num_columns) - 1)
    alive, targets = _bits(distances), _bits(room.targets)
    newest_first = itertools.count(0, -1)
    bound = sum(distances[box] for box in state.boxes)
    frontier: list[_Node] = [
        (bound, next(newest_first), 1 << state.player, _bits(state.boxes), None)
    ]
    seen: set[tuple[int, int]] = set()
    while frontier and len(seen) < max_states:
        estimate, _, player, boxes, history = heapq.heappop(frontier)
        if boxes == targets:
            return _solution(room, state, history)
        reached = _flood(player, floor & ~boxes, room.num_columns)
        situation = (boxes, reached & -reached)
        if situation in seen:
            continue
        seen.add(situation)
        for direction, offset in room.offsets.items():
            pushable = boxes & _shift(reached, offset) & _shift(alive & ~boxes, -offset)
            while pushable:
                bit = pushable & -pushable
                pushable ^= bit
                box = bit.bit_length() - 1
                later = estimate + 1 - distances[box] + distances[box + offset]
                moved = boxes ^ bit | _shift(bit, offset)
                pushed = (box, direction, history)
                heapq.heappush(frontier, (later, next(newest_first), bit, moved, pushed))
    return None


_Node = tuple[int, int, int, int, Any]
"""Estimated pushes, tie-breaker, player, boxes, and the pushes so far as a linked list."""


def _bits(cells: Iterable[int]) -> int:
    return sum(1 << cell for cell in cells)


def _shift(cells: int, offset: int) -> int:
    return cells << offset if offset > 0 else cells >> -offset


def _flood(cells: int, free: int, num_columns: int) -> int:
    """All free cells that can be walked to."""
    while True:
        aside = cells << 1 | cells >> 1 | cells << num_columns | cells >> num_columns
        wider = (cells | aside) & free
        if wider == cells:
            return cells
        cells = wider


def _solution(room: Room, state: State, history: Any) -> Solution:
    """The linked pushes, last one first, as moves with the walks between them."""
    in_order: list[tuple[int, str]] = []
    while history is not None:
        box, direction, history = history
        in_order.append((box, direction))
    moves: list[str] = []
    for box, direction in reversed(in_order):
        offset = room.offsets[direction]
        moves += [*walk_to(box - offset, walks(room, state)), direction]
        state = State(box, state.boxes - {box} | {box + offset})
    return Solution(tuple(moves), len(in_order))


class LevelDemands(NamedTuple):
    """Requirements of a generated level; the size includes the walls around it."""

    num_rows: int
    num_columns: int
    num_boxes: int
    min_pushes: int
    max_solution_moves: int


def draw_level(demands: LevelDemands, generator: np.random.Generator) -> Board | None:
    """A random level that meets the demands, or None when this draw gave none."""
    end = _solved_room(demands, generator)
    if end is None:
        return None
    room, state = end
    state = _play_backwards(room, state, demands, generator)
    if state.boxes & room.targets:
        return None
    solution = solve(room, state, max_states=_MAX_STATES_OF_LEVEL)
    if solution is None or solution.num_pushes < demands.min_pushes:
        return None
    return draw_board(room, state) if len(solution.moves) <= demands.max_solution_moves else None


def _solved_room(
    demands: LevelDemands, generator: np.random.Generator
) -> tuple[Room, State] | None:
    """A random connected room with all boxes on targets."""
    num_rows, num_columns = demands.num_rows, demands.num_columns
    everywhere = frozenset(range(num_rows * num_columns))
    inside = [
        row * num_columns + column
        for row in range(1, num_rows - 1)
        for column in range(1, num_columns - 1)
    ]
    num_walls = int(generator.random() * _MAX_WALL_SHARE * len(inside))
    shuffled = [inside[index] for index in generator.permutation(len(inside))]
    floor = shuffled[num_walls:]
    if len(floor) < 2 * demands.num_boxes + 1:
        return None
    targets = frozenset(floor[: demands.num_boxes])
    room = Room(num_rows, num_columns, everywhere - set(floor), targets)
    if len(walks(room, State(floor[0], frozenset()))) < len(floor):
        return None
    return room, State(floor[demands.num_boxes], targets)


def _play_backwards(
    room: Room, state: State, demands: LevelDemands, generator: np.random.Generator
) -> State:
    """Pulls boxes about without coming back to a position; the player ends anywhere it can walk."""
    seen = {state.boxes}
    num_pulls = int(
        generator.integers(demands.min_pushes, _PULLS_PER_PUSH * demands.min_pushes + 1)
    )
    for _ in range(num_pulls):
        fresh = [after for after in _pulls(room, state) if after.boxes not in seen]
        if not fresh:
            break
        state = fresh[generator.integers(len(fresh))]
        seen.add(state.boxes)
    reached = sorted(walks(room, state))
    return State(reached[generator.integers(len(reached))], state.boxes)


def _pulls(room: Room, state: State) -> Iterator[State]:
    """The states one pull away: a push played backwards."""
    reached = walks(room, state)
    for box in sorted(state.boxes):
        for offset in room.offsets.values():
            pulled_to, player = box + offset, box + 2 * offset
            if pulled_to in reached and player not in room.walls and player not in state.boxes:
                yield State(player, state.boxes - {box} | {pulled_to})
