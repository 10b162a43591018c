"""Each failed episode has one pattern, by the documented precedence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ragen_apo.evaluation.failures import FailurePattern, failure_pattern, reports_target
from ragen_apo.types import StopReason, Trajectory, Turn, TurnFlag, make_task


def episode(
    actions: Sequence[tuple[str, str, tuple[str, ...]]], *, terminated: bool, success: bool = False
) -> Trajectory:
    """An episode from (action, the answer to it, flags)."""
    observations = ["TASK: buy the blue mug.", *(answer for _, answer, _ in actions)]
    turns = tuple(
        Turn(
            observation=observation,
            prompt_token_ids=(1,),
            response_token_ids=(2,),
            logprobs=(-0.5,),
            response="",
            thought="",
            action=action,
            reward=0.0,
            flags=flags,
        )
        for observation, (action, _, flags) in zip(observations[:-1], actions, strict=True)
    )
    task = make_task(
        environment="shop", instruction="buy the blue mug", split="test", category="k", payload={}
    )
    return Trajectory(
        task=task,
        turns=turns,
        terminated=terminated,
        truncated=not terminated,
        stop_reason=StopReason.TERMINATED if terminated else StopReason.TURN_LIMIT,
        success=success,
        final_observation=observations[-1],
        policy_version="p",
        seed=0,
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
        # invalid format comes before everything: 1 of 2 turns is half
        ([INVALID, BUY], True, FailurePattern.INVALID_FORMAT),
        ([UNKNOWN, UNKNOWN, SEARCH], False, FailurePattern.INVALID_FORMAT),
        ([INVALID], True, FailurePattern.INVALID_FORMAT),
        # 1 of 3 turns is less than half; the environment ended the episode
        ([INVALID, SEARCH, BUY], True, FailurePattern.WRONG_PURCHASE),
        ([SEARCH, BUY], True, FailurePattern.WRONG_PURCHASE),
        # a purchase comes before a loop
        ([SEARCH, SEARCH, SEARCH, BUY], True, FailurePattern.WRONG_PURCHASE),
        # 2 repeats of 4 turns are half; a loop comes before a goal that was never shown
        ([SEARCH, SIMILAR, SEARCH, CLICK], False, FailurePattern.SEARCH_LOOP),
        ([SEARCH, CLICK, SEARCH, CLICK], False, FailurePattern.SEARCH_LOOP),
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


def test_neighbouring_ids_are_different_actions() -> None:
    clicks = [(f"click {n}", "This product is sold out.", ()) for n in range(6)]
    trajectory = episode(clicks, terminated=False)
    assert failure_pattern(trajectory, target_reported=False) is FailurePattern.TIMEOUT


def test_one_flag_in_any_episode_shows_that_the_environment_reports_its_target() -> None:
    without = episode([SEARCH], terminated=False)
    assert not reports_target([without])
    assert reports_target([without, episode([SHOWN], terminated=False)])
