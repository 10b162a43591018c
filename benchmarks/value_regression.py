"""What V* by regression leaves of the returns' variance, beside V* of the tasks' own samples.

    python -m benchmarks.value_regression LABEL=RUN [LABEL=RUN ...] [--samples 1]

RUN is a run directory whose store has at least two episodes a task more than `--samples`, as after
`ragen-apo estimate-values RUN --samples 8`. Values are made of `--samples` of them and tried on the
others, several times with other ones. All are means (beta = inf), so that what they leave is
variance. The columns, as shares of the variance of what is still to be earned:

    within            no value of a task leaves less: the mean variance of its own returns
    own samples       the mean of the task's samples
    own, fitted       a + c own samples, with the line that fits best (`algorithm.fit_values`)
    regression        `values.estimator: regression`, in first states
    later: own state  in the states after the first: the mean of what visited the state, or of the
                      task where nothing did
    later: regression in the states after the first
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from benchmarks.tables import write_page
from numpy.typing import NDArray

from ragen_apo.config import load_config
from ragen_apo.policy.turn_features import state_reader
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import open_run
from ragen_apo.session import open_session
from ragen_apo.stages.stored_values import stored_trajectories
from ragen_apo.stages.value_regression import features_of_turns
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.values.regression import fit_values
from ragen_apo.values.state_values import returns_to_go, state_values

NUM_SPLITS = 3
COLUMNS = (
    "within",
    "own samples",
    "own, fitted",
    "regression",
    "later: own state",
    "later: regression",
)


def row(label: str, path: Path, *, num_samples: int) -> list[str]:
    """The cells of one run: means over the splits."""
    run = open_run(path)
    config = load_config(run.config)
    session = open_session(config, run, SilentProgress())
    reference, tasks = session.load_model(run.reference(0)), session.training_tasks()
    episodes: dict[str, list[Trajectory]] = {task.task_id: [] for task in tasks}
    with session.value_store() as store:
        for episode in stored_trajectories(store, session.conditions(reference), tasks):
            episodes[episode.task.task_id].append(episode)
    needed = num_samples + NUM_SPLITS - 1
    if (fewest := min(map(len, episodes.values()))) < needed:
        sys.exit(f"{path} has {fewest} episodes of a task; expected {needed} or more (docstring)")
    size = config.training.micro_batch_size
    features = {
        task_id: features_of_turns(
            reference, list(map(training_samples, each)), state_reader, micro_batch_size=size
        )
        for task_id, each in episodes.items()
    }
    splits = []
    for split in range(NUM_SPLITS):
        used = range(split, split + num_samples)
        chosen = {id_: [each[index] for index in used] for id_, each in episodes.items()}
        flat = [episode for each in chosen.values() for episode in each]
        regression = fit_values(
            torch.cat([each[index] for each in features.values() for index in used]),
            [to_go for episode in flat for to_go in returns_to_go(episode)],
            episodes=[number for number, episode in enumerate(flat) for _ in episode.turns],
            tasks=[number // num_samples for number, each in enumerate(flat) for _ in each.turns],
            beta=math.inf,
            held_out="episodes",
        )
        value_of = regression.on(torch.device("cpu"))
        own = {
            id_: float(np.mean([episode.episode_return for episode in each]))
            for id_, each in chosen.items()
        }
        states = state_values(flat, beta=math.inf, min_visits=1)
        # A row is a state of a held-out episode: is it the first, to go, own, own state, value.
        held_out = np.array(
            [
                (index == 0, to_go, own[id_], states.get(turn.state_key or "", own[id_]), value)
                for id_, each in episodes.items()
                for number, episode in enumerate(each)
                if number not in used
                for index, (turn, to_go, value) in enumerate(
                    zip(
                        episode.turns,
                        returns_to_go(episode),
                        value_of(features[id_][number]).tolist(),
                        strict=True,
                    )
                )
            ]
        )
        splits.append(left_over(held_out))
    means = {name: float(np.mean([each[name] for each in splits])) for name in splits[0]}
    means["within"] = within(episodes)
    return [label, str(len(episodes)), *(f"{means[column]:.2f}" for column in COLUMNS)]


def left_over(held_out: NDArray[np.float64]) -> dict[str, float]:
    """The shares of the columns but `within`."""
    is_first = held_out[:, 0] > 0
    _, to_go, own, _, value = held_out[is_first].T
    shares = {
        "own samples": share(to_go - own, to_go),
        "own, fitted": share(to_go - np.polyval(np.polyfit(own, to_go, 1), own), to_go),
        "regression": share(to_go - value, to_go),
    }
    _, to_go, _, own_state, value = held_out[~is_first].T
    return shares | {
        "later: own state": share(to_go - own_state, to_go),
        "later: regression": share(to_go - value, to_go),
    }


def share(residuals: NDArray[np.float64], to_go: NDArray[np.float64]) -> float:
    """What is left of a variance; NaN where there is nothing."""
    return float(residuals.var() / to_go.var()) if len(to_go) else math.nan


def within(episodes: Mapping[str, Sequence[Trajectory]]) -> float:
    """The mean variance of a task's returns, as a share of the variance of all."""
    returns = [[episode.episode_return for episode in each] for each in episodes.values()]
    mean = np.mean([np.var(each, ddof=1) for each in returns])
    return float(mean / np.var(np.concatenate(returns)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    parser.add_argument("--samples", type=int, default=1, help="of each task that make its value")
    given = parser.parse_args()
    rows = []
    for pair in given.runs:
        label, _, path = pair.partition("=")
        rows.append(row(label, Path(path), num_samples=given.samples))
    write_page(
        "value_regression",
        title="What V* by regression leaves of the returns' variance",
        notes="Cells are shares of the variance of what is still to be earned, on episodes that "
        "made no value. The docstring of benchmarks/value_regression.py says what the columns are.",
        header=["tasks of", "tasks", *COLUMNS],
        rows=rows,
    )


if __name__ == "__main__":
    main()
