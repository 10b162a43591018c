"""Success and score of WebShop's scripted policies: what a trained agent is compared with.

    python -m benchmarks.webshop_baselines [--data FOLDER] [--tasks 500] [--split standard]
    python -m benchmarks.webshop_baselines --data FOLDER --split product --per-product 4

Plays the first tasks of the split `test` with each policy, at most 15 turns, under both rewards and
the default noun rule. With `--per-product` it plays so many goals of every product, at most, and
`by_product` is the success of a product, averaged over products. `random`, `heuristic`, `careful`
and `hasty` know the instruction only; the others know the goal. Success: reward 1; score: 100 times
the mean reward. Prints one JSON object.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import goal_book, goal_of_task
from ragen_apo.types import Task

MAX_TURNS = 15


def play(
    environment: WebShopEnvironment, policy_name: str, tasks: Sequence[Task]
) -> dict[str, Any]:
    """The results of one policy."""
    rewards: list[float] = []
    solved: dict[int, list[bool]] = defaultdict(list)
    num_turns = 0
    for task in tasks:
        policy = environment.scripted_policies()[policy_name]()
        policy.begin(task, seed=0)
        observation, _ = environment.reset(task, seed=0)
        reward, terminated, truncated = 0.0, False, False
        while not (terminated or truncated):
            action = policy.act(observation).action
            observation, reward, terminated, truncated, _ = environment.step(action)
            num_turns += 1
        rewards.append(reward)
        product = goal_of_task(task, environment.catalog).product
        solved[product].append(reward >= 1)
    return {
        "success": round(sum(reward >= 1 for reward in rewards) / len(rewards), 3),
        "by_product": round(fmean(map(fmean, solved.values())), 3),
        "products": len(solved),
        "score": round(100 * sum(rewards) / len(rewards), 1),
        "mean_turns": round(num_turns / len(rewards), 2),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="generated", help="folder with upstream's files")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--split", choices=["standard", "product"], default="standard")
    parser.add_argument("--per-product", type=int, help="goals of each product, at most")
    parser.add_argument("--price-seed", type=int, default=0)
    parser.add_argument("--store", type=Path, help="prepared catalogues (temporary)")
    arguments = parser.parse_args()
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for reward in ("upstream", "corrected"):
            environment = WebShopEnvironment(
                data=arguments.data,
                store=arguments.store or Path(temporary),
                price_seed=arguments.price_seed,
                split_scheme=arguments.split,
                reward=reward,
                max_turns=MAX_TURNS,
            )
            tasks = environment.tasks("test")[: arguments.tasks]
            if arguments.per_product is not None:
                book = goal_book(
                    environment.catalog,
                    price_seed=arguments.price_seed,
                    kind=environment.options.goals,
                )
                scheme = environment.options.split_scheme
                tasks = book.tasks("test", scheme, per_product=arguments.per_product)
            for name in environment.scripted_policies():
                table[f"{name}, {reward}"] = play(environment, name, tasks)
    print(json.dumps({"data": arguments.data, "tasks": len(tasks), "policies": table}, indent=2))


if __name__ == "__main__":
    main()
