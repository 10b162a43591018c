"""One run whole, and the same run killed three times: do they end with the same bits?

    python -m benchmarks.kills FOLDER [--config configs/shop.yaml] [--device cuda]

Both are trained side by side with `machine.deterministic`. SIGKILL comes in the warm start, in
Stage 1 and in Stage 2; each time the run goes on with `--resume`. Prints how far the run was when
it was killed, and what of the two differs: curves, stored episodes, and all weights.
`python -m benchmarks.rank_kills` kills one of several processes.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.rank_kills import outcome, phase_of

from ragen_apo.run_directory import RunDirectory

SECONDS_IN_A_PHASE = 0.7
"""How long a phase goes on before the run is killed in it."""
ROWS = 3
"""Rows of a curve after which it has begun."""


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def kill(run: RunDirectory, start: Callable[..., subprocess.Popen[bytes]]) -> list[str]:
    """Trains the run to its end; returns in which phases it was killed."""
    found: list[str] = []
    process = start(run)
    for has_begun in (
        lambda: num_lines(run.warm_start) >= ROWS,
        run.values.exists,
        lambda: num_lines(run.metrics) >= ROWS,
    ):
        while not has_begun() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(SECONDS_IN_A_PHASE)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            sys.exit(f"{run.path} ended with {process.returncode} before it was killed")
        found.append(phase_of(run))
        process = start(run, "--resume")
    if process.wait():
        sys.exit(f"{run.path} ended with {process.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, default=Path("configs/shop.yaml"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    machine = {"device": given.device, "deterministic": "true", "num_threads": "1"}
    options = [part for key, value in machine.items() for part in (f"--machine.{key}", value)]

    def start(run: RunDirectory, *more: str) -> subprocess.Popen[bytes]:
        command = [*(sys.executable, "-m", "ragen_apo", "train"), *("--run-dir", str(run.path))]
        command += more or [*("--config", str(given.config)), *options]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    given.folder.mkdir(parents=True)
    whole, killed = (RunDirectory(given.folder / name) for name in ("whole", "killed"))
    with start(whole) as undisturbed:
        phases = kill(killed, start)
    if undisturbed.returncode:
        sys.exit(f"{whole.path} ended with {undisturbed.returncode}")
    left, right = outcome(whole), outcome(killed)
    print(json.dumps({"killed in": phases, "differs": [n for n in left if left[n] != right[n]]}))


if __name__ == "__main__":
    main()
