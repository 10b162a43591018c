"""Policies of a WebShop run on its test goals, their purchases under both rewards.

    python -m benchmarks.webshop_policies RUN FOLDER [FOLDER ...] [--sampled] [--episodes 500]
    python -m benchmarks.webshop_policies RUN FOLDER [FOLDER ...] --per-product 4

FOLDER is a model folder, such as RUN/references/0, RUN/references/1 or RUN/distilled: of a run that
has not ended as well. Greedy, or once at the run's `sampling.temperature`. Prints a JSON object a
policy: success and score in percent, and how the failed episodes ended, also in terms of the shop.

With `--per-product` at most so many goals of every product of the test split are played, greedily,
and `by_product` is the mean of the products' success under `corrected` with its standard error.
Goals of one product fail together: of the first 500 of the split `product` three products have 277.

With `--part` the run's environment is a mixture, and this WebShop of it is played.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from benchmarks.runs import greedy_episodes, greedy_episodes_on, sampled_episodes
from benchmarks.webshop_learning import failure
from benchmarks.webshop_rewards import purchases

from ragen_apo.config import RunConfig, load_run_config
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.references import environment_of_part
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import goal_book, goal_of_task
from ragen_apo.evaluation.summary import episode_rows
from ragen_apo.run_directory import RunDirectory, open_run


def configuration(run: RunDirectory, part: str | None) -> RunConfig:
    """That of the run, with this part of its mixture as the environment."""
    config = load_run_config(run.config)
    if part is None:
        return config
    parts = config.environment.options.get("parts", {})
    if part not in parts:
        names = ", ".join(parts) or "none, as its environment is no mixture"
        raise SystemExit(f"--part {part}: the run has no such part; its parts: {names}")
    options = {key: value for key, value in parts[part].items() if key not in ("name", "weight")}
    name = environment_of_part(part, parts[part].get("name"))
    section = EnvironmentConfig(**{"name": name, **options})
    return config.model_copy(update={"environment": section})


def measured(
    run: RunDirectory, folder: Path, config: RunConfig, *, num_episodes: int, sampled: bool
) -> dict[str, Any]:
    """What one policy does."""
    plan: dict[str, Any] = {"split": "test", "num_episodes": num_episodes, "config": config}
    if sampled:
        episodes = sampled_episodes(run, folder, num_samples=1, **plan)
    else:
        episodes = greedy_episodes(run, folder, **plan)
    rows = list(episode_rows(episodes, policy=folder.name))
    shop = WebShopEnvironment(**config.environment.options)
    told = [failure(episode, shop) for episode in episodes]
    return {
        "policy": str(folder),
        "episodes": len(rows),
        **purchases(rows, config.environment.options, split="test"),
        "turns": sum(len(row["turns"]) for row in rows) / len(rows),
        "failures": dict(Counter(row["failure"] for row in rows if not row["success"])),
        "of the shop": dict(Counter(each for each in told if each)),
    }


def by_product(
    run: RunDirectory, folder: Path, config: RunConfig, *, per_product: int
) -> dict[str, Any]:
    """What one policy does on all products alike."""
    shop = WebShopEnvironment(**config.environment.options)
    book = goal_book(shop.catalog, price_seed=shop.options.price_seed, kind=shop.options.goals)
    tasks = book.tasks("test", shop.options.split_scheme, per_product=per_product)
    solved: dict[int, list[bool]] = defaultdict(list)
    for episode in greedy_episodes_on(run, folder, tasks, config=config):
        product = goal_of_task(episode.task, shop.catalog).product
        solved[product].append(episode.success)
    rates = [100 * fmean(each) for each in solved.values()]
    return {
        "policy": str(folder),
        "products": len(rates),
        "goals": len(tasks),
        "by_product": {
            "success": round(fmean(rates), 1),
            "standard_error": round(stdev(rates) / math.sqrt(len(rates)), 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--per-product", type=int, help="goals of each product, at most")
    parser.add_argument("--part", help="the part of the run's mixture that is played")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = open_run(given.run)
    config = configuration(run, given.part)
    for folder in given.folders:
        if given.per_product is not None:
            found = by_product(run, folder, config, per_product=given.per_product)
        else:
            found = measured(
                run, folder, config, num_episodes=given.episodes, sampled=given.sampled
            )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
