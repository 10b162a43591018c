"""The recorded episodes of the original program, replayed by the command that anyone can run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_recorded_step_is_identical(real_data: Path, store: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.webshop_fidelity", "--data", str(real_data)]
    command += ["--episodes", str(real_data / "traces.json.gz"), "--store", str(store)]
    path = os.pathsep.join(part for part in sys.path if part)
    finished = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(finished.stdout)
    assert result["first_differences"] == []
    assert (result["episodes"], result["steps"], result["identical_steps"]) == (60, 589, 589)
    assert (result["goals"], result["identical_prices"]) == (6910, 1000)
    assert result["identical_reward_parts"] == result["finished_episodes"] == 57
