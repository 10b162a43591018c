"""Runs that die at a fault point."""

import importlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.cli import app
from tests import factories


@pytest.fixture(scope="session")
def run_until_killed() -> Callable[..., int]:
    """Trains and evaluates up to a fault point and dies there with SIGKILL.

    By a fork of this process, which has imported everything already. A run that is there goes on.
    """

    def run(folder: Path, *, target: str, call: int, text: str = factories.TINY_CONFIG) -> int:
        """The wait status of the fork; SIGKILL if it got to the n-th call of the target."""
        config = folder / "tiny.yaml"
        config.write_text(text)
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        status = 1
        try:
            _kill_at(target, call)
            _train_and_evaluate(folder / "run", config)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)

    return run


def _kill_at(target: str, call: int) -> None:
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


def _train_and_evaluate(run: Path, config: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    trust = "--trust-remote-code"  # the environment may be a file of the tests
    start = ["--resume", trust] if run.exists() else ["--config", str(config)]
    app(["train", "--run-dir", str(run), "--no-evaluate", *start], result_action="return_value")
    app(["evaluate", str(run), trust], result_action="return_value")
