"""Kills random ranks of a run at random moments, resumes it, and compares how it ends.

    python -m benchmarks.rank_kills --kills 20 --ranks 2 --out /tmp/rank_kills

A run with every phase is trained once without a disturbance. Then runs of the same configuration
are trained, and a rank that is drawn at random gets SIGKILL after a time that is drawn from the
length of the first run; the others end at their next meeting or are ended, as torchrun would, and
the run is resumed, until it is done. Its curves, the episodes in its value store and its weights
have to be those of the first run, bit by bit. The ranks are forks of this process, so that a start
costs no imports; torchrun itself is not part of it (tests/distributed has that).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import time
import zlib
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaForCausalLM  # noqa: F401 - so that no fork has to import it

from ragen_apo import api
from ragen_apo.errors import RanksError
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages import pipeline  # noqa: F401 - as above

GRACE_SECONDS = 10.0
"""How long the ranks that are left have, before they are ended as torchrun ends them."""

CONFIG = {
    "machine": {"num_threads": 1, "device": "cpu", "rank_timeout_seconds": 60.0},
    "environment": {"name": "bandit", "max_turns": 1, "num_train_tasks": 20, "num_test_tasks": 4},
    "agent": {"max_response_tokens": 20, "max_context_tokens": 160},
    "policy": {
        "small": {
            "vocab_size": 320,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 64,
            "max_position": 160,
        }
    },
    "warm_start": {
        "checkpoint_every": 10,
        "copy": {"max_steps": 12, "batch_size": 4, "sequence_length": 32},
        "demonstrations": {
            "num_episodes_per_task": 1,
            "num_steps": 40,
            "batch_size": 7,
            "learning_rate": 2e-2,
        },
    },
    "values": {"num_samples": 3, "adaptive": False},
    "distillation": {"enabled": True, "num_epochs": 1, "batch_size": 8},
    "reference": {"refresh_every_steps": 4},
    "training": {
        "max_steps": 10,
        "tasks_per_step": 5,
        "micro_batch_size": 4,
        "num_rows": 8,
        "eval_every": 2,
        "eval_episodes": 4,
        "checkpoint_every": 2,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draws = random.Random(arguments.seed)
    undisturbed = arguments.out / "undisturbed"
    began = time.perf_counter()
    attempt(undisturbed, arguments.ranks, kill_after=None, rank=0)
    length = time.perf_counter() - began
    expected = outcome(RunDirectory(undisturbed))
    print(f"undisturbed: {length:.1f} s", flush=True)
    num_kills = num_runs = num_equal = 0
    phases: Counter[str] = Counter()
    while num_kills < arguments.kills:
        num_runs += 1
        path = arguments.out / f"run{num_runs}"
        done = False
        while not done:
            is_last = num_kills >= arguments.kills
            kill_after = None if is_last else draws.uniform(0, length)
            done = attempt(path, arguments.ranks, kill_after, draws.randrange(arguments.ranks))
            if not done:
                num_kills += 1
                phases[phase_of(RunDirectory(path))] += 1
                print(f"kill {num_kills}: {phase_of(RunDirectory(path))}", flush=True)
        equal = outcome(RunDirectory(path)) == expected
        num_equal += equal
        print(f"run {num_runs} is {'equal' if equal else 'DIFFERENT'}", flush=True)
    print(json.dumps({"kills": num_kills, "runs": num_runs, "equal": num_equal, **phases}))


def attempt(path: Path, size: int, kill_after: float | None, rank: int) -> bool:
    """One start of a run with `size` ranks, one of which may be killed; whether it was done."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    forks = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    for each in range(size):
        names = {"RANK": each, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(forks.Process(target=work, args=(names, path)))
        processes[-1].start()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False)
    if kill_after is not None:
        processes[rank].join(kill_after)
        pid = processes[rank].pid
        if processes[rank].is_alive() and pid is not None:
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + GRACE_SECONDS
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    print("  a rank that was still waiting was ended", flush=True)
                    process.terminate()
    for process in processes:
        process.join()
    del store
    statuses = [process.exitcode for process in processes]
    if kill_after is None and any(statuses):
        raise SystemExit(f"{path} ended with {statuses} without a kill")
    return not any(statuses)


def work(names: dict[str, Any], path: Path) -> None:
    """One rank."""
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    resumes = RunDirectory(path).config.is_file()
    try:
        api.train(None if resumes else CONFIG, path, resume=resumes, progress=False)
    except RanksError as error:
        raise SystemExit(f"  {error}") from error


def phase_of(run: RunDirectory) -> str:
    """How far a run has come, by its files."""
    for name, path in (
        ("policy saved", run.policy),
        ("Stage 2", run.metrics),
        ("distillation", run.distillation),
        ("Stage 1", run.values),
        ("demonstrations", run.reference(0)),
        ("warm start", run.warm_start),
        ("start", run.config),
    ):
        if path.exists():
            return name
    return "before the first file"


def outcome(run: RunDirectory) -> dict[str, Any]:
    """Everything that has to be equal, but for what the clock decides."""
    curves = {
        path.name: [
            {key: row[key] for key in row if not key.endswith("seconds")}
            for row in read_json_lines(path)
        ]
        for path in (run.warm_start, run.distillation, run.metrics)
    }
    with contextlib.closing(sqlite3.connect(run.values)) as connection:
        rows = connection.execute(
            "SELECT conditions, task_id, sample_index, zlib_json FROM trajectories "
            "ORDER BY conditions, task_id, sample_index"
        )
        samples = [(*key, json.loads(zlib.decompress(packed))) for *key, packed in rows]
    folders = [run.reference(0), run.reference(1), run.reference(2), run.distilled, run.policy]
    weights = {
        f"{folder.name}/{name}": tensor.numpy().tobytes()
        for folder in folders
        if folder.exists()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    return {"curves": curves, "samples": samples, "weights": weights}


if __name__ == "__main__":
    main()
