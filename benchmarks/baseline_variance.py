"""What each baseline leaves of the returns' variance, from a value store alone.

    python -m benchmarks.baseline_variance LABEL=STORE.sqlite [LABEL=STORE ...] [--samples 1 3]

A baseline b(x) that does not depend on the episode leaves the expected policy gradient as it is;
the variance of R - b is what it leaves to average out. Every stored return is held out in turn, and
b is computed from others:

    batch mean    the returns of all other tasks, what a large batch without groups subtracts
    group mean    `samples` other returns of the task: GRPO and RLOO, with a group of one more
    V*            beta log mean exp(r / beta) of the same returns, at the betas of the columns
    fitted V*     a + c V*, with the slope c that fits best (`algorithm.fit_values`)
    within        no baseline by task leaves less: the mean variance of a task's own returns

Shares of the variance around the batch mean, after a constant is subtracted (`center_residuals`),
with the standard error over tasks. Tasks under equal labels are pooled, as is their batch mean.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.tables import write_page

from ragen_apo.values.estimator import soft_value
from ragen_apo.web.view.value_store import all_conditions, reading

BETAS = (0.1, 0.5, 2.0)
FITTED_BETA = 0.5
BASELINES = (
    "batch mean",
    "group mean",
    *(f"V*, beta {beta:g}" for beta in BETAS),
    f"fitted V*, beta {FITTED_BETA:g}",
)


def stored_returns(path: Path, *, at_least: int) -> list[np.ndarray]:
    """The returns of each task of the store's first conditions, of those that have so many."""
    digest = next(iter(all_conditions(path)))
    by_task: dict[str, list[float]] = defaultdict(list)
    with reading(path) as connection:
        for task_id, episode_return in connection.execute(
            "SELECT task_id, episode_return FROM samples WHERE conditions = ? "
            "ORDER BY task_id, sample_index",
            (digest,),
        ):
            by_task[task_id].append(episode_return)
    return [np.array(returns) for returns in by_task.values() if len(returns) >= at_least]


def held_out_residuals(
    returns: Sequence[np.ndarray], *, num_samples: int
) -> dict[str, list[np.ndarray]]:
    """By baseline, for each task the residual of each of its returns."""
    total, count = sum(float(r.sum()) for r in returns), sum(len(r) for r in returns)
    residuals: dict[str, list[np.ndarray]] = defaultdict(list)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for own in returns:
        elsewhere = (total - float(own.sum())) / (count - len(own))
        others = [np.roll(own, -index - 1)[:num_samples] for index in range(len(own))]
        residuals["batch mean"].append(own - elsewhere)
        residuals["group mean"].append(own - [float(other.mean()) for other in others])
        for beta in BETAS:
            values = [soft_value(other, beta=beta) for other in others]
            residuals[f"V*, beta {beta:g}"].append(own - values)
            if beta == FITTED_BETA:
                rows.append((own, np.array(values)))
    slope, start = np.polyfit(np.concatenate([v for _, v in rows]), np.concatenate(returns), 1)
    residuals[BASELINES[-1]] = [own - (start + slope * values) for own, values in rows]
    return residuals


def left_over(residuals: Sequence[np.ndarray], total: float) -> tuple[float, float]:
    """The residuals' variance as a share of `total`, and its standard error over tasks."""
    centre = float(np.mean(np.concatenate(residuals)))
    by_task = np.array([float(((each - centre) ** 2).mean()) for each in residuals]) / total
    return float(by_task.mean()), float(by_task.std(ddof=1)) / math.sqrt(len(by_task))


def table_row(label: str, returns: Sequence[np.ndarray], *, num_samples: int) -> list[str]:
    """One row of the table: the tasks pooled under one label."""
    residuals = held_out_residuals(returns, num_samples=num_samples)
    flat = np.concatenate(residuals["batch mean"])
    total = float(((flat - flat.mean()) ** 2).mean())
    within = float(np.mean([own.var(ddof=1) for own in returns])) / total
    cells = [left_over(residuals[baseline], total) for baseline in BASELINES]
    mean = float(np.mean(np.concatenate(returns)))
    return [
        label,
        str(num_samples),
        str(len(returns)),
        f"{mean:.2f}",
        f"{within:.2f}",
        *(f"{share:.2f} ± {error:.2f}" for share, error in cells[1:]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("stores", nargs="+", metavar="LABEL=STORE")
    parser.add_argument("--samples", type=int, nargs="+", default=[3], help="of a task's others")
    given = parser.parse_args()
    pooled: dict[str, list[np.ndarray]] = defaultdict(list)
    for pair in given.stores:
        label, _, path = pair.partition("=")
        pooled[label] += stored_returns(Path(path), at_least=max(given.samples) + 1)
    write_page(
        "baseline_variance",
        title="What a baseline leaves of the returns' variance",
        notes="Cells are shares of the variance around the batch mean. A baseline is made of as "
        "many other returns of the task as `samples` says.",
        header=["tasks of", "samples", "tasks", "mean return", "within", *BASELINES[1:]],
        rows=[
            table_row(label, returns, num_samples=num_samples)
            for label, returns in pooled.items()
            for num_samples in given.samples
        ],
    )


if __name__ == "__main__":
    main()
