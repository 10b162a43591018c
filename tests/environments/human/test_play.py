import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ragen_apo.environments.human.play import HOW_TO, PlayedEpisode, play
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import EnvironmentFaultError


class Terminal:
    """Types the given lines, then raises `end`, and keeps what was shown."""

    def __init__(self, *lines: str, end: type[BaseException] = EOFError) -> None:
        self._lines: Iterator[str] = iter(lines)
        self._end = end
        self.shown: list[str] = []

    def read(self, prompt: str) -> str:
        for line in self._lines:
            return line
        raise self._end

    def play(self, shop: ShopEnvironment) -> PlayedEpisode:
        task = shop.tasks("train")[0]
        return play(shop, task, read=self.read, write=self.shown.append)

    @property
    def screen(self) -> str:
        return "\n".join(self.shown)


@pytest.fixture
def shop() -> ShopEnvironment:
    return ShopEnvironment(max_turns=3)


def goal_id(shop: ShopEnvironment) -> int:
    return shop.tasks("train")[0].payload["product_id"]


def test_a_person_reads_the_rules_and_the_task_buys_and_sees_the_return(
    shop: ShopEnvironment,
) -> None:
    terminal = Terminal("fly away", f"buy {goal_id(shop)}")
    episode = terminal.play(shop)
    assert shop.properties.rules in terminal.screen
    assert "TASK: " in terminal.screen
    assert "[reward -0.06]" in terminal.screen
    assert "[reward +0.99]" in terminal.screen
    assert terminal.screen.endswith("Success: return +0.93 in 2 turns.")  # -0.06 + 0.99
    assert [turn.invalid for turn in episode.turns] == [True, False]
    assert episode.turns[0].observation.startswith("TASK: ")
    assert episode.turns[1].observation.startswith("Invalid action")
    assert (episode.terminated, episode.truncated, episode.success) == (True, False, True)
    assert episode.final_observation.startswith("You bought")
    assert episode.episode_return == pytest.approx(0.93)


def test_a_wrong_purchase_is_no_success(shop: ShopEnvironment) -> None:
    terminal = Terminal(f"buy {goal_id(shop) + 1}")
    assert not terminal.play(shop).success
    assert terminal.screen.endswith("No success: return -0.11 in 1 turn.")


def test_the_turn_limit_ends_the_game(shop: ShopEnvironment) -> None:
    terminal = Terminal("click 1", "click 1", "click 1", "never read")
    episode = terminal.play(shop)
    assert episode.truncated
    assert len(episode.turns) == 3
    assert "No turns left" in terminal.screen


@pytest.mark.parametrize("word", ["quit", " QUIT "])
def test_quit_leaves_without_an_end(shop: ShopEnvironment, word: str) -> None:
    terminal = Terminal("search blue", word, "buy 1")
    episode = terminal.play(shop)
    assert len(episode.turns) == 1
    assert not episode.terminated
    assert not episode.truncated
    assert "Goodbye" in terminal.screen


def test_help_and_an_empty_line_cost_no_turn(shop: ShopEnvironment) -> None:
    terminal = Terminal("help", "", "  ", " HELP ", "quit")
    assert terminal.play(shop).turns == ()
    assert terminal.screen.count(shop.properties.rules) == 1 + 2  # at the start, and asked for
    assert terminal.screen.count(HOW_TO) == 1 + 4


def test_the_screen_says_how_many_turns_are_left(shop: ShopEnvironment) -> None:
    terminal = Terminal("dance", "dance", "dance")
    terminal.play(shop)
    left = [line for line in terminal.screen.splitlines() if line.endswith("left]")]
    assert left == [f"[at most {n} left]" for n in ("3 turns", "2 turns", "1 turn")]


def test_escape_sequences_of_an_environment_do_not_reach_the_terminal(
    shop: ShopEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    title = "blue\x1b]0;owned\x07 \x9b31m\u202eshoe\nin two lines"
    monkeypatch.setattr(
        ShopEnvironment, "step", lambda self, action: (title, 0.0, True, False, {"success": False})
    )
    terminal = Terminal("buy 1")
    episode = terminal.play(shop)
    assert "blue\\x1b]0;owned\\x07 \\x9b31m\\u202eshoe\nin two lines" in terminal.screen
    assert episode.final_observation == title  # what is recorded stays as it is


def raises(*_: object, **__: object) -> tuple[Any, ...]:
    raise KeyError("shelf")


@pytest.mark.parametrize(
    ("method", "answer", "problem"),
    [
        ("step", lambda *_: ("bought", None, True, False, {}), "the reward is None; expected a fi"),
        ("step", lambda *_: (3, 1.0, True, False, {}), "3 is no text"),
        ("step", lambda *_: ("bought", 1.0, True, {}), "step answered .* expected "),
        ("step", lambda *_: ("bought", 1.0, True, False, None), "info is None"),
        ("step", raises, r"step raised KeyError\('shelf'\)"),
        ("reset", lambda *_, **__: "shop", "reset answered 'shop'"),
        ("reset", raises, r"reset raised KeyError\('shelf'\)"),
    ],
)
def test_what_rollouts_refuse_is_the_fault_of_the_environment_here_too(
    method: str,
    answer: Callable[..., Any],
    problem: str,
    shop: ShopEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ShopEnvironment, method, answer)
    with pytest.raises(EnvironmentFaultError, match=f"'shop': {problem}"):
        Terminal("buy 1").play(shop)


def test_a_line_that_is_not_utf8_costs_no_turn(
    shop: ShopEnvironment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.BytesIO(b"\xff\nbuy 1\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, encoding="utf-8"))
    episode = play(shop, shop.tasks("train")[0])
    assert [turn.action for turn in episode.turns] == ["buy 1"]
    assert "That line is not UTF-8 text." in capsys.readouterr().out


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_the_end_of_the_input_and_ctrl_c_leave_politely(
    shop: ShopEnvironment, end: type[BaseException]
) -> None:
    terminal = Terminal(end=end)
    assert terminal.play(shop).turns == ()
    assert terminal.screen.endswith("Goodbye: return +0.00 in 0 turns.")
