"""Whether the threads of torch have cores of their own."""

from __future__ import annotations

import os
import time

import torch

NUMBERS_PER_THREAD = 32_768
"""torch gives a thread no fewer."""
CROWDED = 0.7
"""A speed of several threads at which one thread is better."""


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
