"""What distillation and Stage 2 do to success, to pass@8 and to entropy.

    python -m benchmarks.distillation runs/compare/seed-*/a-po-distilled

For each run the reference, the distilled and the trained policy play the tasks of the evaluation,
once greedily and eight times at the temperature of training.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from benchmarks.runs import greedy_episodes, percent, sampled_episodes
from benchmarks.tables import write_page

from ragen_apo.config import load_config
from ragen_apo.evaluation.summary import pass_at_by_task
from ragen_apo.run_directory import RunDirectory, open_run
from ragen_apo.types import Trajectory

NUM_SAMPLES = 8


def entropy(episodes: list[Trajectory]) -> float:
    """Mean -log pi of the sampled tokens, in nats."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return -fmean(logprob for turn in turns for logprob in turn.logprobs)


def measured(run: RunDirectory, folder: Path) -> dict[str, float]:
    """Shares and nats of one model folder."""
    section = load_config(run.config).evaluation
    plan = {"split": section.split, "num_episodes": section.num_episodes}
    greedy = greedy_episodes(run, folder, **plan)
    sampled = sampled_episodes(run, folder, num_samples=NUM_SAMPLES, **plan)
    pass_at = pass_at_by_task(sampled, [1, NUM_SAMPLES])
    return {
        "greedy": fmean(float(episode.success) for episode in greedy),
        "pass@1": pass_at["1"],
        "pass@8": pass_at[str(NUM_SAMPLES)],
        "entropy": entropy(sampled),
    }


def main() -> None:
    """Measures the runs and writes benchmarks/results/distillation.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    columns: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in ("reference", "distilled", "trained")
    }
    for path in arguments.runs:
        run = open_run(path)
        folders = {
            "reference": run.reference(0),
            "distilled": run.distilled,
            "trained": run.policy,
        }
        for name, folder in folders.items():
            for key, value in measured(run, folder).items():
                columns[name][key].append(value)
    write_page(
        "distillation",
        title="What distillation does to success, pass@8 and entropy",
        notes=(
            f"There are {len(arguments.runs)} runs, one a seed: mean ± standard deviation. "
            f"Success is that of greedy play. pass@k is of {NUM_SAMPLES} episodes a task at the "
            "temperature of training. Entropy is the mean -log pi of the tokens of these episodes, "
            "in nats."
        ),
        header=["policy", "greedy, %", "pass@1, %", "pass@8, %", "entropy"],
        rows=[
            [
                name,
                *(percent(values[key]) for key in ("greedy", "pass@1", "pass@8")),
                f"{fmean(values['entropy']):.3f}",
            ]
            for name, values in columns.items()
        ],
    )


if __name__ == "__main__":
    main()
