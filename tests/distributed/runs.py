"""A whole run in a few seconds with every phase, for several processes against one."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from ragen_apo.config import resolved_yaml
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from tests import factories

KEYS = (
    "--machine.dtype=float64",
    "--machine.rank_timeout_seconds=120",
    "--agent.max_context_tokens=160",
    "--policy.small.vocab_size=320",
    "--policy.small.max_position=160",
    "--warm_start.checkpoint_every=10",
    "--warm_start.copy.max_steps=3",
    "--warm_start.demonstrations.num_steps=40",
    "--warm_start.demonstrations.batch_size=7",
    "--values.adaptive=false",
    "--values.num_samples=3",
    "--distillation.enabled=true",
    "--distillation.num_epochs=1",
    "--distillation.batch_size=8",
    "--training.max_steps=5",
    "--training.tasks_per_step=5",
    "--training.num_rows=8",
    "--training.eval_every=2",
    "--training.checkpoint_every=2",
    "--reference.refresh_every_steps=null",
    "--monitors.every_steps=2",
)
"""Five episodes a step, so that two ranks never have equal loads.

No new reference: Stage 1's seeds come from the bits of a reference's weights, and weights that
another number of processes has trained have other last bits.
"""

CLOCK = ("seconds", "num_ranks")


def config_file(folder: Path, *overrides: str) -> Path:
    """The configuration of the run, in a file."""
    config = factories.config(
        *KEYS,
        *overrides,
        environment={"name": "bandit", "max_turns": 1, "num_train_tasks": 20, "num_test_tasks": 4},
    )
    path = folder / "run.yaml"
    path.write_text(resolved_yaml(config))
    return path


def stored_tokens(run: RunDirectory) -> dict[tuple[str, int], list[list[int]]]:
    """The sampled tokens of each turn of every episode of Stage 1."""
    with contextlib.closing(sqlite3.connect(run.values)) as connection:
        found = connection.execute("SELECT task_id, sample_index, zlib_json FROM trajectories")
        return {
            (task_id, index): [
                turn["response_token_ids"] for turn in json.loads(zlib.decompress(packed))["turns"]
            ]
            for task_id, index, packed in found
        }


def curves(run: RunDirectory) -> dict[str, list[dict[str, Any]]]:
    """The rows of all curves of a run, without what the clock decides."""
    return {
        path.name: [
            {key: row[key] for key in row if not key.endswith(CLOCK)}
            for row in read_json_lines(path)
        ]
        for path in (run.warm_start, run.distillation, run.metrics)
    }
