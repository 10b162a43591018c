"""Sokoban: push all boxes onto the targets.

Actions are Up, Down, Left and Right, several in a turn joined by `||`. Putting the last box on its
target ends the episode; pushing a box where it is stuck does not. Rewards are those of gym-sokoban,
which RAGEN uses. Deterministic: seeds are accepted and not used.
"""

import functools
from collections.abc import Callable

from pydantic import Field, model_validator

from ragen_apo.config.section import Section
from ragen_apo.environments.base import EnvironmentProperties, Reply, validate_options
from ragen_apo.environments.sokoban.levels import (
    LevelDemands,
    Room,
    State,
    draw_board,
    draw_level,
    move,
    pushes,
    read_level,
    solve,
    walk_to,
    walks,
)
from ragen_apo.environments.toolkit.game import GameEnvironment, digest_of_options
from ragen_apo.environments.toolkit.grid_text import (
    DIRECTIONS,
    Board,
    BoardLanguage,
    GridOptions,
    beside,
    distance,
    errand,
    move_tool,
    read_board,
    symmetric_key,
    view,
)
from ragen_apo.environments.toolkit.named_actions import Effect, NamedActionsGame, join_actions
from ragen_apo.environments.toolkit.scripted import RandomActions, policies_around
from ragen_apo.environments.toolkit.task_draws import SPLITS, Description, draw_tasks
from ragen_apo.plural import counted
from ragen_apo.types import Task

NAME = "sokoban"
TEXT_VERSION = 3
"""Raise it whenever the words of an observation, the dynamics or the keys of states change."""

LANGUAGE = BoardLanguage(
    words={
        "#": "wall",
        "_": "floor",
        "O": "target",
        "X": "box",
        "P": "player",
        "*": "box-on-target",
        "S": "player-on-target",
    },
    background="_",
    is_walled=True,
    player="PS",
    landmarks={"box": "X*"},
    errands={"box": ("push", "O*S")},
)
TEACHER_GOOD_SHARE = 0.2
"""The share of episodes that the teacher plays as the oracle; in the others it is `Hasty`."""


class SokobanRewards(Section):
    """What is added to the reward of a turn."""

    action: float = -0.1
    """Every action that is carried out, also one that is blocked."""
    box_on_target: float = 1.0
    """A box is pushed onto a target."""
    box_off_target: float = -1.0
    """A box is pushed off a target."""
    all_boxes: float = 10.0
    """The last box is on its target."""
    invalid_action: float = -0.1
    """A turn with a part that names no action."""

    def return_range(
        self, *, num_boxes: int, max_actions: int, max_turns: int
    ) -> tuple[float, float]:
        """Bounds of the return: the extremes over every course of boxes going on and off."""
        low = high = 0.0
        lows, highs = {0: 0.0}, {0: 0.0}
        for _ in range(max_actions):
            lows = self._after_action(lows, num_boxes, min)
            highs = self._after_action(highs, num_boxes, max)
            low, high = min(low, *lows.values()), max(high, *highs.values())
            lows.pop(num_boxes, None)
            highs.pop(num_boxes, None)
        invalid = max_turns * self.invalid_action
        return low + min(0.0, invalid), high + max(0.0, invalid)

    def _after_action(
        self, earned: dict[int, float], num_boxes: int, choose: Callable[[float, float], float]
    ) -> dict[int, float]:
        """The extreme of the return so far, by the number of boxes on targets."""
        after: dict[int, float] = {}
        for num_on, so_far in earned.items():
            for change in (-1, 0, 1):
                if 0 <= num_on + change <= num_boxes:
                    total = so_far + self.of_action(change, solved=num_on + change == num_boxes)
                    known = after.get(num_on + change, total)
                    after[num_on + change] = choose(known, total)
        return after

    def of_action(self, change: int, *, solved: bool) -> float:
        """The reward of an action that changes the number of boxes on targets by `change`."""
        placed = {1: self.box_on_target, 0: 0.0, -1: self.box_off_target}[change]
        return self.action + placed + (self.all_boxes if solved else 0.0)


class SokobanOptions(GridOptions):
    """The options of the environment `sokoban`."""

    num_rows: int = Field(default=6, ge=4, le=14)
    """The walls around the room included."""
    num_columns: int = Field(default=6, ge=4, le=14)
    """The walls included."""
    num_boxes: int = Field(default=1, ge=1, le=5)
    """And as many targets."""
    min_pushes: int = Field(default=2, ge=1, le=100)
    """Every level needs at least this many pushes."""
    max_solution_moves: int = Field(default=20, ge=1, le=1000)
    """Every level can be solved with at most this many moves, and in the actions of an episode."""
    reward: SokobanRewards = SokobanRewards()

    @model_validator(mode="after")
    def _levels_can_be_solved(self) -> "SokobanOptions":
        if self.min_pushes > self.max_solution_moves:
            raise ValueError("expected min_pushes to be at most max_solution_moves")
        self.require_actions(self.min_pushes, for_what=f"a level of min_pushes {self.min_pushes}")
        return self

    @property
    def demands(self) -> LevelDemands:
        """What is asked of a level."""
        demands = LevelDemands(*(getattr(self, name) for name in LevelDemands._fields))
        most = min(self.max_solution_moves, self.max_actions_of_episode)
        return demands._replace(max_solution_moves=most)


class SokobanWorld:
    """One level in progress."""

    def __init__(self, options: SokobanOptions, room: Room, state: State) -> None:
        self._options, self._room, self._state = options, room, state

    def act(self, action: str) -> Effect:
        before = self._state
        self._state = move(self._room, before, action)
        targets = self._room.targets
        change = len(self._state.boxes & targets) - len(before.boxes & targets)
        is_solved = self._state.boxes == targets
        reward = self._options.reward.of_action(change, solved=is_solved)
        changed = self._state != before
        return Effect(reward=reward, ended=is_solved, success=is_solved, changed=changed)

    def view(self) -> str:
        return view(draw_board(self._room, self._state), self._options, LANGUAGE)

    def key(self) -> str:
        return f"{self._state.player}@{','.join(map(str, sorted(self._state.boxes)))}"


def make_sokoban(**options: object) -> GameEnvironment:
    """The environment `sokoban`; raises ConfigError for options it does not accept."""
    checked = validate_options(SokobanOptions, options)
    of_errands = (
        " Below the board, box: is the way to a box, and push its way to the nearest free target."
        if checked.surroundings
        else ""
    )
    properties = EnvironmentProperties(
        name=NAME,
        version=f"{NAME}-{TEXT_VERSION}-{checked.digest()}",
        reward_version=digest_of_options(checked.reward),
        deterministic=True,
        return_range=checked.reward.return_range(
            num_boxes=checked.num_boxes,
            max_actions=checked.max_actions_of_episode,
            max_turns=checked.max_turns,
        ),
        splits=SPLITS,
        rules=(
            f"You push boxes onto targets. {checked.actions_in_words('Right || Up')}Walking into a "
            "box pushes it if the cell behind it is free; boxes cannot be pulled. "
            f"{LANGUAGE.rules(checked.observation)}{of_errands}"
        ),
        tools=(
            move_tool("Walk, and push a box that is in the way.", checked.max_actions_per_turn),
        ),
    )
    return GameEnvironment(
        properties=properties,
        tasks=draw_tasks(
            NAME,
            draw_level,
            (checked.demands,),
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
            whole_episodes=True,
        ),
        max_turns=checked.max_turns,
    )


def _start(options: SokobanOptions, task: Task, seed: int) -> NamedActionsGame:
    room, state = read_level(task.payload["board"])
    if state.boxes & room.targets or len(state.boxes) != options.num_boxes:
        boxes = counted(options.num_boxes, "box", "boxes")
        raise ValueError(f"the level needs {boxes}, none of them on a target")
    rules = options.action_rules(invalid_reward=options.reward.invalid_action)
    world = SokobanWorld(options, room, state)
    return NamedActionsGame(world, rules, instruction=task.instruction)


def _description(board: Board) -> Description:
    room, _ = read_level(board)
    num_boxes = len(room.targets)
    targets = "the box onto the target" if num_boxes == 1 else "all boxes onto targets"
    return Description(
        instruction=f"Push {targets}.",
        category=f"{room.num_rows}x{room.num_columns}, boxes: {num_boxes}",
        payload={"board": list(board)},
    )


class _Mover:
    """Plans from the board in the observation; needs no payload."""

    def __init__(self, options: SokobanOptions) -> None:
        self._options = options
        self._fallback = RandomActions(tuple(DIRECTIONS), 1)

    def begin(self, task: Task, *, seed: int) -> None:
        self._fallback.begin(task, seed=seed)

    def act(self, observation: str) -> Reply:
        """The beginning of the plan, as far as a turn allows."""
        board = read_board(observation, self._options.observation, LANGUAGE)
        try:
            room, state = read_level(board or ())
        except ValueError:
            return self._fallback.act(observation)
        plan = self._plan(room, state) or [self._fallback.act(observation).action]
        moves = plan[: self._options.max_actions_per_turn]
        is_read = self._options.surroundings
        thought = self._read_out(room, state, plan) if is_read else _describe(room, state, moves)
        return Reply(thought=thought, action=join_actions(moves))

    def _read_out(self, room: Room, state: State, plan: list[str]) -> str:
        """The surroundings' lines on the box that is pushed next, on the direction straight to it
        and, if it differs, on the direction of the next move.
        """
        board = draw_board(room, state)
        player = room.cell(state.player)
        box = _box_in_hand(room, state, plan)
        told = errand(board, player, room.cell(box), "box", LANGUAGE)
        looked_at = dict.fromkeys([_straight(room, state.player, box), plan[0]])
        return " ".join([told, *(beside(board, player, look, LANGUAGE) for look in looked_at)])

    def _plan(self, room: Room, state: State) -> list[str]:
        raise NotImplementedError


class Oracle(_Mover):
    """Plays a solution with the fewest pushes."""

    def _plan(self, room: Room, state: State) -> list[str]:
        solution = solve(room, state)
        return list(solution.moves) if solution else []


class Heuristic(_Mover):
    """Makes the nearest push that brings a box nearer to a target, and looks no further."""

    def _plan(self, room: Room, state: State) -> list[str]:
        reached = walks(room, state)
        plans = [
            [*walk_to(box - room.offsets[direction], reached), direction]
            for box, direction in pushes(room, state, reached)
            if _to_target(room, box + room.offsets[direction]) < _to_target(room, box)
        ]
        return min(plans, key=len, default=[])


class Hasty(_Mover):
    """Goes straight at the nearest box that is on no target and pushes on, one move a turn.

    Of the surroundings it reads the cell ahead only.
    """

    def _plan(self, room: Room, state: State) -> list[str]:
        return [_straight(room, state.player, _nearest_loose_box(room, state))]

    def _read_out(self, room: Room, state: State, plan: list[str]) -> str:
        return beside(draw_board(room, state), room.cell(state.player), plan[0], LANGUAGE)


def _straight(room: Room, start: int, end: int) -> str:
    """The first direction from one cell to another: to its row, and then along it."""
    (row, column), (to_row, to_column) = room.cell(start), room.cell(end)
    if row != to_row:
        return "Down" if to_row > row else "Up"
    return "Right" if to_column > column else "Left"


def _to_target(room: Room, box: int) -> int:
    """The distance to the nearest target, whatever is between."""
    return min(distance(room.cell(box), room.cell(target)) for target in room.targets)


def _nearest_loose_box(room: Room, state: State) -> int:
    """The nearest box that is on no target, or any if the level is solved."""
    boxes = sorted(state.boxes - room.targets or state.boxes)
    return min(boxes, key=lambda box: distance(room.cell(state.player), room.cell(box)))


def _box_in_hand(room: Room, state: State, plan: list[str]) -> int:
    """The box that the plan pushes first; the nearest loose one if it pushes none."""
    for direction in plan:
        after = move(room, state, direction)
        if after.boxes != state.boxes:
            return next(iter(state.boxes - after.boxes))
        state = after
    return _nearest_loose_box(room, state)


def _describe(room: Room, state: State, moves: list[str]) -> str:
    """The moves in words: `walk`, `push`, `walk, push` and so on."""
    doing: list[str] = []
    for direction in moves:
        after = move(room, state, direction)
        word = "walk" if after.boxes == state.boxes else "push"
        doing += [word] if doing[-1:] != [word] else []
        state = after
    return ", ".join(doing)
