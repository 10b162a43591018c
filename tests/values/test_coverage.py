"""What is said about the reference before training."""

import itertools
import json
import math

import pytest

from ragen_apo.plural import counted
from ragen_apo.values.coverage import Faults, coverage_report, coverage_sentence, pass_at_k
from ragen_apo.values.estimator import SampleSchedule, soft_value
from ragen_apo.values.state_values import state_coverage
from tests.factories import episode, turn


def report(*successes: list[bool], **options):
    by_task = {f"task-{number}": values for number, values in enumerate(successes)}
    returns = {task: [float(value) for value in values] for task, values in by_task.items()}
    return coverage_report(returns, by_task, **{"beta": 0.5, **options})


@pytest.mark.parametrize(("num_successes", "num_samples", "k"), [(0, 5, 2), (2, 5, 3), (5, 5, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(num_successes, num_samples, k):
    samples = [True] * num_successes + [False] * (num_samples - num_successes)
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(num_successes=num_successes, num_samples=num_samples, k=k) == pytest.approx(
        sum(any(subset) for subset in subsets) / len(subsets)
    )


def test_pass_at_k_of_fewer_than_k_samples_is_rejected():
    with pytest.raises(ValueError, match="pass@4 needs 4 samples"):
        pass_at_k(num_successes=1, num_samples=3, k=4)


@pytest.mark.parametrize("others", [[], [[True] * 8], [[True, True], [False, False]]])
def test_pass_at_k_of_adaptive_samples_is_right_for_every_k_of_the_first_round(others):
    """All histories of a task that is solved in a fifth of its samples, by their probability."""
    schedule, chance = SampleSchedule(first=2, cap=8), 0.2
    expected = {"1": 0.0, "2": 0.0} if len(others) == 2 else {"1": 0.0}  # all have two samples
    for history in itertools.product([True, False], repeat=8):
        probability = math.prod(chance if each else 1 - chance for each in history)
        for total in schedule.rounds():
            samples = list(history[:total])
            if not schedule.goes_on(num_successes=sum(samples), num_samples=total):
                break
        passes = report(samples, *others, num_first=schedule.first)["pass_at_k"]
        for k in expected:
            expected[k] += probability * passes[k]
    num_solved, num_tasks = sum(all(each) for each in others), 1 + len(others)
    assert expected["1"] == pytest.approx((0.2 + num_solved) / num_tasks)
    if "2" in expected:
        assert expected["2"] == pytest.approx((1 - 0.8**2 + num_solved) / num_tasks)


def test_the_report_of_three_tasks_computed_by_hand():
    result = report([True] * 4, [True, False, False, False], [False] * 8)
    assert result["num_tasks"] == 3
    assert result["num_samples"] == 16
    assert result["tasks_by_num_samples"] == {"4": 2, "8": 1}
    # pass@1: (1 + 1/4 + 0) / 3; of four samples and more, two of the three tasks have a success
    assert result["pass_at_k"] == pytest.approx({"1": 1.25 / 3, "4": 2 / 3, "8": 2 / 3})
    assert result["share_never_solved"] == pytest.approx(1 / 3)
    assert result["share_always_solved"] == pytest.approx(1 / 3)
    assert result["mean_return"] == pytest.approx(1.25 / 3)
    # V_hat = 1, 0.5 log(3/4 + e^2 / 4), 0
    assert result["mean_v_star"] == pytest.approx((1 + 0.5 * math.log(0.75 + math.exp(2) / 4)) / 3)
    assert result["mean_v_star"] == pytest.approx(
        (1 + soft_value([1.0, 0.0, 0.0, 0.0], beta=0.5)) / 3
    )


def test_the_report_says_how_many_samples_the_values_really_rest_on():
    # Equal returns count alike: 4, 4 and 1. One success of four: 1.873, see test_estimator.
    result = report([True] * 4, [False] * 4, [True, False, False, False], [True])
    assert result["mean_effective_samples"] == pytest.approx((4 + 4 + 1.873 + 1) / 4, abs=1e-3)
    # A task that was sampled once is no surprise.
    assert result["share_resting_on_one"] == 0.25


def test_a_line_for_people_names_the_largest_k_that_all_tasks_have():
    result = report([True, False, False, False], [False] * 8)
    assert coverage_sentence(result) == (
        "Stage 1: 12 samples of 2 tasks, pass@1 12%, pass@4 50%, 50% never solved, "
        "0% always solved."
    )
    often = coverage_sentence(report([True, *[False] * 15]))
    assert "pass@1 6%, pass@16 100%, 0% never" in often
    known = coverage_sentence(report([True]) | {"share_turns_known": 0.25})
    assert known == (
        "Stage 1: 1 sample of 1 task, pass@1 100%, 0% never solved, 100% always solved, "
        "25% of later turns in a state that enough other episodes visited."
    )
    assert "later turns" not in coverage_sentence(report([True]) | {"share_turns_known": None})


@pytest.mark.parametrize(
    ("num_samples", "min_visits", "is_said"), [(1, 2, True), (1, 1, False), (2, 2, False)]
)
def test_where_no_state_has_a_value_it_is_said_that_by_turn_is_by_trajectory(
    num_samples, min_visits, is_said
):
    """Two tasks, whose states have keys of their own."""
    keys = [(f"{task}:1", f"{task}:2") for task in "ab" for _ in range(num_samples)]
    episodes = [episode(*[turn(state_key=key) for key in both]) for both in keys]
    coverage = state_coverage(episodes, min_visits=min_visits)
    result = report(*[[True] * num_samples] * 2) | coverage
    sentence = coverage_sentence(result)
    assert sentence.startswith(f"Stage 1: {counted(2 * num_samples, 'sample')} of 2 tasks, pass@1")
    assert ("A*-PO by trajectory" in sentence) == is_said


def test_a_task_with_fewer_than_k_samples_counts_with_what_it_has_and_is_reported():
    result = report([True, False, False, False], [False] * 16)
    assert result["pass_at_k"] == {"1": 0.125, "4": 0.5, "8": 0.5, "16": 0.5}
    assert result["tasks_below_k"] == {"1": 0, "4": 0, "8": 1, "16": 1}


def test_the_report_is_json():
    result = report([True, False])
    assert json.loads(json.dumps(result)) == result


def test_one_sample_a_task_is_judged_by_its_success_rate_alone() -> None:
    """1 - 0.95^16 = 0.56 and 1 - 0.96^16 = 0.48."""
    assert report(*[[True]] * 5, *[[False]] * 95)["advice"] is None
    assert "solves 4 of 100 tasks" in report(*[[True]] * 4, *[[False]] * 96)["advice"]


def test_tasks_that_are_always_solved_are_called_too_easy_after_enough_samples() -> None:
    easy, hard = [True] * 4, [True, False, False, True]
    advice = report(easy, easy, hard)["advice"]
    assert "solves 2 of 3 tasks in all samples" in advice and "rollout_filter" in advice
    assert report(easy, hard)["advice"] is None
    assert report(*[[True] * 3] * 9, hard)["advice"] is None, "three samples are too few"


def test_there_is_no_advice_when_half_of_the_tasks_have_a_success():
    assert report([True] + [False] * 15, [False] * 16)["advice"] is None


def test_fewer_successes_than_that_call_for_a_warm_start_or_a_shaped_reward():
    advice = report([True] + [False] * 15, [False] * 16, [False] * 16)["advice"]
    assert "solves 1 of 3 tasks" in advice
    assert "warm-start" in advice
    assert "shaped reward" in advice
    assert "fewer than" not in advice


def test_where_no_task_was_solved_there_are_no_others():
    advice = report(*[[False]] * 52)["advice"]
    assert "others" not in advice
    assert advice.startswith("No task was solved: 52 samples of 52 tasks, no success.")
    assert "All returns are equal, so Stage 2 cannot learn." in advice
    assert "Of these tasks, 52 have fewer than 16 samples" in advice
    assert "values.num_samples" in advice
    assert "warm_start.demonstrations" in advice


@pytest.mark.parametrize(
    ("returns", "finding"),
    [
        ({"a": [0.0, 0.0], "b": [0.0, 0.0]}, "All returns are equal, so"),
        ({"a": [0.0, 0.0], "b": [0.5, 0.5]}, "All returns of a task are equal, so"),
        ({"a": [0.0, 0.5], "b": [0.0, 0.0]}, "Stage 2 can only learn from what else is rewarded"),
        ({"a": [0.0, 1.0], "b": [0.0, 0.0]}, "`success` is false where it is forgotten"),
        ({"a": [0.0], "b": [0.5]}, "One sample of a task cannot tell"),
    ],
)
def test_without_a_success_it_depends_on_the_returns_whether_stage_2_can_learn(returns, finding):
    failures = {task: [False] * len(values) for task, values in returns.items()}
    advice = coverage_report(returns, failures, beta=0.5)["advice"]
    assert finding in advice


def test_where_many_episodes_ended_in_a_full_context_they_need_room_and_not_more_samples():
    result = report([False] * 4, faults=Faults(cut=0.75))
    assert result["share_cut_by_context"] == 0.75
    assert "75% of the episodes ended because the context was full" in result["advice"]
    assert "Raise agent.max_context_tokens" in result["advice"]
    assert "num_samples" not in result["advice"]
    assert "max_context" not in report([False] * 4, faults=Faults(cut=0.2))["advice"]


@pytest.mark.parametrize("other", [{"unreadable": 0.9}, {"invalid": 0.9}])
def test_a_full_context_is_named_beside_what_else_is_wrong(other):
    advice = report([False] * 4, faults=Faults(**other, cut=1.0))["advice"]
    assert "90% of the turns" in advice
    assert "100% of the episodes ended because the context was full" in advice
    assert advice.count("No task was solved") == 1


def test_where_most_actions_could_not_be_executed_the_agent_must_be_told_them():
    result = report([False] * 4, faults=Faults(unreadable=0.3, invalid=0.6, cut=0.9))
    assert result["share_invalid"] == 0.6
    assert "In 60% of the turns the environment could not execute the action" in result["advice"]
    assert "by agent.system_prompt (rules or rules_and_format)" in result["advice"]
    assert "execute" not in report([False] * 4, faults=Faults(invalid=0.5))["advice"]
    assert report([True] * 4)["share_invalid"] is None


def test_where_most_responses_were_unreadable_the_prompt_must_state_the_form():
    result = report([False] * 4, faults=Faults(unreadable=0.97))
    assert result["share_unreadable"] == 0.97
    assert "In 97% of the turns the response held no readable answer" in result["advice"]
    assert "cut off, raise agent.max_response_tokens" in result["advice"]
    assert "set agent.system_prompt: rules_and_format" in result["advice"]
    told = report([False] * 4, faults=Faults(unreadable=0.97, form_is_told=True))
    assert "rules_and_format" not in told["advice"]
    assert "let the model imitate demonstrations first" in told["advice"]
    readable = report([False] * 4, faults=Faults(unreadable=0.2))
    assert "rules_and_format" not in readable["advice"]


@pytest.mark.parametrize(
    ("nums", "ks"),
    [((2, 2), [1, 2]), ((4, 16), [1, 4, 8, 16]), ((1, 1), [1]), ((20,), [1, 4, 8, 16, 20])],
)
def test_pass_at_k_is_given_for_the_k_that_there_are_samples_for(nums, ks):
    result = report(*[[False] * number for number in nums])
    assert list(result["pass_at_k"]) == list(result["tasks_below_k"]) == [str(k) for k in ks]


def test_tasks_are_sampled_sixteen_times_before_they_count_as_out_of_reach():
    advice = report([True], [False] * 8, [False] * 16)["advice"]
    assert "Of the others, 1 has fewer than 16 samples" in advice


@pytest.mark.parametrize(
    ("returns", "successes"),
    [
        ({}, {}),
        ({"a": [1.0]}, {"b": [True]}),
        ({"a": []}, {"a": []}),
        ({"a": [1.0, 0.0]}, {"a": [True]}),
    ],
)
def test_returns_and_successes_that_do_not_belong_together_are_rejected(returns, successes):
    with pytest.raises(ValueError, match="expected|at least"):
        coverage_report(returns, successes, beta=0.5)
