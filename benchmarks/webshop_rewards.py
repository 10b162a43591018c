"""The purchases of an evaluated WebShop run under both rewards: `upstream` and `corrected`.

    python -m benchmarks.webshop_rewards runs/webshop

Replays the actions in evaluation/episodes.jsonl. A purchase is scored when the episode is over, so
what an agent did does not depend on the reward that it is scored by; what it was trained on does.
Scores are out of 100 and without the costs of bad format. Prints one JSON object a policy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ragen_apo.config import load_config
from ragen_apo.environments.base import make_environment
from ragen_apo.environments.webshop.reward import RewardVariant
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import open_run


def purchases(
    episodes: Iterable[Mapping[str, Any]], options: Mapping[str, Any], *, split: str
) -> dict[str, float]:
    """Success and mean score, in percent, of the episodes' actions under the given options."""
    environment = make_environment("webshop", options)
    tasks = {task.task_id: task for task in environment.tasks(split)}
    scores: list[float] = []
    for episode in episodes:
        environment.reset(tasks[episode["task"]["task_id"]], seed=0)
        score = 0.0
        for turn in episode["turns"]:
            _, score, terminated, truncated, _ = environment.step(turn["action"] or "")
            if terminated or truncated:
                break
        scores.append(score)
    return {
        "success": round(100 * sum(score >= 1 for score in scores) / len(scores), 1),
        "score": round(100 * sum(scores) / len(scores), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = open_run(parser.parse_args().run)
    options = load_config(run.config).environment.options | {"payoff": "dense"}
    rows = read_json_lines(run.episodes)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        episodes = [row for row in rows if row["policy"] == policy]
        found = {
            variant.value: purchases(
                episodes, options | {"reward": variant.value}, split=episodes[0]["task"]["split"]
            )
            for variant in RewardVariant
        }
        print(json.dumps({"policy": policy, "episodes": len(episodes), **found}))


if __name__ == "__main__":
    main()
