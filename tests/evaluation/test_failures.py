"""Each failed episode has one pattern, by the documented precedence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from ragen_apo.environments.base import FailureWords, PatternWords
from ragen_apo.environments.shop.environment import FAILURE_WORDS, ShopOptions
from ragen_apo.environments.webshop.environment import FAILURE_WORDS as WEBSHOP_WORDS
from ragen_apo.environments.webshop.environment import WebShopOptions
from ragen_apo.evaluation.failures import (
    NEUTRAL_WORDS,
    FailurePattern,
    declared_words,
    failure_pattern,
    reports_target,
)
from ragen_apo.types import Trajectory, TurnFlag
from tests import factories


def episode(
    actions: Sequence[tuple[str, str, tuple[str, ...]]], *, terminated: bool, success: bool = False
) -> Trajectory:
    """An episode from (action, the answer to it, flags)."""
    observations = ["TASK: buy the blue mug.", *(answer for _, answer, _ in actions)]
    turns = (
        factories.turn(observation=observation, action=action, flags=flags)
        for observation, (action, _, flags) in zip(observations[:-1], actions, strict=True)
    )
    return factories.episode(
        *turns,
        task=factories.task("buy the blue mug", split="test"),
        terminated=terminated,
        success=success,
        final_observation=observations[-1],
    )


INVALID = ("", "Answer with an action.", (TurnFlag.FORMAT_ERROR.value,))
UNKNOWN = ("dance", "There is no such action.", (TurnFlag.INVALID_ACTION.value,))
SHOWN = ("search mug", "Found 2 results. 11 Blue Mug, 12 Red Mug", (TurnFlag.TARGET_SHOWN.value,))
SEARCH = ("search mug", "Found 1 results. 12 Red Mug", ())
SIMILAR = ("Search: mug!", "Found 1 results. 12 Red Mug", ())
CLICK = ("click 12", "Red Mug, ceramic, 9 dollars", ())
OTHER = ("search cup", "Found 3 results. 20 Tea Cup, 21 Paper Cup, 22 Espresso Cup", ())
BUY = ("buy 12", "You bought Red Mug.", ())


@pytest.mark.parametrize(
    ("actions", "terminated", "expected"),
    [
        # what could not be read comes before everything: 1 of 2 turns is half
        ([INVALID, BUY], True, FailurePattern.UNREADABLE),
        ([INVALID], True, FailurePattern.UNREADABLE),
        # well-formed and impossible: 2 of 3 turns
        ([UNKNOWN, UNKNOWN, SEARCH], False, FailurePattern.IMPOSSIBLE),
        ([UNKNOWN, UNKNOWN, INVALID], False, FailurePattern.IMPOSSIBLE),
        ([UNKNOWN, INVALID], False, FailurePattern.UNREADABLE),
        # 1 of 3 turns is less than half; the environment ended the episode
        ([INVALID, SEARCH, BUY], True, FailurePattern.WRONG_FINAL_ACTION),
        ([SEARCH, BUY], True, FailurePattern.WRONG_FINAL_ACTION),
        # a final action comes before a loop
        ([SEARCH, SEARCH, SEARCH, BUY], True, FailurePattern.WRONG_FINAL_ACTION),
        # 2 repeats of 4 turns are half; a loop comes before a goal that was never shown
        ([SEARCH, SIMILAR, SEARCH, CLICK], False, FailurePattern.LOOP),
        ([SEARCH, CLICK, SEARCH, CLICK], False, FailurePattern.LOOP),
        # 1 repeat is no loop, 2 repeats of 5 turns are less than half
        ([SEARCH, SEARCH], False, FailurePattern.UNREACHABLE_TARGET),
        ([SEARCH, CLICK, OTHER, SEARCH, CLICK], False, FailurePattern.UNREACHABLE_TARGET),
        # the goal was on screen
        ([SHOWN, CLICK, OTHER], False, FailurePattern.TIMEOUT),
        ([], False, FailurePattern.UNREACHABLE_TARGET),
    ],
)
def test_the_first_pattern_that_fits_names_the_failure(
    actions: list[tuple[str, str, tuple[str, ...]]], terminated: bool, expected: FailurePattern
) -> None:
    trajectory = episode(actions, terminated=terminated)
    assert failure_pattern(trajectory, target_reported=True) is expected


def test_a_success_has_no_pattern_however_it_was_reached() -> None:
    lucky = episode([INVALID, INVALID, BUY], terminated=True, success=True)
    assert failure_pattern(lucky, target_reported=True) is None


def test_without_target_flags_a_goal_that_was_not_shown_is_a_timeout() -> None:
    trajectory = episode([SEARCH, CLICK], terminated=False)
    assert failure_pattern(trajectory, target_reported=False) is FailurePattern.TIMEOUT


def test_a_repeated_action_that_shows_something_new_is_no_loop() -> None:
    pages = [("click next", f"a{n} b{n} c{n} d{n}", ()) for n in range(6)]
    trajectory = episode(pages, terminated=False)
    assert failure_pattern(trajectory, target_reported=False) is FailurePattern.TIMEOUT


@pytest.mark.parametrize("action", [">", "->", "right"])
def test_the_same_sign_again_and_again_is_a_loop(action: str) -> None:
    steps = [(action, "A wall is in the way.", ())] * 10
    trajectory = episode(steps, terminated=False)
    assert failure_pattern(trajectory, target_reported=False) is FailurePattern.LOOP


def test_neighbouring_ids_are_different_actions() -> None:
    clicks = [(f"click {n}", "This product is sold out.", ()) for n in range(6)]
    trajectory = episode(clicks, terminated=False)
    assert failure_pattern(trajectory, target_reported=False) is FailurePattern.TIMEOUT


def test_one_flag_in_any_episode_shows_that_the_environment_reports_its_target() -> None:
    without = episode([SEARCH], terminated=False)
    assert not reports_target([without])
    assert reports_target([without, episode([SHOWN], terminated=False)])


def test_an_agent_that_wrote_an_impossible_action_for_ever_was_readable() -> None:
    take_book = ("take book", "There is no book.", (TurnFlag.INVALID_ACTION.value,))
    trajectory = episode([take_book] * 10, terminated=False)
    assert failure_pattern(trajectory, target_reported=False) is FailurePattern.IMPOSSIBLE


def test_every_pattern_has_neutral_words_and_a_place_for_those_of_an_environment() -> None:
    assert set(NEUTRAL_WORDS) == set(FailurePattern)
    assert {field.name for field in dataclasses.fields(FailureWords)} == {
        pattern.value for pattern in FailurePattern
    }
    for words in NEUTRAL_WORDS.values():
        assert all(dataclasses.astuple(words))


def test_neutral_words_are_of_no_particular_environment() -> None:
    text = " ".join(text for words in NEUTRAL_WORDS.values() for text in dataclasses.astuple(words))
    for word in ("shop", "purchase", "buy", "search", "product", "environment."):
        assert word not in text.lower()


def test_only_what_an_environment_declares_is_taken_from_it() -> None:
    assert declared_words(FailureWords()) == {}
    words = FailureWords(wrong_final_action=PatternWords(name="wrong shelf", advice="Look up."))
    assert declared_words(words) == {
        FailurePattern.WRONG_FINAL_ACTION: {"name": "wrong shelf", "advice": "Look up."}
    }


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (tuple(NEUTRAL_WORDS.values()), None),
        ([getattr(FAILURE_WORDS, pattern.value) for pattern in FailurePattern], ShopOptions),
        ([getattr(WEBSHOP_WORDS, pattern.value) for pattern in FailurePattern], WebShopOptions),
    ],
)
def test_advice_names_keys_that_exist_and_can_be_moved_the_way_it_says(
    words: Sequence[PatternWords], options: type[BaseModel] | None
) -> None:
    for pattern in words:
        for key in re.findall(r"`([a-z_.]+)(?::[^`]*)?`", pattern.advice):
            if "." not in key:
                continue  # an option of a reward scheme
            section, _, rest = key.partition(".")
            if section == "environment":
                assert options is not None
                assert rest in options.model_fields, key
            else:
                assert_key_exists(key)
        # format_penalty is 0 at most, so that nobody can raise it from its default to any effect
        assert not re.search(r"raise `agent\.(format|invalid_action)_penalty`", pattern.advice)


def assert_key_exists(key: str) -> None:
    model: Any = factories.config()
    for part in key.split("."):
        assert hasattr(model, part), key
        model = getattr(model, part)
