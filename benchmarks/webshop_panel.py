"""The panel on which WebShop agents are compared: which goals, how they are played, who did what.

    python -m benchmarks.webshop_panel --data FOLDER [RUN ...]

Writes benchmarks/results/webshop_panel.md: the goals of both splits, with checksums, so that others
can see that they play the same ones, and a row for each policy of the evaluated runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import write_page

from ragen_apo.environments.base import make_environment
from ragen_apo.report.load import read_config
from ragen_apo.report.style import interval, percent
from ragen_apo.run_directory import open_run
from ragen_apo.types import Task

NUM_GOALS = 500
SCHEMES = ("standard", "product")


def checksum(tasks: Sequence[Task]) -> str:
    """The same for the same goals in the same order, whoever prepared the data."""
    goals = [[task.instruction, task.payload] for task in tasks]
    return hashlib.sha256(json.dumps(goals, sort_keys=True).encode()).hexdigest()[:16]


def panel(data: Path) -> list[str]:
    """The goals of each split, a Markdown line each."""
    lines = ["| split | goals | the first three ids | checksum of instructions and goals |",
             "|---|---|---|---|"]  # fmt: skip
    for scheme in SCHEMES:
        environment = make_environment("webshop", {"data": str(data), "split_scheme": scheme})
        tasks = environment.tasks("test")[:NUM_GOALS]
        ids = ", ".join(task.task_id for task in tasks[:3])
        lines.append(
            f"| `{scheme}` | the first {len(tasks)} of `test` | {ids} | {checksum(tasks)} |"
        )
    return lines


def rows_of(path: Path) -> list[list[object]]:
    """A row for each policy that the evaluation of a run has played."""
    run = open_run(path)
    results: Mapping[str, Any] = json.loads(run.results.read_text(encoding="utf-8"))
    _, config = read_config(run.config)
    environment = config["environment"]
    played = [("trained", results), *results["baselines"].items()]
    return [
        [
            path.name,
            policy,
            config["algorithm"]["name"],
            config["seed"],
            environment.get("split_scheme", "standard"),
            environment.get("reward", "corrected"),
            row["episodes"],
            percent(row["success_rate"]),
            interval(row["success_ci95"]),
            f"{100 * row['avg_reward']:.1f}",
            f"{row['avg_steps']:.1f}",
        ]
        for policy, row in played
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args(arguments)
    notes = [
        "1,000 real products, upstream's own goals for them. Greedy play (temperature 0), at most"
        " 15 turns, one episode a goal. `standard` is upstream's split (goals 0 to 499 after its"
        " shuffle with seed 233); in `product` no product of a test goal is one of a training goal."
        " The ids are ours (a hash of the goal); a goal itself is upstream's.",
        "",
        *panel(given.data),
        "",
        "To add a row: train with `environment.split_scheme` and `environment.reward`, then"
        " `ragen-apo evaluate RUN --split test --episodes 500`, then this benchmark with all runs.",
    ]
    header = ["run", "policy", "algorithm", "seed", "split", "reward", "episodes", "success",
              "95% interval", "mean return, %", "turns"]  # fmt: skip
    write_page(
        "webshop_panel",
        title="The WebShop panel",
        notes="\n".join(notes),
        header=header,
        rows=[row for path in given.runs for row in rows_of(path)],
    )


if __name__ == "__main__":
    main()
