"""Policies of a WebShop run on the standard test goals, their purchases under both rewards.

    python -m benchmarks.webshop_policies RUN FOLDER [FOLDER ...] [--sampled] [--episodes 500]

FOLDER is a model folder, such as RUN/references/0, RUN/references/1 or RUN/distilled: of a run that
has not ended as well. Greedy, or once at the run's `sampling.temperature`. Prints a JSON object a
policy: success and score in percent, and how the failed episodes ended.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks.runs import greedy_episodes, sampled_episodes
from benchmarks.webshop_rewards import purchases

from ragen_apo.config import load_run_config
from ragen_apo.environments.webshop.reward import RewardVariant
from ragen_apo.evaluation.summary import episode_rows
from ragen_apo.run_directory import RunDirectory, open_run


def measured(
    run: RunDirectory, folder: Path, *, num_episodes: int, sampled: bool
) -> dict[str, Any]:
    """What one policy does."""
    if sampled:
        episodes = sampled_episodes(
            run, folder, split="test", num_episodes=num_episodes, num_samples=1
        )
    else:
        episodes = greedy_episodes(run, folder, split="test", num_episodes=num_episodes)
    rows = list(episode_rows(episodes, policy=folder.name))
    options = load_run_config(run.config).environment.options | {"payoff": "dense"}
    return {
        "policy": str(folder),
        "episodes": len(rows),
        **{
            variant.value: purchases(rows, options | {"reward": variant.value}, split="test")
            for variant in RewardVariant
        },
        "turns": sum(len(row["turns"]) for row in rows) / len(rows),
        "failures": dict(Counter(row["failure"] for row in rows if not row["success"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--episodes", type=int, default=500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = open_run(given.run)
    for folder in given.folders:
        found = measured(run, folder, num_episodes=given.episodes, sampled=given.sampled)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
