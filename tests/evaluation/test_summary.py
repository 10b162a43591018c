"""The two documents of an evaluation, from hand-made episodes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest

from ragen_apo.environments.base import FailureWords, PatternWords
from ragen_apo.evaluation.summary import (
    episode_rows,
    outcome_summary,
    paired_difference_interval,
    pass_at_by_task,
    results_document,
    wilson_interval,
)
from ragen_apo.types import StopReason, Trajectory, TurnFlag
from tests import factories


def episode(
    *, goal: str, category: str, rewards: list[float], success: bool, terminated: bool = True
) -> Trajectory:
    """An episode with one turn a reward; the action of turn n is `search n`."""
    turns = (
        factories.turn(
            reward,
            observation=f"page {number}",
            logprobs=(-0.1, -0.2),
            response=f"<think>so</think><answer>search {number}</answer>",
            thought="so",
            action=f"search {number}",
            flags=("helpful",),
            state_key=f"state {number}",
        )
        for number, reward in enumerate(rewards)
    )
    return factories.episode(
        *turns,
        task=factories.task(f"buy {goal}", split="test", category=category, payload={"goal": goal}),
        terminated=terminated,
        success=success,
        policy_version="p1",
        seed=3,
    )


EPISODES = [
    episode(goal="mug", category="kitchen", rewards=[0.5, 1.0], success=True),
    episode(goal="novel", category="books", rewards=[-0.25], success=False),
    episode(goal="pan", category="kitchen", rewards=[0.0] * 3, success=False, terminated=False),
    episode(goal="atlas", category="books", rewards=[0.0, 1.0], success=True),
]


def test_the_summary_of_four_episodes_equals_the_one_worked_out_by_hand() -> None:
    summary = outcome_summary(EPISODES)
    assert summary == {
        "episodes": 4,
        "successes": 2,
        "success_rate": 0.5,  # 2 / 4
        "success_ci95": list(wilson_interval(2, 4)),
        "avg_reward": pytest.approx(0.5625),  # (1.5 - 0.25 + 0 + 1) / 4
        "tasks": 4,
        "avg_steps": 2.0,  # (2 + 1 + 3 + 2) / 4
        "episodes_out_of_context": 0,
    }


def test_full_contexts_are_told_from_the_turn_limit_which_the_baselines_have_as_well() -> None:
    cut = replace(EPISODES[2], stop_reason=StopReason.CONTEXT_LIMIT)
    results = results_document(
        [*EPISODES, cut],
        policy="greedy",
        split="test",
        baselines={"random": outcome_summary(EPISODES)},
    )
    assert results["episodes_out_of_context"] == 1
    assert results["by_category"]["books"]["episodes_out_of_context"] == 0
    assert results["baselines"]["random"]["episodes_out_of_context"] == 0


def test_what_the_environment_measures_has_its_mean_over_the_episodes_that_have_it() -> None:
    measured: list[dict[str, float]] = [{"tests_passed": 2.0}, {"tests_passed": 5.0, "b": 1.0}, {}]
    episodes = [
        replace(episode, metrics=metrics)
        for episode, metrics in zip(EPISODES, measured, strict=False)
    ]
    assert outcome_summary(episodes)["metrics"] == {"b": 1.0, "tests_passed": 3.5}
    results = results_document(episodes, policy="greedy", split="test", baselines={})
    assert results["by_category"]["books"]["metrics"] == {"b": 1.0, "tests_passed": 5.0}
    assert episode_rows(episodes, policy="greedy")[1]["metrics"] == measured[1]


def test_the_mean_of_the_largest_numbers_is_one_too() -> None:
    largest = sys.float_info.max
    episodes = [replace(episode, metrics={"distance": largest}) for episode in EPISODES]
    assert outcome_summary(episodes)["metrics"] == {"distance": largest}


def test_the_results_name_every_pattern_category_and_baseline() -> None:
    baseline = outcome_summary(EPISODES[1:2])
    results = results_document(
        EPISODES, policy="greedy", split="test", baselines={"random": baseline}
    )
    assert list(results["by_category"]) == ["books", "kitchen"]
    assert results["by_category"]["books"]["avg_reward"] == pytest.approx(0.375)  # (-0.25 + 1) / 2
    assert results["failures"] == {
        "unreadable": {"count": 0, "share": 0.0, "examples": []},
        "impossible": {"count": 0, "share": 0.0, "examples": []},
        "wrong_final_action": {"count": 1, "share": 0.25, "examples": [1]},
        "loop": {"count": 0, "share": 0.0, "examples": []},
        "unreachable_target": {"count": 0, "share": 0.0, "examples": []},
        "timeout": {"count": 1, "share": 0.25, "examples": [2]},
    }
    assert results["baselines"]["random"]["success_rate"] == 0.0
    assert (results["split"], results["policy"]) == ("test", "greedy")
    assert "pass_at_k" not in results


def test_the_results_keep_the_words_that_the_environment_declares() -> None:
    words = FailureWords(timeout=PatternWords(name="closing time"))
    results = results_document(
        EPISODES, policy="greedy", split="test", baselines={}, failure_words=words
    )
    assert results["failures"]["timeout"]["words"] == {"name": "closing time"}
    assert "words" not in results["failures"]["loop"]


def test_one_episode_that_shows_its_target_says_what_the_others_failed_at() -> None:
    unseen = EPISODES[2]
    shown = replace(unseen, turns=(replace(unseen.turns[0], flags=(TurnFlag.TARGET_SHOWN,)),))
    for episodes, names in (
        ([unseen], ["timeout"]),
        ([unseen, shown], ["unreachable_target", "timeout"]),
    ):
        assert [row["failure"] for row in episode_rows(episodes, policy="greedy")] == names


def test_at_most_three_examples_of_a_pattern_are_named() -> None:
    results = results_document([EPISODES[1]] * 5, policy="greedy", split="test", baselines={})
    assert results["failures"]["wrong_final_action"] == {
        "count": 5,
        "share": 1.0,
        "examples": [0, 1, 2],
    }


def test_pass_at_k_is_the_mean_over_tasks_and_not_over_episodes() -> None:
    solved = episode(goal="mug", category="kitchen", rewards=[1.0], success=True)
    failed = episode(goal="mug", category="kitchen", rewards=[0.0], success=False)
    hopeless = episode(goal="pan", category="kitchen", rewards=[0.0], success=False)
    passes = pass_at_by_task([solved, failed, hopeless, hopeless], [1, 2])
    assert passes == {"1": 0.25, "2": 0.5}  # (1/2 + 0) / 2 and (1 + 0) / 2


def test_pass_at_k_refuses_tasks_with_too_few_samples() -> None:
    with pytest.raises(ValueError, match="needs 2 samples or more"):
        pass_at_by_task(EPISODES, [2])


def test_pass_at_k_enters_the_results_when_it_was_asked_for() -> None:
    results = results_document(
        EPISODES, policy="sampled", split="test", baselines={}, pass_at={"1": 0.5}
    )
    assert results["pass_at_k"] == {"1": 0.5}


def test_an_episode_row_holds_what_a_person_reads_and_no_token_ids() -> None:
    row = episode_rows(EPISODES, policy="greedy")[1]
    assert row == {
        "episode": 1,
        "policy": "greedy",
        "task": {
            "environment": "shop",
            "task_id": EPISODES[1].task.task_id,
            "instruction": "buy novel",
            "split": "test",
            "category": "books",
            "payload": {"goal": "novel"},
        },
        "success": False,
        "return": -0.25,
        "num_turns": 1,
        "terminated": True,
        "truncated": False,
        "stop_reason": "the environment ended the episode",
        "failure": "wrong_final_action",
        "metrics": {},
        "final_observation": "the end",
        "turns": [
            {
                "observation": "page 0",
                "response": "<think>so</think><answer>search 0</answer>",
                "thought": "so",
                "action": "search 0",
                "reward": -0.25,
                "flags": ["helpful"],
                "num_prompt_tokens": 3,
                "num_response_tokens": 2,
            }
        ],
    }


def test_both_documents_survive_json_unchanged() -> None:
    results = results_document(EPISODES, policy="greedy", split="test", baselines={})
    rows = episode_rows(EPISODES, policy="greedy")
    assert json.loads(json.dumps(results)) == results
    assert json.loads(json.dumps(rows)) == rows


def test_an_evaluation_without_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one episode"):
        results_document([], policy="greedy", split="test", baselines={})


@pytest.mark.parametrize("num_tasks", [20, 40])
@pytest.mark.parametrize(("first", "second"), [(0.1, 0.1), (0.3, 0.1), (0.05, 0.4)])
def test_the_interval_for_pairs_has_the_difference_in_95_of_100_cases(
    first: float, second: float, num_tasks: int
) -> None:
    """Exactly, over all outcomes: `first` of all tasks are solved by the first player alone."""
    covered = 0.0
    for b in range(num_tasks + 1):
        for c in range(num_tasks + 1 - b):
            low, high = paired_difference_interval(only_first=b, only_second=c, num_tasks=num_tasks)
            rest = num_tasks - b - c
            ways = math.comb(num_tasks, b) * math.comb(num_tasks - b, c)
            chance = ways * first**b * second**c * (1 - first - second) ** rest
            covered += chance * (low <= first - second <= high)
    assert 0.94 <= covered <= 0.985


def test_the_interval_for_pairs_stays_possible_and_refuses_what_is_not() -> None:
    # p = 11/12, q = 1/12: 10/12 + 1.96 sqrt((1 - 100/144) / 12) = 1.146, cut to 1; below 0.521
    bounds = paired_difference_interval(only_first=10, only_second=0, num_tasks=10)
    assert bounds == pytest.approx((0.5206, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="expected counts of 3 tasks, got 2 and 2"):
        paired_difference_interval(only_first=2, only_second=2, num_tasks=3)
