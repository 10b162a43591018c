"""A run whose episodes come from a real vLLM that is killed in the middle of it."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.config import resolved_yaml
from ragen_apo.files import read_json_lines
from ragen_apo.policy.inference_server.vllm import VllmServer, Wanted
from ragen_apo.policy.inference_server.wire import Request
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.command_line import Command, snapshot
from tests.vllm.servers import ROUNDING, Vllm, needed

pytestmark = [pytest.mark.slow, needed]


def write_config(path: Path, server: Vllm, model: Path) -> Path:
    """Two steps of all weights, from the model as its reference, with Stage 1 and evaluations."""
    config = factories.config(
        f"--policy.path={model}",
        "--warm_start.enabled=false",
        "--rollouts.engine=vllm",
        f"--rollouts.base_url={server.url}",
        "--rollouts.retries=0",
        "--reference.refresh_every_steps=null",
        "--values.adaptive=false",
        "--values.baseline=zero",  # returns may be equal here, and so would be they and V*
        "--optimizer.learning_rate=3e-3",
        "--training.max_steps=2",
        "--training.max_tasks=4",
        "--training.tasks_per_step=4",
        "--training.checkpoint_every=1",
        "--training.eval_every=1",
        "--training.eval_episodes=2",
        "--evaluation.num_episodes=3",
        "--monitors.every_steps=null",
    )
    path.write_text(resolved_yaml(config))
    return path


def kill_in_step_two(server: Vllm, run: RunDirectory, patch: pytest.MonkeyPatch) -> None:
    """At the third episode, when two others are under way; two requests before compare weights."""
    ask, asked = VllmServer.completion, []

    def completion(self: VllmServer, wanted: Wanted) -> Request:
        if list_checkpoints(run.checkpoints):
            asked.append(wanted)
            if len(asked) == 2 + 3:
                server.kill()
        return ask(self, wanted)

    patch.setattr(VllmServer, "completion", completion)


def test_a_run_whose_server_is_killed_ends_as_one_whose_server_was_not(
    small: Vllm, small_model: Path, command: Command, tmp_path: Path
) -> None:
    """Equal: all files by name, reference, what is played, scripted baselines, each row's keys.

    What the first step and Stage 1 have left is not touched again. The episodes differ: they are
    drawn by the server, whose draws are its own.
    """
    config = write_config(tmp_path / "config.yaml", small, small_model)
    whole, run = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "run")
    assert command("train", "--config", config, "--run-dir", whole.path).status == 0

    with pytest.MonkeyPatch.context() as patch:
        kill_in_step_two(small, run, patch)
        killed = command("train", "--config", config, "--run-dir", run.path)
    small.start()
    small.wait()
    assert killed.status != 0
    # A response may have been under way as well.
    how = r"(the connection failed|\d+ bytes of the answer lack)"
    assert re.search(rf"{small.url}: /\S+: {how}.* go on with --resume", killed.message)
    assert [row["step"] for row in read_json_lines(run.metrics)] == [1]
    before = snapshot(run.path)

    resumed = command("train", "--run-dir", run.path, "--resume")
    assert resumed.status == 0, resumed.err
    assert run.read_status()["attempts"] == 2

    assert snapshot(run.path).keys() == snapshot(whole.path).keys()
    factories.assert_same_tensors(run.reference(0), whole.reference(0))
    rows = [read_json_lines(each.metrics) for each in (run, whole)]
    assert [row["step"] for row in rows[0]] == [1, 2]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    for row in rows[0]:
        assert row["logprob_gap_max"] < ROUNDING, "the server had the weights of this step"
        assert row["gradient_norm"] > 0
    assert stored_samples(run) == stored_samples(whole)
    assert played(run.rollouts) == played(whole.rollouts)
    assert played(run.episodes) == played(whole.episodes)
    ended = [json.loads(each.results.read_text()) for each in (run, whole)]
    for policy in ("heuristic", "random"):
        assert ended[0]["baselines"][policy] == ended[1]["baselines"][policy]

    after = snapshot(run.path)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert after[name].startswith(before[name])
    kept = [name for name in before if name.startswith(("config", "initial", "references", "val"))]
    first = list_checkpoints(run.checkpoints)[0].relative_to(run.path)
    kept += [name for name in before if name.startswith(str(first))]
    assert len(kept) > 10
    assert [name for name in kept if after[name] != before[name]] == []


def played(file: Path) -> list[str]:
    """Which tasks were played in which steps, and not how it went."""
    rows = read_json_lines(file)
    return sorted(f"step {row.get('step')}: {row['task']['task_id']}" for row in rows)


def stored_samples(run: RunDirectory) -> list[Any]:
    """Conditions, task and number of every sample of Stage 1."""
    with sqlite3.connect(run.values) as connection:
        query = "SELECT conditions, task_id, sample_index FROM samples ORDER BY 1, 2, 3"
        found = connection.execute(query).fetchall()
    connection.close()
    assert found
    return found
