"""A real model behind the API of a real vLLM, evaluated by the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import Command
from tests.vllm.servers import NAME, Vllm, needed

pytestmark = [pytest.mark.slow, needed]

NUM_EPISODES, NUM_TURNS, NUM_TOKENS = 4, 2, 24
NUM_KEPT = 3
"""Answers before the kill, at least."""


def test_an_evaluation_that_was_killed_asks_only_what_was_not_answered(
    smollm2: Vllm, command: Command, tmp_path: Path
) -> None:
    """By the server's own count: each answer once, and perhaps the one that was under way."""
    out = tmp_path / "evaluation"
    options = f"--environment shop --episodes {NUM_EPISODES} --max-turns {NUM_TURNS}"
    options += f" --max-tokens {NUM_TOKENS} --concurrency 1 --base-url {smollm2.url}/v1"
    evaluate = ["evaluate", "--api-model", NAME, "--out", str(out), *options.split()]
    answers, results_file = out / "answers.jsonl", out / "evaluation" / "results.json"
    before = smollm2.num_answers()
    process = subprocess.Popen([sys.executable, "-m", "ragen_apo", *evaluate])
    try:
        while not answers.exists() or answers.read_bytes().count(b"\n") < NUM_KEPT:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert not results_file.exists()
    kept = answers.read_bytes().rpartition(b"\n")[0]

    ended = command(*evaluate)
    assert ended.status == 0, ended.err
    results = json.loads(results_file.read_text())
    usage = results["api"]
    assert NUM_KEPT < usage["answers"] <= NUM_EPISODES * NUM_TURNS
    assert smollm2.num_answers() - before - usage["answers"] in (0, 1)
    assert answers.read_bytes().startswith(kept)
    assert answers.read_bytes().count(b"\n") == usage["answers"]
    assert usage["answers_without_usage"] == 0
    assert 0 < usage["completion_tokens"] <= NUM_TOKENS * usage["answers"]
    assert results["episodes"] == NUM_EPISODES
    title = f"{NUM_EPISODES} episodes of split 'test'"
    table = ended.out.partition(title)[2]
    assert all(policy in table for policy in (f"{NAME} (API)", "heuristic", "random"))

    at_end = smollm2.num_answers()
    assert command(*evaluate).out.partition(title)[2] == table
    assert smollm2.num_answers() == at_end, "a finished evaluation asks nothing"
