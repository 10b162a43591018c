"""What it brings that the engine reads the common beginning of prompts once, in one run.

    python -m benchmarks.shared_prefixes CONFIG FOLDER [--mixed-precision bfloat16]

64 episodes of the configuration's training tasks at temperature 1, by the model in FOLDER: 64 tasks
once, and 8 tasks in groups of 8. Either is played in turns with and without sharing, with the same
draws, after a first time that does not count.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from unittest.mock import patch

import torch
from benchmarks.rollout_engines import compare_without, load_engine, parts_of
from benchmarks.tables import write_page

from ragen_apo.api import read_config
from ragen_apo.policy import rows as engine_rows

EPISODES = 64
REPEATS = 3
NEVER = 10**9
NOTES = """{model} plays {episodes} episodes of {config} at temperature 1, {repeats} times each in
turns, with other tasks each time. Rates are medians over the times, with one thread and products in
{precision}."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mixed-precision", choices=["none", "bfloat16"], default="none")
    parser.add_argument("--suffix", default="", help="of the page's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    untrained = {"warm_start": {"enabled": False}, "distillation": {"enabled": False}}
    config = read_config(given.config, policy={"path": str(given.folder)}, **untrained)
    _, proxy, tasks = load_engine(config, precision=given.mixed_precision)
    unshared = functools.partial(patch.object, engine_rows, "SHARED_TOKENS", NEVER)
    rows = []
    for group_size in (1, 8):
        parts = [
            [task for task in part for _ in range(group_size)]
            for part in parts_of(tasks, size=EPISODES // group_size, repeats=REPEATS)
        ]
        rows.append([group_size, *compare_without(unshared, proxy, parts)])
    write_page(
        "shared_prefixes",
        title="Prompts with a common beginning",
        notes=NOTES.format(
            model=f"`{given.folder}`",
            config=f"`{given.config}`",
            episodes=EPISODES,
            repeats=REPEATS,
            precision=given.mixed_precision.replace("none", "float32"),
        ),
        header=["episodes of a task", "episodes/s, all read", "episodes/s, shared", "ratio"],
        rows=rows,
        suffix=given.suffix,
    )


if __name__ == "__main__":
    main()
