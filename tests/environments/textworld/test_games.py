"""How the games of a folder become tasks. `tests/interop/test_textworld.py` plays real games."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.textworld.games import games_in
from ragen_apo.environments.textworld.grammars import require_no_code
from ragen_apo.errors import ConfigError, EnvironmentDataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two splits with a game of TextWorld and one of ALFWorld each, and what is no game."""
    for number, split in enumerate(("train", "valid_unseen")):
        compiled(tmp_path / split / "coin-3" / f"{number}.z8")
        planned(tmp_path / split / "look_at_obj_in_light-Mug-None-Desk-1" / "trial_T1", str(number))
    (tmp_path / "empty").mkdir()
    (tmp_path / "train" / "notes.txt").write_text("no game")
    return tmp_path


def compiled(path: Path, objective: object = "Find\n the  coin.", **quest: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(path.stem.encode())
    quests = [{"reward": 0, "repeatable": False}, {"reward": 1, "repeatable": False, **quest}]
    path.with_suffix(".json").write_text(json.dumps({"objective": objective, "quests": quests}))
    return path


def planned(folder: Path, problem: str, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    grammar = '{"rhs": "Your task is to: put a mug in desk."}'
    game = {"grammar": grammar, "pddl_problem": problem, "solvable": True, **changes}
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(game))
    return path


def test_subfolders_are_splits_and_folders_below_them_categories(folder: Path) -> None:
    tasks = games_in(folder).tasks
    assert {split: {task.category for task in found} for split, found in tasks.items()} == {
        "train": {"coin", "look_at_obj_in_light"},
        "valid_unseen": {"coin", "look_at_obj_in_light"},
    }
    assert {task.instruction for task in tasks["train"]} == {"Find the coin.", "put a mug in desk."}


def test_the_first_tasks_of_a_split_are_of_all_categories(tmp_path: Path) -> None:
    for number in range(40):
        compiled(tmp_path / "train" / ("coin" if number < 20 else "treasure") / f"{number}.z8")
    first = games_in(tmp_path).tasks["train"][:20]
    assert {task.category for task in first} == {"coin", "treasure"}


def test_a_game_right_in_a_split_has_a_category(tmp_path: Path) -> None:
    compiled(tmp_path / "train" / "tw-simple-1.z8")
    assert [task.category for task in games_in(tmp_path).tasks["train"]] == ["game"]


def test_a_task_is_known_by_the_content_of_its_game(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    compiled(other / "train" / "coin-3" / "renamed.z8").write_bytes(b"0")
    found = {task.task_id for task in games_in(other).tasks["train"]}
    (same,) = (task for task in games_in(folder).tasks["train"] if task.category == "coin")
    assert found == {same.task_id}
    compiled(other / "test" / "coin-3" / "renamed.z8", "Find the cup.").write_bytes(b"0")
    games_in.cache_clear()
    (task,) = games_in(other).tasks["test"]
    assert task.task_id not in found


def test_the_same_game_twice_is_one_task(tmp_path: Path) -> None:
    compiled(tmp_path / "train" / "coin" / "1.z8")
    compiled(tmp_path / "train" / "coin" / "2.z8").write_bytes(b"1")
    assert len(games_in(tmp_path).tasks["train"]) == 1


def test_games_that_alfworld_leaves_out_are_left_out(folder: Path) -> None:
    train = folder / "train"
    planned(train / "pick_and_place_simple-Mug-None-Desk-1" / "T", "1", solvable=False)
    planned(train / "pick_and_place_simple-Mug-None-Desk-2" / "T", "2", solvable=None)
    planned(train / "pick_and_place_with_movable_recep-Mug-Box-Desk-3" / "T", "3")
    planned(train / "pick_and_place_simple-AppleSliced-None-Desk-4" / "T", "4")
    compiled(train / "movable" / "played.z8")
    games_in.cache_clear()
    assert len(games_in(folder).tasks["train"]) == 3


def test_a_path_above_the_games_leaves_none_out(tmp_path: Path) -> None:
    planned(tmp_path / "movable disk" / "train" / "pick-1" / "T", "1")
    assert len(games_in(tmp_path / "movable disk").tasks["train"]) == 1


def test_a_game_that_changed_after_the_start_is_refused(folder: Path) -> None:
    games = games_in(folder)
    for task in games.tasks["train"]:
        path = games.path(task)
        path.write_bytes(path.read_bytes() + b" ")
        with pytest.raises(ValueError, match=f"{path} has changed since its folder was read"):
            games.path(task)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "has no games in its subfolders; expected subfolders such as train"),
        (lambda path: path.rmdir(), "no such folder; expected one with games"),
        (
            lambda path: compiled(path / "train" / "1.z8").with_suffix(".json").unlink(),
            r"1.z8 has no .*1.json beside it, which says when the game is won",
        ),
        (
            lambda path: compiled(path / "train" / "1.z8", objective=3),
            "1.json: expected a game of TextWorld with its objective and quests, got",
        ),
        *(
            (
                lambda path, quest=quest: compiled(path / "train" / "1.z8", **quest),
                "1.z8: expected quests that pay once and nothing below 0, and some that pay; got",
            )
            for quest in ({"reward": -1}, {"reward": 0}, {"repeatable": True})
        ),
        (
            lambda path: planned(path / "train", "1", grammar="{}"),
            "game.tw-pddl: expected a text with 'Your task is to:', got none",
        ),
    ],
)
def test_what_is_no_game_is_named(make: object, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "games"
    folder.mkdir()
    make(folder)  # pyright: ignore[reportCallIssue]
    with pytest.raises(EnvironmentDataError, match=message):
        games_in(folder)


def test_without_its_packages_it_says_how_to_get_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [])  # where metadata of packages is looked for
    with pytest.raises(ConfigError, match=r"run `pip install 'ragen-apo\[textworld\]'`"):
        make_environment("textworld", {"data": folder})


@pytest.mark.parametrize("expression", ["r.name", "r.name or r.id", " o.indefinite + ' ' + o.name"])
def test_grammars_may_name_things(expression: str) -> None:
    require_no_code(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "exit()",
        "__import__('os').system('id')",
        "r.__class__",
        "[r for r in r]",
        "r[0]",
        "r.name +",
    ],
)
def test_grammars_may_not_run_code(expression: str) -> None:
    with pytest.raises(EnvironmentDataError, match="the grammar of a game would run Python code"):
        require_no_code(expression)
