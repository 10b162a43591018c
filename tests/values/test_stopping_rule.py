"""What stopping by results does to V_hat, exactly: success 1, failure 0, chance p of a success.

A design is walked through its looks; the states are (successes, samples) with their probabilities.
The tables of docs/algorithm.md are made here and compared with the page line by line; run this file
as a script to print them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ragen_apo.values.estimator import SampleSchedule, next_num_samples, soft_value

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithm.md"
RATES = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
SPREAD = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Success rates of the tasks of a made-up environment, one task each."""

Stops = dict[tuple[int, int], float]
"""(successes, samples) at the stop -> probability."""
Estimate = Callable[[int, int], float]
"""V_hat from (successes, samples)."""


def binomial(count: int, *, n: int, p: float) -> float:
    return math.comb(n, count) * p**count * (1 - p) ** (n - count)


def stops(schedule: SampleSchedule, *, p: float, delayed: bool = False) -> Stops:
    """Where the package's rule stops; `delayed`: it looks at all but the newest round."""
    rounds = schedule.rounds()
    ended: Stops = defaultdict(float)
    live = {(0, 0): 1.0}  # (successes, successes before the newest round)
    before = 0
    for total in rounds:
        grown: Stops = defaultdict(float)
        for (old, _), chance in live.items():
            for new in range(total - before + 1):
                grown[old + new, old] += chance * binomial(new, n=total - before, p=p)
        live = {}
        for (now, old), chance in grown.items():
            seen, num_seen = (old, before) if delayed else (now, total)
            goes_on = total < schedule.cap and (
                num_seen == 0
                or next_num_samples(schedule, num_successes=seen, num_samples=num_seen) > num_seen
            )
            if goes_on:
                live[now, old] = chance
            else:
                ended[now, total] += chance
        before = total
    return ended


def fixed(n: int, *, p: float) -> Stops:
    return {(count, n): binomial(count, n=n, p=p) for count in range(n + 1)}


def fresh(schedule: SampleSchedule, *, p: float) -> tuple[Stops, float]:
    """The first round decides between `first` and `cap` new samples and is then thrown away."""
    ended: Stops = defaultdict(float)
    for seen, chance in fixed(schedule.first, p=p).items():
        more = next_num_samples(schedule, num_successes=seen[0], num_samples=schedule.first)
        n = schedule.cap if more > schedule.first else schedule.first
        for state, other in fixed(n, p=p).items():
            ended[state] += chance * other
    return ended, schedule.first + mean_samples(ended)


def unbiased_rate(schedule: SampleSchedule) -> dict[tuple[int, int], float]:
    """E[first sample | where the rule stops]: unbiased for p under any rule (Girshick et al. 1946).

    The share of the ways to the stop that begin with a success; it does not depend on p.
    """
    half = stops(schedule, p=0.5)
    begun = defaultdict(float)
    first = schedule.first
    for state in half:
        begun[state] = 0.0
    # Ways that begin with a success: the first round has one more for sure.
    live = {count + 1: 0.5 * binomial(count, n=first - 1, p=0.5) for count in range(first)}
    before = first
    for total in [*schedule.rounds()[1:], None]:
        going = {}
        for count, chance in live.items():
            if next_num_samples(schedule, num_successes=count, num_samples=before) > before:
                going[count] = chance
            else:
                begun[count, before] += chance
        if total is None:
            break
        live = defaultdict(float)
        for count, chance in going.items():
            for new in range(total - before + 1):
                live[count + new] += chance * binomial(new, n=total - before, p=0.5)
        before = total
    return {state: begun[state] / half[state] for state in half}


def all_samples(beta: float) -> Estimate:
    """The package's estimator."""
    return lambda count, n: soft_value([1.0] * count + [0.0] * (n - count), beta=beta)


def value_of(p: float, *, beta: float) -> float:
    return beta * math.log1p(p * math.expm1(1 / beta))


def mean_samples(ended: Stops) -> float:
    return sum(chance * n for (_, n), chance in ended.items())


@dataclass(frozen=True)
class Quality:
    bias: float
    rmse: float


def quality(ended: Stops, estimate: Estimate, *, p: float, beta: float = 0.5) -> Quality:
    assert sum(ended.values()) == pytest.approx(1)
    errors = [(chance, estimate(*at) - value_of(p, beta=beta)) for at, chance in ended.items()]
    return Quality(
        bias=sum(chance * error for chance, error in errors),
        rmse=math.sqrt(sum(chance * error**2 for chance, error in errors)),
    )


SCHEDULE = SampleSchedule(first=4, cap=16)
"""A run's default with `adaptive_vstar`."""


def bias_table() -> list[str]:
    """One line for each success rate, bias / root mean squared error, beta1 = 0.5."""
    rates = unbiased_rate(SCHEDULE)
    estimate = all_samples(0.5)
    lines = []
    for p in RATES:
        ended, late = stops(SCHEDULE, p=p), stops(SCHEDULE, p=p, delayed=True)
        new, cost_of_new = fresh(SCHEDULE, p=p)
        cost = mean_samples(ended)
        alike = math.ceil(cost)
        cells = [
            f"{p:g}",
            f"{cost:.1f}",
            shown(quality(ended, estimate, p=p)),
            shown(quality(ended, lambda c, n: value_of(rates[c, n], beta=0.5), p=p)),
            shown(quality(late, estimate, p=p), cost=mean_samples(late)),
            shown(quality(new, estimate, p=p), cost=cost_of_new),
            shown(quality(fixed(alike, p=p), estimate, p=p), cost=alike),
            shown(quality(fixed(16, p=p), estimate, p=p)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def shown(result: Quality, *, cost: float | None = None) -> str:
    return f"{result.bias:+.3f} / {result.rmse:.3f}" + ("" if cost is None else f" ({cost:.1f})")


def budget_table() -> list[str]:
    """One line for each schedule: error over `SPREAD` against that of a fixed N of equal cost."""
    lines = []
    for first, cap in ((4, 16), (4, 64), (8, 16), (8, 64)):
        schedule = SampleSchedule(first=first, cap=cap)
        cells = [f"{first} to {cap}"]
        ends = {p: stops(schedule, p=p) for p in SPREAD}
        cost = sum(map(mean_samples, ends.values())) / len(SPREAD)
        cells.append(f"{cost:.1f}")
        for beta in (0.5, 0.2, 0.1):
            error = spread_error(lambda p, ends=ends: ends[p], beta=beta)
            cells.append(f"{error:.3f} / {fixed_error(cost, beta=beta):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread_error(design: Callable[[float], Stops], *, beta: float) -> float:
    estimate = all_samples(beta)
    squares = [quality(design(p), estimate, p=p, beta=beta).rmse ** 2 for p in SPREAD]
    return math.sqrt(sum(squares) / len(squares))


def fixed_error(cost: float, *, beta: float) -> float:
    """A share of the tasks gets one sample more than the others, so that the cost is met."""
    low = math.floor(cost)
    squares = [spread_error(lambda p, n=n: fixed(n, p=p), beta=beta) ** 2 for n in (low, low + 1)]
    return math.sqrt((low + 1 - cost) * squares[0] + (cost - low) * squares[1])


@pytest.mark.parametrize("delayed", [False, True])
def test_the_walk_equals_playing_every_sequence_of_results(delayed: bool) -> None:
    schedule, p = SampleSchedule(first=2, cap=8), 0.3
    expected: Stops = defaultdict(float)
    for results in itertools.product((0, 1), repeat=8):
        chance = math.prod(p if result else 1 - p for result in results)
        seen = 0
        for total in schedule.rounds():
            counted = sum(results[: seen if delayed else total])
            looked = seen if delayed else total
            more = looked == 0 or (
                next_num_samples(schedule, num_successes=counted, num_samples=looked) > looked
            )
            if not more or total == 8:
                expected[sum(results[:total]), total] += chance
                break
            seen = total
    assert stops(schedule, p=p, delayed=delayed) == pytest.approx(expected)


@pytest.mark.parametrize("p", RATES)
def test_stopping_by_results_overrates_the_success_rate_and_the_share_of_ways_does_not(
    p: float,
) -> None:
    ended, rates = stops(SCHEDULE, p=p), unbiased_rate(SCHEDULE)
    plain = sum(chance * count / n for (count, n), chance in ended.items())
    assert plain > p + 1e-4
    assert sum(chance * rates[at] for at, chance in ended.items()) == pytest.approx(p)
    untouched = sum(chance * count / n for (count, n), chance in fixed(16, p=p).items())
    assert untouched == pytest.approx(p)


def test_the_bias_of_the_rule_is_small_against_its_error_and_removing_it_costs_more() -> None:
    rates, estimate = unbiased_rate(SCHEDULE), all_samples(0.5)
    squares = {"all": 0.0, "unbiased": 0.0}
    for p in SPREAD:
        ended = stops(SCHEDULE, p=p)
        plain = quality(ended, estimate, p=p)
        assert abs(plain.bias) < 0.35 * plain.rmse
        squares["all"] += plain.rmse**2
        squares["unbiased"] += (
            quality(ended, lambda c, n: value_of(rates[c, n], beta=0.5), p=p).rmse ** 2
        )
    assert squares["unbiased"] > 1.1 * squares["all"]


def test_adaptive_rounds_beat_a_fixed_number_where_beta1_is_small_and_only_there() -> None:
    schedule = SampleSchedule(first=4, cap=64)
    ends = {p: stops(schedule, p=p) for p in SPREAD}
    cost = sum(map(mean_samples, ends.values())) / len(SPREAD)
    ratio = {
        beta: spread_error(ends.__getitem__, beta=beta) / fixed_error(cost, beta=beta)
        for beta in (0.5, 0.1)
    }
    assert ratio[0.1] < 0.6
    assert ratio[0.5] > 1.2


def test_the_error_of_v_hat_is_largest_near_one_over_one_plus_exp_of_one_over_beta1() -> None:
    # sd(V_hat) ~ beta1 k sqrt(p (1 - p) / N) / (1 + k p) with k = exp(1 / beta1) - 1, whose
    # derivative vanishes at p = 1 / (k + 2): 0.119 at beta1 = 0.5.
    worst = 1 / (1 + math.exp(2))
    estimate = all_samples(0.5)
    errors = {p: quality(fixed(64, p=p), estimate, p=p).rmse for p in (0.02, worst, 0.5)}
    k = math.expm1(2)
    for p, error in errors.items():
        predicted = 0.5 * k * math.sqrt(p * (1 - p) / 64) / (1 + k * p)
        assert error == pytest.approx(predicted, rel=0.05)
        assert error < 0.5 * math.sqrt((1 - p) / (64 * p))  # the bound of the schedule
    assert errors[worst] > 1.4 * max(errors[0.02], errors[0.5])


@pytest.mark.parametrize(
    ("p", "fixed_four", "fixed_eight", "adaptive"),
    [
        (0.1, 0.656, 0.430, 0.185),
        (0.25, 0.316, 0.100, 0.010),
    ],
)
def test_fewer_solvable_tasks_look_hopeless_with_adaptive_rounds(
    p: float, fixed_four: float, fixed_eight: float, adaptive: float
) -> None:
    # Nothing but failures: (1 - p)^N, with N = 16 under the rule.
    hopeless = [
        sum(chance for (count, _), chance in ended.items() if count == 0)
        for ended in (fixed(4, p=p), fixed(8, p=p), stops(SCHEDULE, p=p))
    ]
    assert hopeless == pytest.approx([fixed_four, fixed_eight, adaptive], abs=5e-4)


@pytest.mark.parametrize(("p", "bias"), [(0.1, 0.117), (0.5, -0.019), (0.9, -0.039)])
def test_the_value_of_a_task_that_was_chosen_for_its_variance_is_biased_by_the_choice(
    p: float, bias: float
) -> None:
    kept = {at: chance for at, chance in fixed(8, p=p).items() if 0 < at[0] < at[1]}
    total = sum(kept.values())
    chosen = {at: chance / total for at, chance in kept.items()}
    assert quality(chosen, all_samples(0.5), p=p).bias == pytest.approx(bias, abs=5e-4)


@pytest.mark.parametrize("line", bias_table() + budget_table())
def test_the_tables_of_the_page_are_the_exact_ones(line: str) -> None:
    assert line in PAGE.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    print("\n".join([*bias_table(), "", *budget_table()]))
