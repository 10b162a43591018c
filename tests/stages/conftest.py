"""Runs that die at a fault point."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import factories


@pytest.fixture(scope="module")
def run_until_killed() -> Iterator[Callable[..., int]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("kill_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def run(folder: Path, *, target: str, call: int, text: str = factories.TINY_CONFIG) -> int:
            config = folder / "tiny.yaml"
            config.write_text(text)
            job = {"run": str(folder / "run"), "config": str(config)}
            server.stdin.write(json.dumps({**job, "target": target, "call": call}) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield run
        server.stdin.close()
