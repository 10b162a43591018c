import itertools
from collections import deque

import pytest

from ragen_apo.environments.base import Reply, ScriptedPolicy, TextEnvironment, make_environment
from ragen_apo.environments.human.play import HOW_TO, play
from ragen_apo.environments.sokoban.environment import (
    LANGUAGE,
    Hasty,
    SokobanOptions,
    SokobanRewards,
)
from ragen_apo.environments.sokoban.levels import (
    LevelDemands,
    Room,
    State,
    draw_board,
    draw_level,
    move,
    read_level,
    solve,
)
from ragen_apo.environments.toolkit.grid_text import DIRECTIONS, render, symmetric_key
from ragen_apo.errors import ConfigError
from ragen_apo.seeding import generator
from ragen_apo.types import Task, make_task

CORRIDOR = ("######", "#PX_O#", "######")
TWO_BOXES = ("######", "#PXO_#", "#_XO_#", "######")


FEW_TASKS = {"num_train_tasks": 1, "num_test_tasks": 15}


def task_of(board: tuple[str, ...]) -> Task:
    return make_task(
        environment="sokoban",
        instruction="Push the box onto the target.",
        split="train",
        category="",
        payload={"board": list(board)},
    )


def fewest_pushes(room: Room, start: State) -> int | None:
    """By breadth-first search over single moves, 0 for a step and 1 for a push."""
    fewest = {start: 0}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state.boxes == room.targets:
            return fewest[state]
        for direction in DIRECTIONS:
            after = move(room, state, direction)
            is_push = after.boxes != state.boxes
            if fewest[state] + is_push < fewest.get(after, 10**6):
                fewest[after] = fewest[state] + is_push
                (queue.append if is_push else queue.appendleft)(after)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("num_boxes", [1, 2])
def test_generated_levels_meet_their_demands_and_the_solver_counts_the_fewest_pushes(
    num_boxes: int,
) -> None:
    demands = LevelDemands(
        num_rows=6, num_columns=7, num_boxes=num_boxes, min_pushes=4, max_solution_moves=25
    )
    boards = [draw_level(demands, generator("test", number)) for number in range(150)]
    levels = [read_level(board) for board in boards if board]
    assert len(levels) > 10
    for room, state in levels:
        solution = solve(room, state)
        assert solution is not None
        assert solution.num_pushes == fewest_pushes(room, state) >= 4
        assert len(solution.moves) <= 25
        assert len(state.boxes) == num_boxes
        assert not state.boxes & room.targets
        played = state
        for direction in solution.moves:
            played = move(room, played, direction)
        assert played.boxes == room.targets


def test_the_solver_finds_nothing_where_brute_force_finds_nothing() -> None:
    """All ways to put a player and two boxes into a small room."""
    cells = [row * 5 + column for row in range(1, 4) for column in range(1, 4)]
    room = Room(5, 5, frozenset(range(25)) - set(cells), frozenset({6, 13}))
    num_unsolvable = 0
    for first, second, player in itertools.permutations(cells, 3):
        if first < second:
            state = State(player, frozenset({first, second}))
            solution, fewest = solve(room, state), fewest_pushes(room, state)
            assert (solution.num_pushes if solution else None) == fewest
            num_unsolvable += fewest is None
    assert num_unsolvable > 50


def test_a_board_is_read_back_as_it_was_drawn() -> None:
    for board in (CORRIDOR, TWO_BOXES, ("####", "#S*#", "#X_#", "####")):
        assert draw_board(*read_level(board)) == board


@pytest.mark.parametrize(
    "board",
    [
        (),
        ("####", "#PX#", "####"),  # a box without a target
        ("#####", "#XO_#", "#####"),  # nobody there
        ("#####", "#PXO_", "#####"),  # a hole in the wall
        ("#####", "#PXO#", "####"),
        ("#####", "#PX?#", "#####"),
    ],
)
def test_a_board_that_is_no_level_is_refused(board: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="board"):
        read_level(board)
    with pytest.raises(ConfigError, match="sokoban cannot set up task"):
        make_environment("sokoban", {}).reset(task_of(board), seed=0)


def test_rewards_are_those_of_the_configuration_and_the_last_box_ends_the_episode() -> None:
    environment = make_environment("sokoban", {})
    first, _ = environment.reset(task_of(CORRIDOR), seed=0)
    assert first.splitlines()[1:] == ["# # # # # #", "# P X _ O #", "# # # # # #"]
    observation, reward, terminated, _, info = environment.step("right||Left || RIGHT")
    # A push, a step back and a step forward.
    assert reward == pytest.approx(-0.3)
    assert observation.splitlines()[1] == "# _ P X O #"
    assert not terminated
    assert info == {}
    observation, reward, terminated, truncated, info = environment.step("Right || Up || Up")
    assert reward == pytest.approx(-0.1 + 1.0 + 10.0)  # the actions after the end do not count
    assert (terminated, truncated, info) == (True, False, {"success": True})
    assert observation.splitlines()[1] == "# _ _ P * #"


def test_pushing_a_box_off_its_target_costs_what_putting_it_there_earned() -> None:
    environment = make_environment("sokoban", {"num_boxes": 2})
    environment.reset(task_of(TWO_BOXES), seed=0)
    assert environment.step("Right")[1] == pytest.approx(0.9)  # -0.1 + 1
    assert environment.step("Right")[1] == pytest.approx(-1.1)  # -0.1 - 1: pushed beyond it


def test_invalid_parts_are_skipped_flagged_told_and_charged_once() -> None:
    environment = make_environment("sokoban", {"max_actions_per_turn": 2})
    environment.reset(task_of(CORRIDOR), seed=0)
    observation, reward, _, _, info = environment.step("fly || Right || dig")
    assert info["invalid_action"] is True
    assert observation.startswith(
        "Invalid action. Use Up, Down, Left, Right, up to 2 joined by ||."
    )
    assert reward == pytest.approx(-0.1 - 0.1)  # one action, one turn with invalid parts
    observation, _, _, _, info = environment.step("Up || Up || Right")
    assert set(info["flags"]) == {"too_many_actions", "no_effect"}
    assert "Only the first 2 actions were carried out." in observation


@pytest.mark.slow
@pytest.mark.parametrize(("options", "is_one_state"), [({}, True), ({"max_actions": 5}, False)])
def test_the_number_of_actions_is_in_the_key_where_it_is_limited(
    options: dict[str, object], is_one_state: bool
) -> None:
    environment = make_environment("sokoban", options)
    keys = []
    for action in ("Right", "Up || Right"):  # a wall is above
        environment.reset(task_of(CORRIDOR), seed=0)
        environment.step(action)
        keys.append(environment.state_key())
    assert (keys[0] == keys[1]) is is_one_state


def test_levels_that_no_episode_can_solve_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_pushes 2 takes at least 2 actions, .* has 1 at"):
        make_environment("sokoban", {"max_turns": 1, "max_actions_per_turn": 1})


@pytest.mark.slow
def test_the_limit_of_actions_truncates_in_the_middle_of_a_turn() -> None:
    environment = make_environment("sokoban", {"max_actions": 3, **FEW_TASKS})
    environment.reset(task_of(CORRIDOR), seed=0)
    _, reward, terminated, truncated, info = environment.step("Up || Up || Up || Right || Right")
    assert reward == pytest.approx(-0.3)
    assert (terminated, truncated, info["success"]) == (False, True, False)


def test_the_return_range_is_reached() -> None:
    scheme = SokobanRewards(invalid_action=-0.5)
    low, high = scheme.return_range(num_boxes=1, max_actions=3, max_turns=2)
    assert low == pytest.approx(3 * -0.1 + 2 * -0.5)
    assert high == pytest.approx(-0.1 + 1 + 10)
    generous = SokobanRewards(box_off_target=0.5, all_boxes=0.0, invalid_action=0.0)
    # One box on, off and on again, then the other: 0.9 + 0.4 + 0.9 + 0.9.
    assert generous.return_range(num_boxes=2, max_actions=4, max_turns=4)[1] == pytest.approx(3.1)


def test_no_level_is_a_turned_or_mirrored_image_of_another_in_either_split() -> None:
    environment = make_environment("sokoban", {})
    keys = [
        symmetric_key(task.payload["board"])
        for split in ("train", "test")
        for task in environment.tasks(split)
    ]
    assert len(set(keys)) == len(keys) == 500


def test_demands_that_no_level_meets_are_an_error_that_says_so() -> None:
    few = {"num_train_tasks": 1, "num_test_tasks": 1}  # the number of draws depends on them
    with pytest.raises(ConfigError, match="ask for fewer tasks"):
        make_environment("sokoban", {"num_rows": 4, "num_columns": 4, "min_pushes": 9, **few})
    with pytest.raises(ConfigError, match="min_pushes"):
        make_environment("sokoban", {"min_pushes": 30})


@pytest.mark.slow
def test_the_same_level_in_every_rendering_is_the_same_task_and_another_version() -> None:
    renderings = ("grid", "words", "coordinates", "grid_and_coordinates")
    worlds = [make_environment("sokoban", {"observation": choice}) for choice in renderings]
    for world in worlds:
        assert world.tasks("train") == worlds[0].tasks("train")
    assert len({world.properties.version for world in worlds}) == 4
    more = make_environment("sokoban", {"num_train_tasks": 500, "num_test_tasks": 50})
    assert more.properties.version == worlds[0].properties.version
    assert list(more.tasks("train"))[:400] == list(worlds[0].tasks("train"))


def turns_of(
    environment: TextEnvironment, policy: ScriptedPolicy, task: Task, *, seed: int
) -> tuple[list[tuple[str, Reply]], bool]:
    """What the policy read and answered in one episode, and whether it succeeded."""
    policy.begin(task, seed=seed)
    observation, _ = environment.reset(task, seed=seed)
    turns: list[tuple[str, Reply]] = []
    ended, info = False, {}
    while not ended:
        turns.append((observation, policy.act(observation)))
        observation, _, terminated, truncated, info = environment.step(turns[-1][1].action)
        ended = terminated or truncated
    return turns, info["success"]


def success_of(environment: TextEnvironment, name: str) -> float:
    tasks = environment.tasks("test")
    policy = environment.scripted_policies()[name]()
    wins = [turns_of(environment, policy, task, seed=seed)[1] for seed, task in enumerate(tasks)]
    return sum(wins) / len(tasks)


ONE_STEP_A_TURN = {
    "num_rows": 5,
    "min_pushes": 1,
    "max_solution_moves": 8,
    "max_actions_per_turn": 1,
    "max_turns": 12,
    "surroundings": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ONE_STEP_A_TURN])
def test_the_teacher_is_mediocre_and_the_baselines_lie_where_they_should(
    options: dict[str, object],
) -> None:
    environment = make_environment("sokoban", options)
    success = {name: success_of(environment, name) for name in environment.scripted_policies()}
    assert success["random"] < 0.2 < success["teacher"] < 0.5 < success["oracle"] == 1.0, success
    assert success["teacher"] < success["heuristic"] < 1.0, success


@pytest.mark.slow
@pytest.mark.parametrize("num_boxes", [1, 2, 3])
@pytest.mark.parametrize("name", ["teacher", "oracle", "heuristic"])
def test_every_statement_of_a_thought_stands_in_the_observation(name: str, num_boxes: int) -> None:
    """The last one is about the direction that is taken; the hasty say no more, the others begin
    with a box.
    """
    options = {**ONE_STEP_A_TURN, "num_rows": 6, "num_columns": 7, "max_solution_moves": 20}
    environment = make_environment("sokoban", {**options, **FEW_TASKS, "num_boxes": num_boxes})
    lengths = set[int]()
    for seed, task in enumerate(environment.tasks("test")):
        policy = environment.scripted_policies()[name]()
        for observation, reply in turns_of(environment, policy, task, seed=seed)[0]:
            told = [f"{part}." for part in reply.thought[:-1].split(". ")]
            stated = observation.splitlines()
            looks = [part for part in told if part in stated[-num_boxes - 1]]
            assert told[-1].startswith(f"{reply.action}: ")
            assert told[: -len(looks)] == [part for part in told if part.startswith("box: ")]
            assert set(told) <= {*looks, *stated}
            lengths.add(len(told))
    assert lengths == ({1, 2, 3} if name == "teacher" else {2, 3})


def thought_and_action(
    board: tuple[str, ...], name: str, *, seed: int = 0, **options: object
) -> tuple[str, str]:
    """What a scripted policy answers to a first observation."""
    environment = make_environment("sokoban", {"surroundings": True, **FEW_TASKS, **options})
    task = task_of(board)
    policy = environment.scripted_policies()[name]()
    policy.begin(task, seed=seed)
    reply = policy.act(environment.reset(task, seed=seed)[0])
    return reply.thought, reply.action


def test_a_thought_looks_straight_at_the_box_and_then_where_the_player_goes() -> None:
    above_the_target = ("#####", "#___#", "#PX_#", "#_O_#", "#####")
    assert thought_and_action(above_the_target, "oracle") == (
        "box: 1 right; push 1 down. Right: box. Up: floor.",
        "Up || Right || Down",
    )
    pushed = ("######", "#PX_O#", "######")
    assert thought_and_action(pushed, "oracle") == (
        "box: 1 right; push 2 right. Right: box.",
        "Right || Right",
    )
    without = {"surroundings": False, "max_actions_per_turn": 5}
    assert thought_and_action(pushed, "oracle", **without) == ("push", "Right || Right")


@pytest.mark.slow
def test_a_thought_speaks_of_the_box_that_is_pushed_next_and_not_of_the_nearest() -> None:
    board = ("######", "#___P#", "#_XOX#", "#___O#", "######")
    assert thought_and_action(board, "oracle", num_boxes=2, max_actions_per_turn=1) == (
        "box: 1 down, 2 left; push 1 right. Down: box. Left: floor.",
        "Left",
    )
    options = SokobanOptions(surroundings=True, num_boxes=2, max_actions_per_turn=1)
    environment = make_environment("sokoban", {"surroundings": True, "num_boxes": 2})
    reply = Hasty(options).act(environment.reset(task_of(board), seed=0)[0])
    assert (reply.thought, reply.action) == ("Down: box.", "Down")


def test_the_rules_explain_the_ways_below_the_board_where_there_are_any() -> None:
    for is_shown in (True, False):
        properties = make_environment("sokoban", {"surroundings": is_shown}).properties
        assert ("box: is the way to a box" in properties.rules) is is_shown


def hasty_way(board: tuple[str, ...], *, num_turns: int) -> list[str]:
    """The moves of the poor half of the teacher, which needs no environment to play."""
    room, state = read_level(board)
    policy = Hasty(SokobanOptions())
    actions: list[str] = []
    for _ in range(num_turns):
        actions.append(policy.act(render(draw_board(room, state), "grid", LANGUAGE)).action)
        state = move(room, state, actions[-1])
    return actions


def test_where_there_is_no_way_a_move_is_drawn_and_the_thought_looks_there() -> None:
    in_a_corner = ("#####", "#X__#", "#_P_#", "#__O#", "#####")
    drawn = {
        thought_and_action(in_a_corner, "oracle", seed=seed, max_actions_per_turn=1)
        for seed in range(20)
    }
    assert {action for _, action in drawn} == set(DIRECTIONS)
    assert all(f" {action}: " in thought for thought, action in drawn)


def test_the_hasty_go_to_the_row_of_the_box_and_push_on_into_walls() -> None:
    board = ("######", "#P___#", "#_X__#", "#___O#", "######")
    assert hasty_way(board, num_turns=5) == ["Down", "Right", "Right", "Right", "Right"]
    beside_a_finished_box = ("#######", "#O_X_P#", "#____*#", "#######")
    assert hasty_way(beside_a_finished_box, num_turns=3) == ["Left"] * 3
    behind_a_wall = ("######", "#P___#", "##X__#", "#___O#", "######")
    assert hasty_way(behind_a_wall, num_turns=3) == ["Down", "Down", "Down"]


@pytest.mark.slow
def test_the_teacher_is_careful_or_hasty_for_a_whole_episode() -> None:
    environment = make_environment("sokoban", ONE_STEP_A_TURN)
    teacher = environment.scripted_policies()["teacher"]()
    careful = list[bool]()
    for seed, task in enumerate(environment.tasks("test")):
        turns, _ = turns_of(environment, teacher, task, seed=seed)
        (is_careful,) = {reply.thought.startswith("box: ") for _, reply in turns}
        careful.append(is_careful)
    assert 0.1 < sum(careful) / len(careful) < 0.3


def test_a_person_can_play() -> None:
    lines, shown = iter(["Right || Right", "quit"]), []
    world = make_environment("sokoban", {})
    episode = play(world, task_of(CORRIDOR), read=lambda _: next(lines), write=shown.append)
    assert episode.success
    assert shown[0] == f"{world.properties.rules}\n{HOW_TO}\n"


def test_every_level_can_be_solved_in_the_actions_of_an_episode() -> None:
    options = {"max_actions": 6, "num_train_tasks": 5, "num_test_tasks": 20}
    assert success_of(make_environment("sokoban", options), "oracle") == 1
