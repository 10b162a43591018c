"""A whole run in a few seconds with every phase, for several processes against one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ragen_apo import api
from ragen_apo.config import load_run_config, resolved_yaml
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.errors import RanksError
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.trainer import Trainer
from tests import factories

TWO_LAYERS = (
    "--policy.small.num_layers=2",
    "--policy.small.vocab_size=400",
    "--agent.max_response_tokens=20",
)
"""Of a shop's agent whose steps are compared."""

KEYS = (
    "--machine.dtype=float64",
    "--machine.rank_timeout_seconds=120",
    "--agent.max_context_tokens=160",
    "--policy.small.num_layers=2",
    "--policy.small.vocab_size=320",
    "--policy.small.max_position=160",
    "--policy.freeze_embeddings=true",
    "--warm_start.checkpoint_every=10",
    "--warm_start.copy.max_steps=3",
    "--warm_start.demonstrations.num_steps=70",
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

The embeddings of words that hardly matter have gradients of rounding errors alone, of which AdamW
makes whole steps; so they are frozen here, and compared after few steps in `test_steps.py`.
No new reference: Stage 1's seeds come from the bits of a reference's weights, and weights that
another number of processes has trained have other last bits.
"""

MODELS = ("distilled", "policy")

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


def with_keys(run: RunDirectory, *keys: str) -> RunDirectory:
    """The run, whose configuration somebody has edited."""
    config = factories.changed(load_run_config(run.config), *keys)
    run.config.write_text(resolved_yaml(config))
    return run


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


def make_reference(ranks: Ranks, config: Path, run: Path) -> None:
    api.train(config, run, until="reference", progress=False)


def go_on(
    ranks: Ranks, run: Path, killed_at_step: int | None = None, *, trust_remote_code: bool = False
) -> str:
    """Continues a run; the last rank is killed before a step, and the others say so."""
    make_step = Trainer.step

    def step(trainer: Trainer, number: int) -> Any:
        if number == killed_at_step and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_step(trainer, number)

    with patch.object(Trainer, "step", step):
        try:
            api.train(None, run, resume=True, progress=False, trust_remote_code=trust_remote_code)
        except RanksError as error:
            return str(error)
    return "trained"


def assert_same_rows(
    actual: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], *, tolerance: float
) -> None:
    assert len(actual) == len(expected) > 0
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            wanted = value if isinstance(value, str) else pytest.approx(value, tolerance, tolerance)
            assert mine[key] == wanted, (key, theirs["step"])


def assert_same_run(actual: RunDirectory, expected: RunDirectory, *, tolerance: float) -> None:
    assert stored_tokens(actual) == stored_tokens(expected)
    rows, wanted = curves(actual), curves(expected)
    assert rows.keys() == wanted.keys()
    for name, curve in wanted.items():
        assert_same_rows(rows[name], curve, tolerance=tolerance)
    for model in MODELS:
        assert_same_weights(actual.path / model, expected.path / model, tolerance=tolerance)


def assert_same_weights(actual: Path, expected: Path, *, tolerance: float) -> None:
    """Relative to the largest number of each tensor, or to 1."""
    left, right = factories.tensors(actual), factories.tensors(expected)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert (left[name] - tensor).abs().max() <= tolerance * max(1.0, tensor.abs().max()), name
