"""From finished episodes to the evaluation's two documents, `results.json` and `episodes.jsonl`.

Pure functions of `Sequence[Trajectory]`. All values are JSON values. An episode's number is its
index in the given sequence, from 0, the same in both documents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, mean
from typing import Any

from ragen_apo.environments.base import FailureWords
from ragen_apo.evaluation.failures import (
    FailurePattern,
    declared_words,
    failure_pattern,
    reports_target,
)
from ragen_apo.types import StopReason, Trajectory, Turn
from ragen_apo.values.coverage import pass_at_k

MAX_FAILURE_EXAMPLES = 3
CONFIDENCE = 0.95
"""Of all intervals."""
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
"""The two-sided normal quantile."""
METRIC_PREFIX = "environment/"
"""What begins the names of an environment's own metrics in `metrics.jsonl`."""


def outcome_summary(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The summary of a group of episodes: the policy's, a category's or a baseline's.

    `metrics` is there if the environment measures some. Raises ValueError without episodes.
    """
    if not trajectories:
        raise ValueError("no episodes to summarize; evaluate at least one episode")
    episodes = len(trajectories)
    successes = sum(trajectory.success for trajectory in trajectories)
    metrics = metric_means(trajectories)
    return {
        "episodes": episodes,
        "tasks": len({trajectory.task.task_id for trajectory in trajectories}),
        "successes": successes,
        "success_rate": successes / episodes,
        "success_ci95": list(success_interval(trajectories)),
        "avg_reward": fmean(trajectory.episode_return for trajectory in trajectories),
        "avg_steps": fmean(len(trajectory.turns) for trajectory in trajectories),
        "episodes_out_of_context": sum(
            trajectory.stop_reason is StopReason.CONTEXT_LIMIT for trajectory in trajectories
        ),
        **({"metrics": metrics} if metrics else {}),
    }


def metric_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The means of what the environment measured, by name; each over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(value)
    # `fmean` overflows where two are near the largest float, as a distance without a way may be.
    return {name: mean(values[name]) for name in sorted(values)}


def success_interval(trajectories: Sequence[Trajectory]) -> tuple[float, float]:
    """The 95% interval of the success rate on new tasks: Wilson's, of as many episodes as count as
    independent.
    """
    independent = independent_episodes(_successes_by_task(trajectories))
    rate = sum(each.success for each in trajectories) / len(trajectories)
    return wilson_interval(rate * independent, independent)


def _successes_by_task(trajectories: Sequence[Trajectory]) -> list[list[bool]]:
    by_task: dict[str, list[bool]] = {}
    for each in trajectories:
        by_task.setdefault(each.task.task_id, []).append(each.success)
    return list(by_task.values())


def independent_episodes(by_task: Sequence[Sequence[bool]]) -> float:
    """The effective sample size of episodes of which several play the same task.

    `by_task` has the successes of each of T tasks. Episodes of one task tend to end alike, so they
    say less about new tasks than the same number of tasks would. The size is p(1 - p) divided by
    the cluster-robust variance of the success rate p (Miller, 2024, "Adding Error Bars to Evals",
    arXiv:2411.00640), times T/(T - 1) for few tasks. As a variance of few tasks is often too small
    by chance, the size is divided by (t/z)^2, with Student's quantile t of T - 1 degrees of freedom
    and the normal z (Korn and Graubard, 1998, "Confidence Intervals for Proportions with Small
    Expected Number of Positive Counts Estimated from Survey Data"). It is at least T and at most
    the number of episodes. If p is 0 or 1, nothing shows how alike episodes end, and the size is T.
    For a single task it is the number of episodes.
    """
    num_tasks, num_episodes = len(by_task), sum(map(len, by_task))
    if num_tasks in (1, num_episodes):
        return num_episodes
    rate = sum(map(sum, by_task)) / num_episodes
    if rate in (0, 1):
        return num_tasks
    deviations = sum((sum(each) - rate * len(each)) ** 2 for each in by_task)
    variance = deviations / num_episodes**2 * num_tasks / (num_tasks - 1)
    if variance == 0:
        return num_episodes
    size = rate * (1 - rate) / variance * (_Z / student_quantile(num_tasks - 1)) ** 2
    return min(max(size, num_tasks), num_episodes)


def student_quantile(degrees: int) -> float:
    """The two-sided 95% quantile of Student's t with so many degrees of freedom, to 1%.

    One and two degrees have closed forms; the others take four terms of the expansion around the
    normal quantile (Abramowitz and Stegun, 1964, 26.7.5). Raises ValueError below one degree.
    """
    if degrees < 1:
        raise ValueError(f"degrees must be at least 1, got {degrees}")
    if degrees == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if degrees == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def wilson_interval(successes: float, episodes: float) -> tuple[float, float]:
    """The 95% Wilson score interval of a success rate; it stays inside [0, 1] at 0% and 100% too.

    With p = successes / n and z the two-sided normal quantile, the bounds are
    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)   (Wilson, 1927).
    Assumes independent episodes. No episodes say nothing: (0, 1).
    Raises ValueError for impossible counts.
    """
    if not 0 <= successes <= episodes:
        raise ValueError(f"successes must lie in 0..{episodes} (the episodes), got {successes}")
    if episodes == 0:
        return 0.0, 1.0
    z, rate = _Z, successes / episodes
    shrinkage = 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / shrinkage
    spread = math.sqrt(rate * (1 - rate) / episodes + (z / (2 * episodes)) ** 2)
    half_width = z * spread / shrinkage
    low = 0.0 if successes == 0 else max(0.0, centre - half_width)
    high = 1.0 if successes == episodes else min(1.0, centre + half_width)
    return low, high


def paired_difference_interval(
    *, only_first: int, only_second: int, num_tasks: int
) -> tuple[float, float]:
    """The 95% interval of the first success rate minus the second, of two players of one task each.

    `only_first` of the tasks were solved by the first alone, `only_second` by the second alone.
    With p and q these counts plus 1, divided by n + 2, the bounds are
    p - q ± z √((p + q - (p - q)²) / (n + 2)), the adjusted Wald interval for pairs (Bonett and
    Price, 2012, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based
    on Paired Data", Journal of Educational and Behavioral Statistics 37), within [-1, 1].
    Assumes independent tasks. Raises ValueError for impossible counts.
    """
    if min(only_first, only_second) < 0 or only_first + only_second > num_tasks:
        raise ValueError(
            f"expected counts of {num_tasks} tasks, got {only_first} and {only_second}"
        )
    size = num_tasks + 2
    p, q = (only_first + 1) / size, (only_second + 1) / size
    half_width = _Z * math.sqrt((p + q - (p - q) ** 2) / size)
    return max(-1.0, p - q - half_width), min(1.0, p - q + half_width)


def results_document(
    trajectories: Sequence[Trajectory],
    *,
    policy: str,
    split: str,
    baselines: Mapping[str, Mapping[str, Any]],
    pass_at: Mapping[str, float] | None = None,
    failure_words: FailureWords | None = None,
    search: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of `results.json` for the episodes of one policy on one split.

    `baselines` maps a name (`random`, `heuristic`, `reference`) to its `outcome_summary`;
    `pass_at` comes from `pass_at_by_task` and is left out of the document when None;
    `failure_words` are those that the environment declares; `search` comes from `search_summary`.
    """
    document = {
        **outcome_summary(trajectories),
        "by_category": by_category(trajectories),
        "failures": failure_summary(trajectories, words=failure_words or FailureWords()),
        "baselines": {name: dict(summary) for name, summary in baselines.items()},
        "split": split,
        "policy": policy,
    }
    if pass_at is not None:
        document["pass_at_k"] = dict(pass_at)
    if search is not None:
        document["search"] = dict(search)
    return document


def by_category(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, Any]]:
    """The `outcome_summary` of each task category, in alphabetical order."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.task.category, []).append(trajectory)
    return {category: outcome_summary(groups[category]) for category in sorted(groups)}


def failure_summary(
    trajectories: Sequence[Trajectory], *, words: FailureWords
) -> dict[str, dict[str, Any]]:
    """Per failure pattern: count, share of all episodes, and the first episodes that show it.

    All patterns are present, those that did not occur with a count of 0. Where the environment has
    `words` of its own for a pattern they are added.
    """
    declared = declared_words(words)
    episodes_of: dict[FailurePattern, list[int]] = {pattern: [] for pattern in FailurePattern}
    for episode, pattern in enumerate(_failure_patterns(trajectories)):
        if pattern is not None:
            episodes_of[pattern].append(episode)
    return {
        pattern.value: {
            "count": len(episodes),
            "share": len(episodes) / len(trajectories) if trajectories else 0.0,
            "examples": episodes[:MAX_FAILURE_EXAMPLES],
            **({"words": declared[pattern]} if pattern in declared else {}),
        }
        for pattern, episodes in episodes_of.items()
    }


def pass_at_by_task(trajectories: Sequence[Trajectory], ks: Sequence[int]) -> dict[str, float]:
    """The mean of pass@k over tasks, for several sampled episodes of each task.

    Every task needs at least max(ks) episodes; raises ValueError otherwise, or without episodes.
    """
    if not trajectories:
        raise ValueError("pass@k of no episodes does not exist")
    by_task = _successes_by_task(trajectories)
    return {
        str(k): fmean(
            pass_at_k(num_successes=sum(task), num_samples=len(task), k=k) for task in by_task
        )
        for k in ks
    }


def episode_rows(trajectories: Sequence[Trajectory], *, policy: str) -> list[dict[str, Any]]:
    """The rows of `episodes.jsonl`: each episode so that a person can read it turn by turn.

    Token ids and log-probabilities are left out; their numbers are kept.
    """
    patterns = _failure_patterns(trajectories)
    return [
        episode_row(trajectory, episode=episode, policy=policy, pattern=pattern)
        for episode, (trajectory, pattern) in enumerate(zip(trajectories, patterns, strict=True))
    ]


def _failure_patterns(trajectories: Sequence[Trajectory]) -> list[FailurePattern | None]:
    target_reported = reports_target(trajectories)
    return [failure_pattern(each, target_reported=target_reported) for each in trajectories]


def episode_row(
    trajectory: Trajectory, *, episode: int, policy: str, pattern: FailurePattern | None
) -> dict[str, Any]:
    """One row of `episode_rows`, of an episode with this number and way to fail."""
    return {
        "episode": episode,
        "policy": policy,
        "task": dataclasses.asdict(trajectory.task),
        "success": trajectory.success,
        "return": trajectory.episode_return,
        "num_turns": len(trajectory.turns),
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "stop_reason": trajectory.stop_reason.value,
        "failure": None if pattern is None else pattern.value,
        "metrics": dict(trajectory.metrics),
        "final_observation": trajectory.final_observation,
        "turns": [turn_row(turn) for turn in trajectory.turns],
    }


def turn_row(turn: Turn) -> dict[str, Any]:
    """A turn as files of episodes have it, without its tokens."""
    return {
        "observation": turn.observation,
        "response": turn.response,
        "thought": turn.thought,
        "action": turn.action,
        "reward": turn.reward,
        "flags": list(turn.flags),
        "num_prompt_tokens": len(turn.prompt_token_ids),
        "num_response_tokens": len(turn.response_token_ids),
    }
