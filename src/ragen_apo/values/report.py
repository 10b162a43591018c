"""What the reference can do before any training: is there a success to learn from?

Consumes returns and successes per task as the value store keeps them, produces a dictionary of
JSON values. Pure. A*-PO reweights what the reference already does, so a task that it never solves
teaches little. pass@k is the chance that at least one of k samples succeeds, estimated without bias
from c successes in n >= k samples (Chen et al., arXiv 2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_apo.values.estimator import effective_sample_size, soft_value

ADVICE_SAMPLES = 16
"""A task that stays without success over so many samples counts as out of reach."""
ADVICE_SHARE = 0.5


def pass_at_k(*, num_successes: int, num_samples: int, k: int) -> float:
    """The chance that one of k samples succeeds. Raises ValueError unless 1 <= k <= num_samples."""
    if not 1 <= k <= num_samples or not 0 <= num_successes <= num_samples:
        raise ValueError(
            f"pass@{k} needs {k} samples or more, got {num_successes} successes in {num_samples}"
        )
    return 1 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def coverage_report(
    returns_by_task: Mapping[str, Sequence[float]],
    successes_by_task: Mapping[str, Sequence[bool]],
    *,
    beta: float,
    ks: Sequence[int] = (1, 4, 8, 16),
) -> dict[str, Any]:
    """What the samples of each task say about the reference, as JSON values.

    Both mappings have the same tasks, each with at least one sample. Means are over tasks, each
    with the same weight however often it was sampled. A task with n < k samples enters pass@k with
    its pass@n, a lower bound; `tasks_below_k` says how many do. `share_resting_on_one` is the share
    of tasks whose V* amounts to fewer than two of its several samples. `advice` is None or a text
    for people: it speaks up when fewer than half of the tasks have a success. Raises ValueError for
    no tasks, for tasks without samples, and where the two mappings disagree.
    """
    _check_tasks(returns_by_task, successes_by_task)
    num_tasks = len(successes_by_task)
    counts = [(sum(successes), len(successes)) for successes in successes_by_task.values()]
    effective = [effective_sample_size(r, beta=beta) for r in returns_by_task.values()]
    return {
        "num_tasks": num_tasks,
        "num_samples": sum(n for _, n in counts),
        "tasks_by_num_samples": {
            str(n): tasks for n, tasks in sorted(Counter(n for _, n in counts).items())
        },
        "pass_at_k": {
            str(k): sum(pass_at_k(num_successes=c, num_samples=n, k=min(k, n)) for c, n in counts)
            / num_tasks
            for k in ks
        },
        "tasks_below_k": {str(k): sum(n < k for _, n in counts) for k in ks},
        "share_never_solved": sum(c == 0 for c, _ in counts) / num_tasks,
        "share_always_solved": sum(c == n for c, n in counts) / num_tasks,
        "mean_return": sum(soft_value(r, beta=math.inf) for r in returns_by_task.values())
        / num_tasks,
        "mean_v_star": sum(soft_value(r, beta=beta) for r in returns_by_task.values()) / num_tasks,
        "mean_effective_samples": sum(effective) / num_tasks,
        "share_resting_on_one": sum(
            size < 2 <= n for size, (_, n) in zip(effective, counts, strict=True)
        )
        / num_tasks,
        "beta1": beta,
        "advice": _advice(counts),
    }


def coverage_sentence(report: Mapping[str, Any]) -> str:
    """What Stage 1 found, in a line for people; pass@k for 1 and the largest k all tasks allow."""
    num_below = report["tasks_below_k"]
    allowed = [k for k in report["pass_at_k"] if num_below[k] == 0]
    passes = [
        f"pass@{k} {report['pass_at_k'][k]:.0%}" for k in dict.fromkeys(allowed[:1] + allowed[-1:])
    ]
    parts = [
        f"{report['num_samples']} samples of {report['num_tasks']} tasks",
        *passes,
        f"{report['share_never_solved']:.0%} never solved",
        f"{report['share_always_solved']:.0%} always solved",
    ]
    if report.get("share_turns_known") is not None:
        parts.append(f"{report['share_turns_known']:.0%} of later turns in a state of known value")
    return "Stage 1: " + ", ".join(parts) + "."


def _check_tasks(
    returns_by_task: Mapping[str, Sequence[float]], successes_by_task: Mapping[str, Sequence[bool]]
) -> None:
    if not successes_by_task:
        raise ValueError("a coverage report needs at least one task, got none")
    if returns_by_task.keys() != successes_by_task.keys():
        raise ValueError(
            f"returns are of {len(returns_by_task)} tasks and successes of "
            f"{len(successes_by_task)}, expected the same tasks"
        )
    for task_id, successes in successes_by_task.items():
        if len(successes) == 0 or len(successes) != len(returns_by_task[task_id]):
            raise ValueError(
                f"task {task_id} has {len(returns_by_task[task_id])} returns and "
                f"{len(successes)} successes, expected the same number and at least 1"
            )


def _advice(counts: Sequence[tuple[int, int]]) -> str | None:
    num_solved = sum(c > 0 for c, _ in counts)
    if num_solved >= ADVICE_SHARE * len(counts):
        return None
    finding = f"The reference solves {num_solved} of {len(counts)} tasks at least once. "
    num_undecided = sum(c == 0 and n < ADVICE_SAMPLES for c, n in counts)
    if num_undecided:
        finding += (
            f"{num_undecided} of the others have fewer than {ADVICE_SAMPLES} samples: sample them "
            "more often first. If that does not help, "
        )
    else:
        finding += "A*-PO has little to learn from here: "
    return finding + (
        "warm-start the reference on demonstrations, or use a shaped reward that tells failures "
        "apart."
    )
