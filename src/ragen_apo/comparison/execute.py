"""Plays the runs of a comparison, each in a process of its own; runs that are done are reused.

OUT/seed-0/reference/   the warm start, made once a seed
OUT/seed-0/<run>/       a run directory like any other
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ragen_apo.comparison.plan import Comparison, folder_name
from ragen_apo.config import RunConfig, load_config, resolved_yaml
from ragen_apo.errors import RagenApoError, RunDirectoryError
from ragen_apo.files import write_text_atomically
from ragen_apo.run_directory import RunDirectory


def play_comparison(
    comparison: Comparison, out: Path, *, say: Callable[[str], None]
) -> dict[tuple[str, int], RunDirectory]:
    """Brings every run to its end, one after the other, and returns them by (name, seed).

    Raises RunDirectoryError where a run in `out` was started with another configuration, and
    RagenApoError where one fails.
    """
    runs: dict[tuple[str, int], RunDirectory] = {}
    for seed in comparison.settings.seeds:
        folder = out / f"seed-{seed}"
        first = RunDirectory(folder / "reference")
        finish_run(first, comparison.reference(seed), say=say, evaluate=False)
        for name in comparison.settings.runs:
            # Relative paths would name another folder from another working directory.
            config = comparison.run(name, seed, reference=first.reference(0).resolve())
            run = RunDirectory(folder / folder_name(name))
            finish_run(run, config, say=say, evaluate=True)
            runs[name, seed] = run
    return runs


def finish_run(
    run: RunDirectory, config: RunConfig, *, say: Callable[[str], None], evaluate: bool
) -> None:
    """Starts, continues or reuses a run."""
    if run.config.exists() and load_config(run.config) != config:
        raise RunDirectoryError(
            f"{run.path} was started with another configuration than this comparison has now; "
            "remove it or give another --out"
        )
    if not run.policy.exists():
        say(f"{run.path}: training")
        started = run.config.exists()
        text = run.path.with_name(f"{run.path.name}.yaml")
        write_text_atomically(text, resolved_yaml(config))
        how = ["--resume"] if started else ["--config", str(text)]
        _call("train", "--run-dir", str(run.path), *how, "--no-evaluate")
    if evaluate and not run.results.exists():
        _call("evaluate", str(run.path))


def _call(*arguments: str) -> None:
    # A process of its own, so that the peak memory is that of one run.
    status = subprocess.call([sys.executable, "-m", "ragen_apo.cli", *arguments])
    if status:
        raise RagenApoError(
            f"`ragen-apo {' '.join(arguments)}` ended with status {status}; see its message above. "
            "Give the same compare command again to go on."
        )
