"""Recorded episodes: written whole, read in spite of what a killed writer left, and selected."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_apo.environments.human.play import play
from ragen_apo.environments.human.recordings import (
    Recording,
    append_recording,
    read_recordings,
    select_recordings,
)
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import ConfigError


@pytest.fixture
def shop() -> ShopEnvironment:
    return ShopEnvironment(num_products=24, max_turns=3)


def recording(shop: ShopEnvironment, *, task: int = 0, split: str = "train") -> Recording:
    """A person searches and buys the right product."""
    chosen = shop.tasks(split)[task]
    lines = iter(["search blue", f"buy {chosen.payload['product_id']}"])
    episode = play(shop, chosen, read=lambda _: next(lines), write=lambda _: None)
    return Recording(shop.properties.version, 0, episode)


def test_a_recording_survives_its_file(shop: ShopEnvironment, tmp_path: Path) -> None:
    written = [recording(shop, task=task) for task in range(3)]
    for each in written:
        append_recording(tmp_path / "deep" / "mine.jsonl", each)
    assert read_recordings(tmp_path / "deep" / "mine.jsonl") == (written, [])


def test_an_episode_with_numbers_of_numpy_is_recorded(
    shop: ShopEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ShopEnvironment.step

    def numpy_step(self: ShopEnvironment, action: str) -> Any:
        text, reward, terminated, truncated, info = step(self, action)
        info = {key: np.bool_(value) if value is True else value for key, value in info.items()}
        return text, np.float64(reward), np.bool_(terminated), np.bool_(truncated), info

    expected = recording(shop)
    monkeypatch.setattr(ShopEnvironment, "step", numpy_step)
    append_recording(tmp_path / "mine.jsonl", recording(shop))
    assert read_recordings(tmp_path / "mine.jsonl") == ([expected], [])


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_line_that_was_cut_off_is_named_and_hides_no_other(
    kept: int, shop: ShopEnvironment, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    first, second, third = (recording(shop, task=task) for task in range(3))
    append_recording(path, first)
    whole = path.read_bytes()
    append_recording(path, second)
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[:kept])
    assert read_recordings(path) == ([first], [f"{path}, line 2"])
    append_recording(path, third)
    assert read_recordings(path) == ([first, third], [f"{path}, line 2"])


@pytest.mark.parametrize("line", ["[]", "3", "{}", "null", '{"episode": {}}', "\ufffd"])
def test_a_line_that_is_no_episode_is_named(
    line: str, shop: ShopEnvironment, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(line + "\n")
    append_recording(path, recording(shop))
    assert read_recordings(path) == ([recording(shop)], [f"{path}, line 1"])


def test_a_folder_has_the_episodes_of_all_its_files_in_order(
    shop: ShopEnvironment, tmp_path: Path
) -> None:
    for task, name in enumerate(["b.jsonl", "a.jsonl", "notes.txt"]):
        append_recording(tmp_path / name, recording(shop, task=task))
    found, _ = read_recordings(tmp_path)
    tasks = shop.tasks("train")
    assert [each.episode.task for each in found] == [tasks[1], tasks[0]]


def test_a_path_that_does_not_exist_is_refused(shop: ShopEnvironment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*nobody\.jsonl; record episodes with"):
        select_recordings(tmp_path / "nobody.jsonl", shop)


def other_environment(each: Recording) -> Recording:
    task = dataclasses.replace(each.episode.task, environment="sokoban")
    return dataclasses.replace(each, episode=dataclasses.replace(each.episode, task=task))


FOREIGN: dict[str, Callable[[ShopEnvironment], Recording]] = {
    "1 of the environment sokoban": lambda shop: other_environment(recording(shop)),
    "1 of version old": lambda shop: dataclasses.replace(
        recording(shop), environment_version="old"
    ),
    "1 of a task that is not for training (split test)": lambda shop: recording(shop, split="test"),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_only_episodes_of_training_tasks_of_this_version_are_selected(
    reason: str, shop: ShopEnvironment, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    append_recording(path, FOREIGN[reason](shop))
    with pytest.raises(ConfigError) as caught:
        select_recordings(path, shop)
    assert f"left out: {reason}." in str(caught.value)
    assert shop.properties.version in str(caught.value)
    append_recording(path, recording(shop))
    path.write_text(path.read_text() + json.dumps({"cut": "off"})[:-3])
    chosen = select_recordings(path, shop)
    assert chosen.recordings == (recording(shop),)
    assert chosen.left_out == f"{reason}; 1 unreadable (cut off?): {path}, line 3"


def test_a_turn_limit_is_part_of_the_version(shop: ShopEnvironment, tmp_path: Path) -> None:
    append_recording(tmp_path / "mine.jsonl", recording(shop))
    with pytest.raises(ConfigError, match="1 of version"):
        select_recordings(tmp_path, ShopEnvironment(num_products=24, max_turns=4))
