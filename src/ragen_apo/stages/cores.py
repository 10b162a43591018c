"""Whether the threads of torch have cores of their own."""

from __future__ import annotations

import os
import time

import torch

from ragen_apo.plural import counted
from ragen_apo.session import Session

NUMBERS_PER_THREAD = 32_768
"""torch gives a thread no fewer."""
CROWDED = 0.7
"""A speed of several threads at which one thread is better."""


def say_if_cores_are_crowded(session: Session) -> None:
    """Says that fewer threads would be faster, and how to go on with them; run.json says that
    other processes use the cores.
    """
    num_threads, num_ranks = torch.get_num_threads(), session.ranks.worker.local_size
    if session.device.type != "cpu" or num_threads == 1:
        return
    num_cores = allowed_cores()
    if num_cores < num_threads * num_ranks:
        better = max(1, num_cores // num_ranks)
        processes = f"{num_ranks} processes of this host" if num_ranks > 1 else "this process"
        why = (
            f"{processes} may use {counted(num_cores, 'core')}, and torch takes {num_threads} "
            "threads in each: threads wait for each other. Stop"
        )
    elif speed_of_threads() < CROWDED:
        better = 1
        why = (
            "other processes use the cores, or a container's limit of processor time is below"
            f" {num_threads} cores: {num_threads} threads are slower than one now, often several"
            " times. Wait until the cores are free, or stop"
        )
        if session.ranks.is_first:
            session.run.note(crowded_cores=True)  # its seconds say little
    else:
        return
    alone = session.ranks.size == 1
    command = session.run.resume_command if alone else "torchrun with --resume"
    session.progress.say(
        f"{why} this run and go on with fewer: {command} --machine.num_threads {better}"
    )


def allowed_cores() -> int:
    """How many cores this process may use: fewer than there are under `taskset` or Slurm."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def speed_of_threads(*, seconds: float = 0.1) -> float:
    """How many times faster this process computes with its threads than with one.

    Measured for so many seconds each. Below 1 where other processes use the cores: each operation
    then waits for a thread that waits for a core.
    """
    num_threads = torch.get_num_threads()
    numbers = torch.ones(num_threads * NUMBERS_PER_THREAD)
    together = _operations_per_second(numbers, seconds)
    torch.set_num_threads(1)
    try:
        return together / _operations_per_second(numbers, seconds)
    finally:
        torch.set_num_threads(num_threads)


def _operations_per_second(numbers: torch.Tensor, seconds: float) -> float:
    torch.relu(numbers)  # threads begin
    started, count = time.perf_counter(), 0
    while (took := time.perf_counter() - started) < seconds:
        torch.relu(numbers)
        count += 1
    return count / took
