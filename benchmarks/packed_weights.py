"""What it brings that the engine packs weights once a rollout, in one run.

    python -m benchmarks.packed_weights CONFIG FOLDER

Episodes of the configuration's training tasks at temperature 1, by the model in FOLDER, in float32
and with products in bfloat16. They are played in turns with and without packing, with the same
draws, after a first time that does not count.
"""

from __future__ import annotations

import argparse
import functools
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from benchmarks.rollout_engines import compare_without, load_engine, parts_of
from benchmarks.tables import write_page

from ragen_apo.api import read_config
from ragen_apo.policy import language_model

REPEATS = 3
NOTES = """`{folder}` plays {episodes} episodes of `{config}` at temperature 1, {repeats} times each
in turns, with other tasks each time. Rates are medians over the times, with one thread."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--suffix", default="", help="of the page's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    untrained = {"warm_start": {"enabled": False}, "distillation": {"enabled": False}}
    config = read_config(given.config, policy={"path": str(given.folder)}, **untrained)
    unpacked = functools.partial(patch.object, language_model, "packed_weights", nullcontext)
    rows = []
    for name, precision in {"float32": "none", "bfloat16": "bfloat16"}.items():
        _, proxy, tasks = load_engine(config, precision=precision)
        parts = parts_of(tasks, size=given.episodes, repeats=REPEATS)
        rows.append([name, *compare_without(unpacked, proxy, parts)])
    write_page(
        "packed_weights",
        title="Packed weights in the engine",
        notes=NOTES.format(
            folder=given.folder, config=given.config, episodes=given.episodes, repeats=REPEATS
        ),
        header=["products in", "episodes/s, not packed", "episodes/s, packed", "ratio"],
        rows=rows,
        suffix=given.suffix,
    )


if __name__ == "__main__":
    main()
