"""Coverage of Stage 1: how many tasks the reference solves before any training.

Consumes returns and successes per task as the value store keeps them; produces a dictionary of JSON
values. Pure. A*-PO reweights the reference's behaviour. So a task that the reference never solves
teaches little.

pass@k is the probability that at least one of k samples succeeds. It is estimated without bias from
c successes in n >= k samples (Chen et al., arXiv 2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)

Without bias, that is, where n does not depend on the samples. Adaptive sampling stops where a task
is solved. So for k up to `values.num_samples`, that many first samples of each count then. For
larger k all count, and of a task with fewer samples its pass@n; that is too high.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_apo.plural import counted
from ragen_apo.values.estimator import effective_sample_size, soft_value

ADVICE_SAMPLES = 16
"""A task without success in this many samples counts as out of reach."""
ADVICE_SHARE = 0.5
MAX_UNREADABLE_SHARE = 0.5
"""Above this share of unreadable responses, the advice is about their form."""
MAX_INVALID_SHARE = 0.5
"""Above this share of actions that could not be executed, the advice is about them."""
MAX_CUT_SHARE = 0.25
"""Above this share of episodes that a full context ended, the advice is about their length."""
EASY_SAMPLES = 4
EASY_SHARE = 0.5
"""Above this share of tasks that were solved in all their samples, at least four, tasks are too
easy."""
PASS_KS = (1, 4, 8, 16)


@dataclass(frozen=True)
class Faults:
    """What may be wrong with episodes, whatever their tasks are."""

    unreadable: float = 0.0
    """Share of turns whose response held no action that could be read."""
    invalid: float = 0.0
    """Share of turns whose action the environment could not execute."""
    cut: float = 0.0
    """Share of episodes that ended because the context was full."""
    form_is_told: bool = False
    """Whether the system prompt states the form of a response already."""


def pass_at_k(*, num_successes: int, num_samples: int, k: int) -> float:
    """The unbiased estimate above. Raises ValueError unless 1 <= k <= num_samples."""
    if not 1 <= k <= num_samples or not 0 <= num_successes <= num_samples:
        raise ValueError(
            f"pass@{k} needs {counted(k, 'sample')} or more, got "
            f"{counted(num_successes, 'success', 'successes')} in {num_samples}"
        )
    return 1 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def coverage_report(
    returns_by_task: Mapping[str, Sequence[float]],
    successes_by_task: Mapping[str, Sequence[bool]],
    *,
    beta: float,
    faults: Faults | None = None,
    num_first: int | None = None,
) -> dict[str, Any]:
    """Statistics of the samples of each task, as JSON values; docs/metrics.md has every key.

    Means are over tasks, each with the same weight however often it was sampled. `faults` are those
    of the episodes, if they were counted. `num_first`: after how many samples of a task its
    successes decided whether it got more, if they did. Raises ValueError unless both mappings have
    the same tasks, each with the same number of samples, at least one.
    """
    num_returns = {task: len(returns) for task, returns in returns_by_task.items()}
    num_outcomes = {task: len(successes) for task, successes in successes_by_task.items()}
    if num_returns != num_outcomes or 0 in num_returns.values() or not num_returns:
        raise ValueError(
            "expected tasks with the same number of returns and successes, at least 1, got "
            f"{num_returns!s:.200} and {num_outcomes!s:.200}"
        )
    num_tasks = len(successes_by_task)
    counts = [(sum(successes), len(successes)) for successes in successes_by_task.values()]
    ks = _available_ks([n for _, n in counts])
    effective = [effective_sample_size(r, beta=beta) for r in returns_by_task.values()]
    return {
        "num_tasks": num_tasks,
        "num_samples": sum(n for _, n in counts),
        "tasks_by_num_samples": {
            str(n): tasks for n, tasks in sorted(Counter(n for _, n in counts).items())
        },
        "pass_at_k": {
            str(k): _mean_pass_at(k, successes_by_task.values(), num_first=num_first) for k in ks
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
        "share_unreadable": faults and faults.unreadable,
        "share_invalid": faults and faults.invalid,
        "share_cut_by_context": faults and faults.cut,
        "advice": _advice(counts, list(returns_by_task.values()), faults or Faults())
        if few_are_solved(successes_by_task)
        else _too_easy(counts),
    }


def _mean_pass_at(k: int, successes: Collection[Sequence[bool]], *, num_first: int | None) -> float:
    """pass@k, mean over tasks; of fewer than k samples pass@n."""
    end = num_first if num_first is not None and k <= num_first else None
    first = [each[:end] for each in successes]
    return sum(
        pass_at_k(num_successes=sum(each), num_samples=len(each), k=min(k, len(each)))
        for each in first
    ) / len(first)


def _available_ks(num_samples: Sequence[int]) -> list[int]:
    """The smallest number of samples of a task, and those of 1, 4, 8, 16 up to the largest."""
    fewest, most = min(num_samples), max(num_samples)
    return sorted({fewest, *(k for k in PASS_KS if k <= most)})


def few_are_solved(successes_by_task: Mapping[str, Sequence[bool]]) -> bool:
    """Whether fewer than half of the tasks have a success.

    One sample a task cannot say which of the others are within reach. There it is whether fewer
    than half would have one in 16 samples if all tasks were alike.
    """
    num_tasks = len(successes_by_task)
    num_solved = sum(any(successes) for successes in successes_by_task.values())
    if all(len(successes) == 1 for successes in successes_by_task.values()):
        return 1 - (1 - num_solved / num_tasks) ** ADVICE_SAMPLES < ADVICE_SHARE
    return num_solved < ADVICE_SHARE * num_tasks


def coverage_sentence(report: Mapping[str, Any]) -> str:
    """Stage 1 in a line for people; pass@k for the smallest and largest k that all tasks allow."""
    num_below = report["tasks_below_k"]
    allowed = [k for k in report["pass_at_k"] if num_below[k] == 0]
    passes = [
        f"pass@{k} {report['pass_at_k'][k]:.0%}" for k in dict.fromkeys(allowed[:1] + allowed[-1:])
    ]
    parts = [
        f"{counted(report['num_samples'], 'sample')} of {counted(report['num_tasks'], 'task')}",
        *passes,
        f"{report['share_never_solved']:.0%} never solved",
        f"{report['share_always_solved']:.0%} always solved",
    ]
    if report.get("share_turns_known") is not None:
        known = f"{report['share_turns_known']:.0%}"
        parts.append(f"{known} of later turns in a state that enough other episodes visited")
    sentence = "Stage 1: " + ", ".join(parts) + "."
    if report.get("num_known_states") == 0 and report.get("share_turns_known") is not None:
        sentence += (
            " No state was visited as often as algorithm.min_visits asks for, so none has a value "
            "and every episode is one segment: A*-PO by trajectory. For more, set "
            "values.estimator to regression, raise values.num_samples or set min_visits to 1."
        )
    return sentence


def _advice(
    counts: Sequence[tuple[int, int]], returns: Sequence[Sequence[float]], faults: Faults
) -> str:
    """The finding for few or no solved tasks, and the remedies: for the faults of the episodes if
    they have any.
    """
    finding = _finding(counts, returns)
    if found := _faults_found(faults):
        return " ".join([finding, *found])
    remedy = (
        "warm-start the reference on demonstrations (warm_start.demonstrations), or use a shaped "
        "reward that tells failures apart."
    )
    num_unsolved = sum(c == 0 for c, _ in counts)
    num_undecided = sum(c == 0 and n < ADVICE_SAMPLES for c, n in counts)
    if not num_undecided:
        return f"{finding} What to do: {remedy}"
    who = "Of the others," if num_unsolved < len(counts) else "Of these tasks,"
    verb = "has" if num_undecided == 1 else "have"
    return (
        f"{finding} {who} {num_undecided} {verb} fewer than {ADVICE_SAMPLES} samples: sample them "
        f"more often first (values.num_samples). If that does not help, {remedy}"
    )


def _too_easy(counts: Sequence[tuple[int, int]]) -> str | None:
    """What to do where most tasks have nothing left to learn, by enough samples to say so."""
    num_solved = sum(c == n >= EASY_SAMPLES for c, n in counts)
    if num_solved <= EASY_SHARE * len(counts):
        return None
    return (
        f"The reference solves {num_solved} of {counted(len(counts), 'task')} in all samples. "
        "Where nothing else is rewarded, they cannot teach it anything. Use harder tasks"
        + (", or let rollout_filter leave these out." if num_solved < len(counts) else ".")
    )


def _faults_found(faults: Faults) -> list[str]:
    """What is wrong with many turns or episodes, each with its remedy."""
    found: list[str] = []
    if faults.unreadable > MAX_UNREADABLE_SHARE:
        found.append(
            f"In {faults.unreadable:.0%} of the turns the response held no readable "
            "answer. Look at some (`ragen-apo view RUN`, Value store). If they are cut off, raise "
            f"agent.max_response_tokens. {_how_to_get_the_form(faults)}"
        )
    if faults.invalid > MAX_INVALID_SHARE:
        found.append(
            f"In {faults.invalid:.0%} of the turns the environment could not execute the "
            "action. Look at some (`ragen-apo view RUN`, Value store). A pretrained model has to "
            "be told the actions: in the observation, or by agent.system_prompt (rules or "
            "rules_and_format). A model that is built on the spot learns them from more "
            "demonstrations (warm_start.demonstrations.num_steps)."
        )
    if faults.cut > MAX_CUT_SHARE:
        found.append(
            f"{faults.cut:.0%} of the episodes ended because the context was full, "
            "before their environment ended them. Raise agent.max_context_tokens, let the "
            "environment answer with shorter texts, or let the policy read the last turns only "
            "(agent.context.mode: last_turns)."
        )
    return found


def _how_to_get_the_form(faults: Faults) -> str:
    if faults.form_is_told:
        return (
            "If they have another form, which the system prompt has told it, let the model imitate "
            "demonstrations first (warm_start.demonstrations), or take another one."
        )
    return (
        "If they have another form, set agent.system_prompt: rules_and_format; rules alone does "
        "not state it. A model that is built on the spot learns the form from more demonstrations "
        "(warm_start.demonstrations.num_steps)."
    )


def _finding(counts: Sequence[tuple[int, int]], returns: Sequence[Sequence[float]]) -> str:
    num_solved = sum(c > 0 for c, _ in counts)
    if num_solved:
        return f"The reference solves {num_solved} of {counted(len(counts), 'task')} at least once."
    samples = counted(sum(n for _, n in counts), "sample")
    finding = f"No task was solved: {samples} of {counted(len(counts), 'task')}, no success."
    if len({each for of_task in returns for each in of_task}) == 1:
        return f"{finding} All returns are equal, so Stage 2 cannot learn."
    if any(len(set(of_task)) > 1 for of_task in returns):
        return (
            f"{finding} Stage 2 can only learn from what else is rewarded. If some of them ended "
            "well, the environment does not say so: `success` is false where it is forgotten."
        )
    if any(len(of_task) > 1 for of_task in returns):
        return f"{finding} All returns of a task are equal, so Stage 2 cannot learn."
    return f"{finding} One sample of a task cannot tell whether its returns differ at all."
