"""Processes that share the work of a run, in tests: forks of this one, or those of torchrun."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run as launcher

import ragen_apo
from ragen_apo.config.machine import MachineConfig
from ragen_apo.distributed.start import join_ranks, leave_ranks
from tests.forks import Fork

TIMEOUT_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def in_ranks(
    size: int, work: Callable[..., Any], *arguments: Any, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """What `work(ranks, *arguments)` returns in each of `size` forks of this process.

    A fork has imported everything already. An exception of a fork is returned in its place.
    """
    forks = multiprocessing.get_context("fork")
    port = free_port()
    started = []
    names = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names["LOCAL_WORLD_SIZE"] = size
    names["TORCHELASTIC_USE_AGENT_STORE"] = True
    for rank in range(size):
        receiver, sender = forks.Pipe(duplex=False)
        names["RANK"] = names["LOCAL_RANK"] = rank
        environment = {name: str(value) for name, value in names.items()}
        options = (sender, environment, timeout_seconds, work, arguments)
        process = forks.Process(target=_in_rank, args=options)
        process.start()
        sender.close()
        started.append((process, receiver))
    # As torchrun does, which outlives its processes; after the forks, as it has a thread.
    store = dist.TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False)
    results = [_received(receiver) for _, receiver in started]
    for process, _ in started:
        process.join()
    del store
    return results


def _in_rank(
    sender: Connection,
    environment: Mapping[str, str],
    timeout_seconds: float,
    work: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.enable(file=2)  # where pytest shows it: its own goes past what it captures
    try:
        ranks = join_ranks(MachineConfig(device="cpu", rank_timeout_seconds=timeout_seconds))
        sender.send(work(ranks, *arguments))
        leave_ranks()
    except BaseException as error:
        traceback.print_exc()
        sender.send(error)
        raise
    sender.close()


def _received(receiver: Connection) -> Any:
    try:
        return receiver.recv()
    except (EOFError, pickle.UnpicklingError):
        return None  # it was killed


def answers(results: Sequence[Any]) -> list[Any]:
    """What the forks returned; fails with the first exception that one of them raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


class Torchrun(Fork):
    """`torchrun -m ragen_apo ...`, whose ranks are forks as well."""

    def __init__(
        self,
        output: Path,
        arguments: Sequence[object],
        *options: object,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Two ranks on this host, if the `options` of torchrun say nothing else.

        `before` is called in the fork.
        """
        own = ("--nproc-per-node", 2, "--master-port", free_port(), *options)
        module = Path(ragen_apo.__file__).with_name("__main__.py")
        words = (*own, "--start-method", "fork", "--run-path", module, *arguments)

        def work() -> None:
            before()
            launcher.main([str(word) for word in words])

        super().__init__(output, work)


def torchrun(size: int, *arguments: object) -> list[str]:
    """The command line of `torchrun -m ragen_apo` with `size` processes on this host."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(size), "--master-port", str(free_port())),
        *("-m", "ragen_apo"),
        *map(str, arguments),
    ]


def environment() -> dict[str, str]:
    """That of a process which is started from here."""
    source = Path(__file__).parents[2] / "src"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}


def finished(command: Sequence[str], *, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )
