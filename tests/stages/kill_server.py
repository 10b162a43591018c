"""Runs the tiny configuration up to a fault point and dies there with SIGKILL, once for each line.

A run that was there already is resumed. Reads JSON lines {"run", "config", "target", "call"} and
answers each with the wait status of the process that ran it. torch is imported once; every run is a
fork of this process, which itself never computes (a forked process must not inherit threads).
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ragen_apo.cli import app


def kill_at(target: str, call: int) -> None:
    """Replaces `module:Class.function` by one that kills the process at its n-th call."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    num_calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def run_to_death(job: dict[str, Any]) -> int:
    """The wait status of a process that trains and evaluates; SIGKILL if the fault was reached."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    kill_at(job["target"], job["call"])
    train = ["train", "--run-dir", job["run"], "--no-evaluate"]
    train += ["--resume"] if Path(job["run"]).exists() else ["--config", job["config"]]
    app(train, result_action="return_value")
    app(["evaluate", job["run"]], result_action="return_value")
    os._exit(0)


for line in sys.stdin:
    status = run_to_death(json.loads(line))
    print(status, flush=True)
