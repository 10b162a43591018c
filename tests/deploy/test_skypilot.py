"""deploy/skypilot.yaml: known keys, and a command that runs with what SkyPilot tells a node.

The keys are compared with a list written after SkyPilot 0.14's schema (`sky/utils/schemas.py`); the
package itself is too large for a test, and the file has never been given to it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).resolve().parents[2] / "deploy" / "skypilot.yaml"
KEYS = {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run", "envs"}
RESOURCES = {"accelerators", "disk_size", "infra", "cpus", "memory", "use_spot", "image_id"}
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@"
"""


@pytest.fixture
def task() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def run_on_a_node(task: dict[str, Any], home: Path) -> list[str]:
    """The arguments that the second of two nodes gives to Python."""
    python = home / "ragen-apo-env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    told = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    environment = {**os.environ, **task["envs"], **told, "HOME": str(home)}
    script = ["bash", "-c", task["run"]]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_it_has_known_keys_only(task: dict[str, Any]) -> None:
    assert set(task) <= KEYS
    assert set(task["resources"]) <= RESOURCES
    assert all(isinstance(value, str) for value in task["envs"].values())


def test_each_node_starts_torchrun_and_meets_at_the_first(
    task: dict[str, Any], tmp_path: Path
) -> None:
    world = "{name: shop, max_turns: 5}"
    task["envs"]["OVERRIDES"] = f"--trust-remote-code --seed 1 --environment '{world}' --key '*'"
    assert run_on_a_node(task, tmp_path) == [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1"),
        *("--nproc-per-node", "8", "--master-addr", "10.0.0.1", "--master-port", "29500"),
        *("-m", "ragen_apo.cli", "train", "--run-dir", f"{tmp_path}/runs/mine"),
        *("--config", "configs/shop.yaml", "--seed", "1", "--environment", world, "--key", "*"),
    ]


def test_a_run_that_is_there_goes_on(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    task["envs"]["OVERRIDES"] = "--trust-remote-code"
    run = f"{tmp_path}/runs/mine"
    assert run_on_a_node(task, tmp_path)[-3:] == [run, "--resume", "--trust-remote-code"]


@pytest.mark.parametrize("part", ["setup", "run"])
def test_its_scripts_are_ones_that_bash_reads(task: dict[str, Any], part: str) -> None:
    subprocess.run(["bash", "-n", "-c", task[part]], check=True)
