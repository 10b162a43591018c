"""Joins the processes that torchrun has started: gloo between CPUs, nccl between GPUs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

# Documented, but torch does not list it as exported.
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ragen_apo.config.machine import MachineConfig
from ragen_apo.distributed.ranks import ALONE, Ranks, answer_within
from ragen_apo.distributed.torchrun import Worker, this_worker
from ragen_apo.errors import RanksError

T = TypeVar("T")

_SECONDS_TO_ANSWER = 5.0
"""How long the store may take to answer a process that ends with an error, or that begins."""

_joined: dict[str, Ranks] = {}
"""What this process has joined."""


def join_ranks(machine: MachineConfig) -> Ranks:
    """This process among those of torchrun; it joins them once.

    Raises RanksError where the others do not come within `machine.rank_timeout_seconds`.
    """
    worker = this_worker()
    if worker.size == 1:
        return ALONE
    if "ranks" not in _joined:
        _joined["ranks"] = _join(worker, machine)
        atexit.register(leave_ranks)
    return replace(_joined["ranks"], sharded=machine.sharding == "full")


def leave_ranks() -> None:
    """Closes the connections to the other ranks; may be called again."""
    if _joined.pop("ranks", None) and dist.is_initialized():
        dist.destroy_process_group()


def is_first_to_fail() -> bool:
    """Whether no other rank has asked this before: one message for all of them is enough."""
    worker, joined = this_worker(), _joined.get("ranks")

    def count() -> int:
        store = joined.store if joined else None
        return (store or _store(worker, seconds=_SECONDS_TO_ANSWER)).add("failed", 1)

    # Nobody is left to ask where no answer comes.
    return answer_within(_SECONDS_TO_ANSWER, count) in (1, None)


def note_begun(run: Path) -> None:
    """Lets `has_begun` know that this torchrun has made the run."""
    if _is_kept_by_torchrun():
        _ask_torchrun(lambda store: store.set(_begun(run), ""))


def has_begun(run: Path) -> bool:
    """Whether an earlier attempt of this torchrun (`--max-restarts`) has made the run.

    A run of somebody else may be there as well, which the earlier attempt has refused to touch.
    """
    if this_worker().num_restarts == 0:
        return False
    if not _is_kept_by_torchrun():  # what the earlier attempt knew is gone with it
        return True
    return bool(_ask_torchrun(lambda store: store.check([_begun(run)])))


def _ask_torchrun(question: Callable[[Store], T]) -> T | None:
    """What its store answers in time: all attempts have the same one."""
    seconds = _SECONDS_TO_ANSWER
    return answer_within(
        seconds, lambda: question(_torchruns_store(this_worker(), seconds=seconds))
    )


def _begun(run: Path) -> str:
    return f"ragen_apo/begun/{run.absolute()}"


def _join(worker: Worker, machine: MachineConfig) -> Ranks:
    uses_cuda = machine.device != "cpu" and torch.cuda.is_available()
    if uses_cuda:
        torch.cuda.set_device(worker.local_rank)
    try:
        store = _store(worker, seconds=machine.rank_timeout_seconds)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if uses_cuda else "gloo",
            store=PrefixStore("group", store),
            rank=worker.rank,
            world_size=worker.size,
            timeout=timedelta(seconds=machine.rank_timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise RanksError(
            f"rank {worker.rank} of {worker.size} cannot join the others: {error}. Start all of "
            "them with torchrun, and see that the hosts reach each other at MASTER_ADDR, "
            "MASTER_PORT"
        ) from error
    return Ranks(worker, store, timeout_seconds=machine.rank_timeout_seconds)


def _is_kept_by_torchrun() -> bool:
    """Whether the store is one of torchrun, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(worker: Worker, *, seconds: float) -> Store:
    """Keys and values that all ranks see, of this attempt alone."""
    return PrefixStore(
        f"ragen_apo/{worker.num_restarts}", _torchruns_store(worker, seconds=seconds)
    )


def _torchruns_store(worker: Worker, *, seconds: float) -> Store:
    """Keys and values that all ranks see: torchrun keeps them, without it the first rank."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RanksError(
            f"RANK is {worker.rank}, and {missing[0]} is not set; start the processes with torchrun"
        )
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        worker.size,
        is_master=worker.rank == 0 and not _is_kept_by_torchrun(),
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
