"""The games of docs/existing_environments.md with the real packages: `make test-interop`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.contract import check_environment

_REASON = "{} is not installed here; run `make test-interop`"
for _module in ("gem", "textarena"):
    pytest.importorskip(_module, reason=_REASON.format(_module))
reasoning_gym = pytest.importorskip("reasoning_gym", reason=_REASON.format("reasoning_gym"))

PAGE = Path(__file__).resolve().parents[2] / "docs" / "existing_environments.md"
LEFT_OUT = {
    "a text that is no action is marked and ends nothing",
    "scripted policies are there and read anything",
}
"""The promises that the page says are not kept."""
Maker = Callable[..., TextEnvironment]


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Makes what the block of a section of the page makes, with options."""

    def made(section: str, function: str, **options: object) -> TextEnvironment:
        _, _, text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")
        block = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)
        assert block is not None
        file = tmp_path / f"{section.lower().replace('-', '_')}.py"
        file.write_text(block[1], encoding="utf-8")
        return make_environment(f"{file}:{function}", options)

    return made


@pytest.mark.parametrize(
    ("section", "function", "options"),
    [
        ("GEM", "make_game", {}),
        ("GEM", "make_game", {"game": "game:Sokoban-v0-easy"}),
        ("GEM", "make_game", {"game": "game:Game2048-v0-easy"}),
        ("TextArena", "make_game", {}),
        ("TextArena", "make_game", {"game": "2048-v0-easy"}),
        ("TextArena", "make_game", {"game": "Sokoban-v0"}),
        ("reasoning-gym", "make_questions", {}),
        ("reasoning-gym", "make_questions", {"dataset": "countdown"}),
    ],
)
def test_the_promises_are_kept(
    section: str, function: str, options: dict[str, object], make: Maker
) -> None:
    found = check_environment(lambda: make(section, function, **options))
    assert {promise: problems for promise, problems in found.items() if problems}.keys() <= LEFT_OUT


@pytest.mark.parametrize(
    ("section", "guess", "higher"),
    [("GEM", r"\boxed{{{}}}", "is higher"), ("TextArena", "[{}]", "is higher")],
)
def test_halving_finds_the_number(section: str, guess: str, higher: str, make: Maker) -> None:
    environment = make(section, "make_game")
    for task in environment.tasks("test")[:10]:
        environment.reset(task, seed=0)
        low, high, turns = 1, 20 if section == "TextArena" else 10, 0
        while True:
            middle, turns = (low + high) // 2, turns + 1
            text, reward, terminated, truncated, info = environment.step(guess.format(middle))
            if terminated or truncated:
                break
            low, high = (middle + 1, high) if higher in text else (low, middle - 1)
        assert (terminated, reward, info["success"]) == (True, 1.0, True)
        assert turns <= 5


def test_the_answer_of_a_question_is_right_and_another_is_not(make: Maker) -> None:
    environment = make("reasoning-gym", "make_questions", num_train=20, num_test=5)
    entries = reasoning_gym.create_dataset("chain_sum", seed=0, size=25)
    for task in environment.tasks("test"):
        entry = entries[task.payload["seed"]]
        first, _ = environment.reset(task, seed=0)
        assert entry["question"] in first
        assert environment.step(entry["answer"])[1:] == (1.0, True, False, {"success": True})
        environment.reset(task, seed=0)
        assert environment.step("none")[4] == {"success": False}
