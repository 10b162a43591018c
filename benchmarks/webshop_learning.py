"""Does a small agent learn the real WebShop? The whole run over seeds, splits and rewards.

    python -m benchmarks.webshop_learning --data FOLDER [--seeds 0 1 2] [--splits standard product]

For each split of the goals and each seed: the run of configs/webshop_small.yaml, trained under the
reward `corrected`; then, from the same reference, Stages 1 and 2 under `upstream`. Reference and
policies play the first 500 goals of the split `test` greedily, and each purchase is scored under
both rewards. Runs and evaluations that are done are reused. Further arguments change keys of the
configuration, such as `--run.num_threads 1`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import finished_run, greedy_episodes, minutes, percent
from benchmarks.tables import RESULTS, machine
from benchmarks.webshop_baselines import play
from benchmarks.webshop_rewards import purchases

from ragen_apo.config import load_config
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import goal_of_task
from ragen_apo.files import write_json_atomically
from ragen_apo.run_directory import RunDirectory
from ragen_apo.types import Trajectory, TurnFlag

CONFIG = Path("configs/webshop_small.yaml")
NUM_GOALS = 500
REWARDS = ("corrected", "upstream")
NOTES = """Greedy play, at most 15 turns, the first 500 goals of the split `test`, none of which any
setting was chosen with (that was done on the split `validation`). The model starts from random
weights and sees one episode of a scripted teacher for each training goal, several times over; the
teacher knows the goal and solves 99.8%. Published agents start from a pretrained model and see no
demonstrations. Success is a purchase with score 1. The same purchases are scored under both
rewards; "trained under" is the reward of Stages 1 and 2. Means and standard deviations are over
seeds. Published for comparison: GiGPO with Qwen2.5-7B, 75.2% and 86.2 under `upstream` on the
standard split (verl-agent's table; its validation goals are also trained on)."""


def failure(episode: Trajectory, environment: WebShopEnvironment) -> str | None:
    """What went wrong in an episode, in the shop's terms; None for a success."""
    if episode.success:
        return None
    goal = goal_of_task(episode.task, environment.catalog)
    wanted = environment.catalog.product(goal.product)
    was_shown = any(TurnFlag.TARGET_SHOWN.value in turn.flags for turn in episode.turns)
    if not episode.terminated:
        return "no purchase"
    if wanted.asin not in episode.final_observation:
        return "another product, the right one was shown" if was_shown else "never saw the product"
    _, _, selected = episode.final_observation.partition(" with ")
    missing = [f"{name} = {value}" not in selected for name, value in goal.options]
    return "right product, wrong or missing option" if any(missing) else "right purchase, below 1"


def result(run: RunDirectory, folder: Path) -> dict[str, Any]:
    """Success and score under both rewards, and the failures, kept beside the run."""
    kept = run.path / f"benchmark-{folder.parent.name}-{folder.name}.json"
    if not kept.exists():
        options = load_config(run.config).environment.options
        episodes = greedy_episodes(run, folder, split="test", num_episodes=NUM_GOALS)
        rows = [episode.to_json() for episode in episodes]
        environment = WebShopEnvironment(**options)
        failures = Counter(name for e in episodes if (name := failure(e, environment)) is not None)
        document: dict[str, Any] = {
            reward: purchases(rows, options | {"reward": reward, "payoff": "dense"}, split="test")
            for reward in REWARDS
        }
        document |= {
            "failures": dict(failures.most_common()),
            "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        }
        write_json_atomically(kept, document)
    return json.loads(kept.read_text(encoding="utf-8"))


def runs_of_seed(
    folder: Path, overrides: Sequence[str], *, split: str, seed: int
) -> dict[str, RunDirectory]:
    """The finished runs of a seed by the reward that they were trained under."""
    base = ["--seed", str(seed), "--environment.split", split, *overrides]
    corrected = finished_run(folder / f"{split}-{seed}-corrected", load_config(CONFIG, base))
    reference = ["--warm_start.enabled", "false", "--policy.path", str(corrected.reference(0))]
    config = load_config(CONFIG, [*base, *reference, "--environment.reward", "upstream"])
    upstream = finished_run(folder / f"{split}-{seed}-upstream", config)
    return {"corrected": corrected, "upstream": upstream}


def baseline(name: str, *, data: str, split: str) -> dict[str, Any]:
    """A scripted policy on the same goals, under both rewards."""
    found: dict[str, Any] = {}
    for reward in REWARDS:
        environment = WebShopEnvironment(data=data, split=split, reward=reward, max_turns=15)
        outcome = play(environment, name, environment.tasks("test")[:NUM_GOALS])
        found[reward] = {"success": 100 * outcome["success"], "score": outcome["score"]}
        found["turns"] = outcome["mean_turns"]
    return found


def cells(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Success and score under both rewards and turns: mean, and spread where there are seeds."""
    columns = [
        [result[reward][figure] for result in results]
        for reward in REWARDS[::-1]
        for figure in ("success", "score")
    ]
    shown = [
        percent(value / 100 for value in column) if len(column) > 1 else f"{column[0]:.1f}"
        for column in columns
    ]
    return [*shown, f"{sum(result['turns'] for result in results) / len(results):.1f}"]


def table(split: str, seeds: Mapping[int, Mapping[str, RunDirectory]], *, data: str) -> list[str]:
    """The section of a split: all policies, each seed, and the failures."""
    policies: dict[str, list[dict[str, Any]]] = {
        "reference (copying, demonstrations)": [
            result(runs["corrected"], runs["corrected"].reference(0)) for runs in seeds.values()
        ]
    }
    for reward in REWARDS:
        policies[f"after A\\*-PO, trained under `{reward}`"] = [
            result(runs[reward], runs[reward].policy) for runs in seeds.values()
        ]
    lines = [
        f"## Split `{split}`",
        "",
        "| policy | `upstream` success, % | score | `corrected` success, % | score | turns |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in ("random", "heuristic"):
        shown = cells([baseline(name, data=data, split=split)])
        lines.append(f"| {name} | {' | '.join(shown)} |")
    for name, results in policies.items():
        lines.append(f"| {name} | {' | '.join(cells(results))} |")
    lines += [
        "",
        "| seed | policy | `upstream` success, % | score | `corrected` success, % | score | turns "
        "| minutes of its run |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for place, (seed, runs) in enumerate(seeds.items()):
        for name, results in policies.items():
            run = runs["upstream" if name.endswith("`upstream`") else "corrected"]
            time = f"{minutes(run):.0f}" if name.startswith("after") else ""
            row = [str(seed), name, *cells([results[place]]), time]
            lines.append(f"| {' | '.join(row)} |")
    lines += ["", "Failures, of all seeds' episodes under `corrected`:", ""]
    for name, results in policies.items():
        failures = sum((Counter(r["failures"]) for r in results), Counter[str]())
        listed = ", ".join(f"{kind} {number}" for kind, number in failures.most_common())
        lines.append(f"- {name}: {sum(failures.values())} of {NUM_GOALS * len(results)}: {listed}")
    return [*lines, ""]


def main() -> None:
    """Runs what is missing and writes benchmarks/results/webshop_learning.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with upstream's files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--splits", nargs="+", default=["standard", "product"])
    parser.add_argument("--runs", type=Path, default=Path("runs/webshop_learning"))
    arguments, changes = parser.parse_known_args()
    overrides = ["--environment.data", arguments.data, *changes]
    lines = ["# Learning the real WebShop", "", NOTES, "", f"- Machine: {machine()}"]
    lines += ["- Command: `python -m benchmarks.webshop_learning --data FOLDER`", ""]
    for split in arguments.splits:
        seeds = {
            seed: runs_of_seed(arguments.runs, overrides, split=split, seed=seed)
            for seed in arguments.seeds
        }
        lines += table(split, seeds, data=arguments.data)
    page = "\n".join(lines)
    (RESULTS / "webshop_learning.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
