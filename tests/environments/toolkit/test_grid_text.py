import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.frozen_lake import LANGUAGE as LAKE_LANGUAGE
from ragen_apo.environments.sokoban.environment import LANGUAGE as SOKOBAN_LANGUAGE
from ragen_apo.environments.toolkit.grid_text import (
    Board,
    BoardLanguage,
    GridOptions,
    Observation,
    read_board,
    render,
    surroundings,
    symmetric_key,
    view,
)
from tests.sweeps import quick_first

RENDERINGS: list[Observation] = ["grid", "words", "coordinates", "grid_and_coordinates"]


@st.composite
def boards(draw: st.DrawFn, symbols: str, *, is_walled: bool) -> Board:
    num_rows, num_columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.text(alphabet=symbols, min_size=num_columns, max_size=num_columns)
    rows = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    if not is_walled:
        return tuple(rows)
    wall = "#" * (num_columns + 2)
    return (wall, *(f"#{row}#" for row in rows), wall)


@pytest.mark.parametrize("observation", quick_first(RENDERINGS))
@given(data=st.data())
def test_reading_is_the_inverse_of_rendering(observation: Observation, data: st.DataObject) -> None:
    for language in (SOKOBAN_LANGUAGE, LAKE_LANGUAGE):
        symbols = "".join(language.words)
        board = data.draw(boards(symbols, is_walled=language.is_walled))
        text = f"TASK: Do it.\n{render(board, observation, language)}"
        assert read_board(text, observation, language) == board


@pytest.mark.parametrize("observation", RENDERINGS)
def test_a_text_without_a_board_gives_none(observation: Observation) -> None:
    assert read_board("The episode is over.", observation, SOKOBAN_LANGUAGE) is None


def test_renderings_are_what_the_documentation_shows() -> None:
    board = ("####", "#P_#", "#XO#", "####")
    assert render(board, "grid", SOKOBAN_LANGUAGE).splitlines()[1] == "# P _ #"
    assert render(board, "words", SOKOBAN_LANGUAGE).splitlines()[2] == "wall box target wall"
    assert render(board, "coordinates", SOKOBAN_LANGUAGE).splitlines() == [
        "4 rows, 4 columns",
        "target: (2, 2)",
        "box: (2, 1)",
        "player: (1, 1)",
    ]


def test_turned_and_mirrored_boards_have_one_key() -> None:
    board = ("ab", "cd", "ef")
    images = [board, ("eca", "fdb"), ("ef", "cd", "ab"), ("ba", "dc", "fe"), ("ace", "bdf")]
    assert len({symmetric_key(image) for image in images}) == 1
    assert symmetric_key(("ab", "cd", "fe")) != symmetric_key(board)


def test_surroundings_say_what_is_next_to_the_player_and_the_way_to_landmarks() -> None:
    lake = ("___", "OP_", "_OG")
    assert surroundings(lake, LAKE_LANGUAGE).splitlines() == [
        "Up: ice. Down: hole. Left: hole. Right: ice.",
        "goal: 1 down, 1 right.",
    ]
    room = ("#####", "#X_O#", "#_SX#", "#O__#", "#####")
    assert surroundings(room, SOKOBAN_LANGUAGE).splitlines() == [
        "Up: floor. Down: floor. Left: floor. Right: box.",
        "box: 1 up, 1 left; push 2 right.",
        "box: 1 right; push 1 up.",
    ]
    assert surroundings(("__", "_*"), LAKE_LANGUAGE).splitlines() == [
        "Up: ice. Down: border. Left: ice. Right: border.",
        "goal: here.",
    ]


def test_a_box_goes_to_the_nearest_target_without_another_box() -> None:
    room = ("######", "#P*XO#", "######")
    assert surroundings(room, SOKOBAN_LANGUAGE).splitlines()[1:] == [
        "box: 1 right; push here.",
        "box: 2 right; push 1 right.",
    ]
    nowhere = ("#####", "#P*X#", "#####")
    assert surroundings(nowhere, SOKOBAN_LANGUAGE).splitlines()[2] == "box: 2 right."


@pytest.mark.parametrize("observation", RENDERINGS)
@pytest.mark.parametrize(
    ("board", "language"),
    [
        (("P_G", "O__"), LAKE_LANGUAGE),
        (("####", "#PX#", "#_O#", "####"), SOKOBAN_LANGUAGE),
    ],
)
def test_a_board_is_read_back_with_its_surroundings_below(
    board: Board, language: BoardLanguage, observation: Observation
) -> None:
    options = GridOptions(observation=observation, surroundings=True)
    text = view(board, options, language)
    assert text == f"{render(board, observation, language)}\n{surroundings(board, language)}"
    assert read_board(text, observation, language) == board
    without = options.model_copy(update={"surroundings": False})
    assert view(board, without, language) == render(board, observation, language)
