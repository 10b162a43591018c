"""deploy/slurm.sh with stand-ins for the programs of Slurm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.distributed.processes import Torchrun
from tests.factories import TINY_CONFIG

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sh"

SCONTROL = """#!/usr/bin/env bash
[[ $1 = show && $2 = hostnames && $3 = "node[1-2]" ]] && printf 'localhost\\nnode2\\n'
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 = --* ]]; do echo "$1" >> "$SEEN.srun"; shift; done
export SLURM_NODEID
for SLURM_NODEID in $(seq 0 $((SLURM_NNODES - 1))); do
  "$@"
done
"""
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "node $PET_NODE_RANK" "$@" >> "$SEEN"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What Slurm tells the script, with its programs in front of all others."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python-seen": PYTHON}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SEEN": str(tmp_path / "seen"),
        "PYTHON": str(programs / "python-seen"),
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
    }


def submit(*arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_shell_finds_nothing_wrong() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", SCRIPT], check=True)


def test_each_node_starts_torchrun_and_meets_at_the_first(
    environment: dict[str, str], tmp_path: Path
) -> None:
    keys = ("--seed", "1", "--trust-remote-code")  # what only a run that goes on takes
    done = submit("a b.yaml", tmp_path / "run", *keys, environment=environment)
    assert done.returncode == 0, done.stderr
    command = [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8"),
        *("--master-addr", "localhost", "--master-port", "21234"),  # 20000 + 41234 % 20000
        *("-m", "ragen_apo.cli", "train", "--run-dir", str(tmp_path / "run")),
        *("--config", "a b.yaml", "--seed", "1"),
    ]
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen == ["node 0", *command, "node 1", *command]
    assert "--cpus-per-task=64" in (tmp_path / "seen.srun").read_text().splitlines()


def test_a_job_that_was_requeued_goes_on_with_its_own_keys(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    keys = ("--training.max_steps", "9", "--trust-remote-code")
    submit("a.yaml", tmp_path / "run", *keys, environment=environment)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[-5:] == [str(tmp_path / "run"), "--resume", *keys]


def test_without_a_run_folder_it_says_how_it_is_used(environment: dict[str, str]) -> None:
    done = submit("a.yaml", environment=environment)
    assert done.returncode == 2
    assert "usage: sbatch deploy/slurm.sh CONFIG RUN_DIR" in done.stderr


@pytest.mark.slow
def test_it_trains(environment: dict[str, str], tmp_path: Path) -> None:
    """What it starts is a command line of torchrun, whose words are taken here by a fork."""
    environment |= {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1"}
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY_CONFIG)
    run = tmp_path / "run"
    steps = ["--warm_start.enabled=false", "--training.max_steps=1", "--values.adaptive=false"]
    done = submit(config, run, *steps, "--no-evaluate", environment=environment)
    assert done.returncode == 0, done.stderr
    node, *words = (tmp_path / "seen").read_text().splitlines()
    assert (node, words[:2]) == ("node 0", ["-m", "torch.distributed.run"])
    module = words.index("ragen_apo.cli")
    trained = Torchrun(tmp_path / "output", words[module + 1 :], *words[2 : module - 1])
    said = trained.ended()
    assert trained.returncode == 0, said
    assert (run / "policy" / "model.safetensors").exists()
