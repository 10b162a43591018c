"""FrozenLake: cross a lake to the goal without falling into a hole.

The dynamics are those of Gymnasium's FrozenLake-v1. On slippery ice an action succeeds with
probability `success_rate`. Otherwise the player slips to one of the two sides, with equal
probability. The border stops the player. Reaching the goal or a hole ends the episode. Maps are
random, but always have a way to the goal that the actions of an episode are enough for.

Slips are a function of the episode's seed and the number of actions so far. Without slippery ice
the lake is deterministic and seeds are not used.
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field, model_validator

from ragen_apo.config.section import Section
from ragen_apo.environments.base import EnvironmentProperties, Reply, validate_options
from ragen_apo.environments.toolkit.game import GameEnvironment, chance, digest_of_options
from ragen_apo.environments.toolkit.grid_text import (
    DIRECTIONS,
    Board,
    BoardLanguage,
    Cell,
    GridOptions,
    beside,
    move_tool,
    read_board,
    symmetric_key,
    view,
)
from ragen_apo.environments.toolkit.named_actions import Effect, NamedActionsGame, join_actions
from ragen_apo.environments.toolkit.scripted import policies_around
from ragen_apo.environments.toolkit.task_draws import SPLITS, Description, draw_tasks
from ragen_apo.types import Task

NAME = "frozen_lake"
TEXT_VERSION = 2
"""Raise it whenever the words of an observation, the dynamics or the keys of states change."""

PLAYER, ICE, HOLE, GOAL, PLAYER_IN_HOLE, PLAYER_AT_GOAL = "P_OGX*"
PLAYER_ON = {ICE: PLAYER, HOLE: PLAYER_IN_HOLE, GOAL: PLAYER_AT_GOAL}
LANGUAGE = BoardLanguage(
    words={
        PLAYER: "player",
        ICE: "ice",
        HOLE: "hole",
        GOAL: "goal",
        PLAYER_IN_HOLE: "player-in-hole",
        PLAYER_AT_GOAL: "player-at-goal",
    },
    background=ICE,
    is_walled=False,
    player=PLAYER + PLAYER_IN_HOLE + PLAYER_AT_GOAL,
    landmarks={"goal": GOAL + PLAYER_AT_GOAL},
)
LOOKS = ("Down", "Right", "Left", "Up")
"""The order in which scripted policies look around; the goal lies down and to the right."""
CLOCKWISE = ("Up", "Right", "Down", "Left")
TEACHER_GOOD_SHARE = 0.3
"""How often the teacher plays as the oracle; otherwise it does not look where it goes."""


class FrozenLakeRewards(Section):
    """What is added to the reward of a turn."""

    goal: float = 1.0
    """The goal is reached."""
    hole: float = 0.0
    """The agent falls into a hole."""
    ice: float = 0.0
    """Every action that ends on the ice."""
    invalid_action: float = -0.1
    """A turn with a part that names no action."""

    def return_range(self, *, max_actions: int, max_turns: int) -> tuple[float, float]:
        """Bounds of the return: some actions on the ice, the last one perhaps to an end."""
        ends = [
            num_actions * self.ice + last
            for num_actions in (0, max_actions - 1)
            for last in (0.0, self.ice, self.goal, self.hole)
        ]
        invalid = max_turns * self.invalid_action
        return min(0.0, *ends) + min(0.0, invalid), max(0.0, *ends) + max(0.0, invalid)


class FrozenLakeOptions(GridOptions):
    """The options of the environment `frozen_lake`."""

    max_turns: int = Field(default=20, ge=1, le=1000)
    """Truncates an episode after this many turns."""
    size: int = Field(default=4, ge=3, le=12)
    """Rows and columns."""
    frozen_share: float = Field(default=0.8, gt=0.0, lt=1.0)
    """The probability that a cell is ice and no hole."""
    slippery: bool = True
    """Whether an action may go to a side; false makes the lake deterministic."""
    success_rate: float = Field(default=1 / 3, ge=0.0, le=1.0)
    """How often an action on slippery ice goes where it says."""
    reward: FrozenLakeRewards = FrozenLakeRewards()

    @model_validator(mode="after")
    def _goal_can_be_reached(self) -> "FrozenLakeOptions":
        self.require_actions(
            2 * (self.size - 1), for_what=f"the way to the goal on a lake of size {self.size}"
        )
        return self

    @property
    def certainty(self) -> float:
        """The probability that an action goes where it says."""
        return self.success_rate if self.slippery else 1.0


def neighbour(cell: Cell, direction: str, size: int) -> Cell:
    """The cell one step away, or the same one at the border."""
    down, right = DIRECTIONS[direction]
    return min(max(cell[0] + down, 0), size - 1), min(max(cell[1] + right, 0), size - 1)


def outcomes(direction: str, certainty: float) -> list[tuple[float, str]]:
    """(probability, direction): the action itself, then the sides counter- and clockwise."""
    index = CLOCKWISE.index(direction)
    aside = (1.0 - certainty) / 2.0
    left, right = CLOCKWISE[index - 1], CLOCKWISE[(index + 1) % 4]
    return [(certainty, direction), (aside, left), (aside, right)]


class FrozenLakeWorld:
    """One crossing in progress."""

    def __init__(self, options: FrozenLakeOptions, lake: Board, *, seed: int) -> None:
        self._options, self._lake, self._seed = options, lake, seed
        self._cell: Cell = (0, 0)
        self._num_actions = 0

    def act(self, action: str) -> Effect:
        before = self._cell
        self._cell = neighbour(before, self._direction(action), len(self._lake))
        self._num_actions += 1
        there = self._lake[self._cell[0]][self._cell[1]]
        rewards = self._options.reward
        return Effect(
            reward={GOAL: rewards.goal, HOLE: rewards.hole}.get(there, rewards.ice),
            ended=there in (GOAL, HOLE),
            success=there == GOAL,
            changed=self._cell != before,
        )

    def view(self) -> str:
        return view(with_player(self._lake, self._cell), self._options, LANGUAGE)

    def key(self) -> str:
        """The cell and, as slips depend on it, the number of actions on slippery ice."""
        so_far = f"{self._num_actions}:" if self._options.slippery else ""
        return f"{so_far}{self._cell[0]},{self._cell[1]}"

    def _direction(self, action: str) -> str:
        if not self._options.slippery:
            return action
        draw = chance(self._seed, "frozen-lake-slip", self._num_actions)
        for probability, direction in outcomes(action, self._options.certainty):
            if draw < probability:
                return direction
            draw -= probability
        return action


def with_player(lake: Board, cell: Cell) -> Board:
    """The map with the player's symbol put where the player is."""
    row, column = cell
    line = lake[row]
    symbol = PLAYER_ON[line[column]]
    return (*lake[:row], line[:column] + symbol + line[column + 1 :], *lake[row + 1 :])


def without_player(board: Board) -> tuple[Board, Cell] | None:
    """The map and where the player is; None if there is no player on the board."""
    for row, line in enumerate(board):
        for below, symbol in PLAYER_ON.items():
            if symbol in line:
                lake = (*board[:row], line.replace(symbol, below), *board[row + 1 :])
                return lake, (row, line.index(symbol))
    return None


def make_frozen_lake(**options: object) -> GameEnvironment:
    """The environment `frozen_lake`; raises ConfigError for options it does not accept."""
    checked = validate_options(FrozenLakeOptions, options)
    slips = (
        f"The ice is slippery: a step goes where it should with probability "
        f"{checked.success_rate:.2f}, otherwise to one of the two sides. "
        if checked.slippery
        else ""
    )
    properties = EnvironmentProperties(
        name=NAME,
        version=f"{NAME}-{TEXT_VERSION}-{checked.digest()}",
        reward_version=digest_of_options(checked.reward),
        deterministic=checked.certainty == 1,
        return_range=checked.reward.return_range(
            max_actions=checked.max_actions_of_episode, max_turns=checked.max_turns
        ),
        splits=SPLITS,
        rules=(
            "You cross a frozen lake to the goal; falling into a hole ends the episode. "
            f"{checked.actions_in_words('Right || Down')}{slips}"
            f"{LANGUAGE.rules(checked.observation)}"
        ),
        tools=(move_tool("Walk over the ice.", checked.max_actions_per_turn),),
    )
    return GameEnvironment(
        properties=properties,
        tasks=draw_tasks(
            NAME,
            draw_lake,
            (checked.size, checked.frozen_share, checked.max_actions_of_episode),
            content=symmetric_key,
            describe=_description,
            counts=checked.counts,
        ),
        start=functools.partial(_start, checked),
        policies=policies_around(
            functools.partial(Oracle, checked),
            functools.partial(Heuristic, checked),
            names=tuple(DIRECTIONS),
            max_per_turn=checked.max_actions_per_turn,
            teacher_good_share=TEACHER_GOOD_SHARE,
            make_poor=functools.partial(Hasty, checked),
        ),
        max_turns=checked.max_turns,
    )


def _start(options: FrozenLakeOptions, task: Task, seed: int) -> NamedActionsGame:
    lake = tuple(task.payload["map"])
    if len(lake) != options.size or any(len(row) != options.size for row in lake):
        raise ValueError(f"the map needs {options.size} rows and columns")
    if set("".join(lake)) - {ICE, HOLE, GOAL} or moves_to_goal(lake) is None:
        raise ValueError(f"the map needs a way over {ICE} between {HOLE} to {GOAL}")
    world = FrozenLakeWorld(options, lake, seed=seed)
    rules = options.action_rules(invalid_reward=options.reward.invalid_action)
    return NamedActionsGame(world, rules, instruction=task.instruction)


def _description(lake: Board) -> Description:
    return Description(
        instruction="Cross the ice to the goal.",
        category=f"{len(lake)}x{len(lake)}",
        payload={"map": list(lake)},
    )


def draw_lake(
    size: int, frozen_share: float, max_moves: int, generator: np.random.Generator
) -> Board | None:
    """A random map from the top left to the goal at the bottom right; None if there is no way of at
    most `max_moves`.
    """
    is_hole = generator.random((size, size)) >= frozen_share
    is_hole[0, 0] = is_hole[-1, -1] = False
    rows = ["".join(HOLE if hole else ICE for hole in row) for row in is_hole]
    rows[-1] = rows[-1][:-1] + GOAL
    lake = tuple(rows)
    moves = moves_to_goal(lake)
    return lake if moves is not None and moves <= max_moves else None


def moves_to_goal(lake: Board) -> int | None:
    """Moves of a shortest way from the top left to the goal; None if there is no way."""
    if lake[0][0] == HOLE:
        return None
    moves: dict[Cell, int] = {(0, 0): 0}
    queue = deque(moves)
    while queue:
        cell = queue.popleft()
        if lake[cell[0]][cell[1]] == GOAL:
            return moves[cell]
        for direction in CLOCKWISE:
            ahead = neighbour(cell, direction, len(lake))
            if ahead not in moves and lake[ahead[0]][ahead[1]] != HOLE:
                moves[ahead] = moves[cell] + 1
                queue.append(ahead)
    return None


Play = tuple[str, int]
"""An action and how often it is repeated in one turn."""


@functools.lru_cache(maxsize=1024)
def best_plays(
    lake: Board, certainty: float, *, max_repeats: int, num_turns: int
) -> tuple[Mapping[Cell, Play], ...]:
    """By the number of turns left, for each cell: the play most likely to reach the goal in time.

    Value iteration over turns that repeat one action. With more turns left a play changes only if
    that raises the probability, so a certain way is a shortest one.
    """
    size = len(lake)
    cells = [(row, column) for row in range(size) for column in range(size)]
    moved = {direction: _transitions(lake, certainty, direction) for direction in CLOCKWISE}
    matrices = {
        (direction, repeats): np.linalg.matrix_power(moved[direction], repeats)
        for repeats in range(1, max_repeats + 1)
        for direction in CLOCKWISE
    }
    values = np.array([float(lake[row][column] == GOAL) for row, column in cells])
    best: list[Play] = [("Right", 1)] * len(cells)
    by_turns = [dict(zip(cells, best, strict=True))]
    for _ in range(num_turns):
        reached = values.copy()
        for play, matrix in matrices.items():
            value = matrix @ reached
            for index in np.flatnonzero(value > values + 1e-12):
                values[index], best[index] = value[index], play
        by_turns.append(dict(zip(cells, best, strict=True)))
    return tuple(by_turns)


def _transitions(lake: Board, certainty: float, direction: str) -> np.ndarray:
    """The probability of each cell, in reading order, after one action from each cell."""
    size = len(lake)
    chances = np.zeros((size * size, size * size))
    for index in range(size * size):
        cell = divmod(index, size)
        if lake[cell[0]][cell[1]] in (GOAL, HOLE):
            chances[index, index] = 1.0
            continue
        for probability, towards in outcomes(direction, certainty):
            row, column = neighbour(cell, towards, size)
            chances[index, row * size + column] += probability
    return chances


class _Walker:
    """Plans from the map in the observation; needs no payload."""

    def __init__(self, options: FrozenLakeOptions) -> None:
        self._options = options

    def begin(self, task: Task, *, seed: int) -> None:
        self._num_turns = 0

    def act(self, observation: str) -> Reply:
        """The next step, or several where the ice is not slippery."""
        board = read_board(observation, self._options.observation, LANGUAGE)
        found = without_player(board or ())
        if found is None:
            return Reply(thought="try", action="Right")
        lake, cell = found
        plan = self._plan(lake, cell)
        self._num_turns += 1
        return Reply(thought=self._thought(lake, cell, plan), action=join_actions(plan))

    def _thought(self, lake: Board, cell: Cell, plan: Sequence[str]) -> str:
        """The player's cell; or, if the surroundings are shown, what lies in the directions of
        `LOOKS` up to the one that is taken.
        """
        if not self._options.surroundings:
            return f"at {cell[0]} {cell[1]}"
        board = with_player(lake, cell)
        looked_at = LOOKS[: LOOKS.index(plan[0]) + 1]
        return " ".join(beside(board, cell, direction, LANGUAGE) for direction in looked_at)

    def _plan(self, lake: Board, cell: Cell) -> Sequence[str]:
        raise NotImplementedError


class Oracle(_Walker):
    """A shortest way; on slippery ice the best of the plays that repeat one action in a turn.

    It plans for the turns that are left. With `max_actions`, which it does not look at, slippery
    ice has better plays.
    """

    def _plan(self, lake: Board, cell: Cell) -> Sequence[str]:
        options = self._options
        most = options.max_actions_per_turn
        if options.slippery:
            plays = best_plays(
                lake, options.certainty, max_repeats=most, num_turns=options.max_turns
            )
            direction, repeats = plays[max(1, options.max_turns - self._num_turns)][cell]
            return [direction] * repeats
        certain = best_plays(lake, 1.0, max_repeats=1, num_turns=options.size**2)[-1]
        plan: list[str] = []
        while lake[cell[0]][cell[1]] == ICE and len(plan) < most:
            plan.append(certain[cell][0])
            cell = neighbour(cell, plan[-1], len(lake))
        return plan


class Heuristic(_Walker):
    """Down or Right, whichever leads to no hole, one step a turn; it never goes back."""

    def _plan(self, lake: Board, cell: Cell) -> Sequence[str]:
        for direction in ("Down", "Right"):
            row, column = neighbour(cell, direction, len(lake))
            if (row, column) != cell and lake[row][column] != HOLE:
                return [direction]
        return ["Left"]


class Hasty(_Walker):
    """Down to the border and then Right, whatever is there, one step a turn."""

    def _plan(self, lake: Board, cell: Cell) -> Sequence[str]:
        return ["Down" if cell[0] < len(lake) - 1 else "Right"]
