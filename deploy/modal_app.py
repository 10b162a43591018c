"""ragen-apo on Modal: train, evaluate and report, with runs and models on volumes.

    modal run deploy/modal_app.py --config configs/shop.yaml --name mine --overrides "--seed 1"
    RAGEN_APO_GPU=H100:8 modal run --detach deploy/modal_app.py --config my.yaml --name large
    RAGEN_APO_GPU=H100:8 RAGEN_APO_NODES=4 modal run deploy/modal_app.py --nodes --config ...
    modal volume get ragen-apo-runs mine runs/mine

A container that is preempted is started again and goes on with the run. RAGEN_APO_SECRET names a
Modal secret with the keys of trackers, if there is one. docs/cloud.md says what was never run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parent.parent
GPU = os.environ.get("RAGEN_APO_GPU", "H100")
NUM_NODES = int(os.environ.get("RAGEN_APO_NODES", "2"))
RUNS = Path(os.environ.get("RAGEN_APO_RUNS", "/runs"))
DAY_SECONDS = 24 * 60 * 60
PORT = 29500
REFUSED = 2
"""The exit status of every error with a message, from a misspelt key to a lost network."""
REFUSAL = "the run was refused"
"""How the answer begins where no run began, so that it would be refused again."""

app = modal.App("ragen-apo")
image = modal.Image.from_dockerfile(ROOT / "deploy" / "Dockerfile", context_dir=ROOT)
volumes = {
    "/runs": modal.Volume.from_name("ragen-apo-runs", create_if_missing=True),
    "/models": modal.Volume.from_name("ragen-apo-models", create_if_missing=True),
}
secret_name = os.environ.get("RAGEN_APO_SECRET")
# Containers import this file without the variable, and Modal wants as many objects there as here.
secret = modal.Secret.from_name(secret_name) if secret_name else modal.Secret.from_dict({})
training = {
    "image": image,
    "gpu": GPU,
    "volumes": volumes,
    "secrets": [secret],
    "retries": modal.Retries(max_retries=10, initial_delay=0.0),
    "timeout": DAY_SECONDS,
    "single_use_containers": True,
}


def run_folder(name: str) -> Path:
    """Where a run is on the volume. Raises ValueError for a name that leads out of it."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"name: got {name!r}, expected letters, digits, '.', '-' and '_'")
    return RUNS / name


def training_arguments(config: str, name: str, overrides: Sequence[str]) -> list[str]:
    """Of `ragen-apo`, for a run that is new or, if its folder is there, goes on.

    `config` is the text of a configuration.
    """
    run = run_folder(name)
    if (run / "config.yaml").exists():
        return ["train", "--run-dir", str(run), "--resume", *overrides]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(config)
    keys = [each for each in overrides if each != "--trust-remote-code"]  # goes with --resume
    return ["train", "--run-dir", str(run), "--config", file.name, *keys]


def launcher(
    *, num_processes: int, rank: int = 0, hosts: Sequence[str] = ("localhost",)
) -> list[str]:
    """The command before the arguments: one process, or torchrun for several on these hosts."""
    if num_processes <= 1 and len(hosts) == 1:
        return [sys.executable, "-m", "ragen_apo.cli"]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(hosts))),
        *("--node-rank", str(rank)),
        *("--nproc-per-node", str(max(num_processes, 1))),
        *("--master-addr", hosts[0]),
        *("--master-port", str(PORT)),
        *("-m", "ragen_apo.cli"),
    ]


def run_or_refusal(command: Sequence[str], name: str) -> str:
    """The run's folder, or that it was refused before it was one: an exception is tried again.

    Raises CalledProcessError where the command ended otherwise, as torchrun always does.
    """
    run = run_folder(name)
    was_there = (run / "config.yaml").exists()
    status = subprocess.run(command, check=False).returncode
    if status == REFUSED and not was_there and not (run / "config.yaml").exists():
        return f"{REFUSAL}: the container's log says why"
    if status:
        raise subprocess.CalledProcessError(status, command)
    return str(run)


def num_gpus() -> int:
    """Of this container."""
    import torch

    return torch.cuda.device_count()


@app.function(**training)
def train(config: str, name: str, overrides: Sequence[str] = ()) -> str:
    """Trains, evaluates and reports on all GPUs of one machine; returns as `run_or_refusal`."""
    arguments = training_arguments(config, name, overrides)
    return run_or_refusal([*launcher(num_processes=num_gpus()), *arguments], name)


@app.function(**training)
@modal.clustered(size=NUM_NODES, rdma=True)
def train_nodes(config: str, name: str, overrides: Sequence[str] = ()) -> str:
    """The same on several machines, each with all GPUs of its host (such as H100:8).

    Never run: a container sees the files that others write on a volume only after their commit and
    its reload, and a run expects one disk. Needs runs on a file system that is shared at once.
    """
    cluster = modal.Cluster.from_context()
    command = launcher(
        num_processes=num_gpus(), rank=cluster.container_rank(), hosts=cluster.container_ips()
    )
    return run_or_refusal([*command, *training_arguments(config, name, overrides)], name)


@app.function(image=image, gpu=GPU, volumes=volumes, timeout=DAY_SECONDS)
def evaluate(name: str, options: str = "") -> str:
    """Evaluates a trained run again, with options of `ragen-apo evaluate`; its results.json."""
    run, command = run_folder(name), launcher(num_processes=1)
    subprocess.run([*command, "evaluate", str(run), *shlex.split(options)], check=True)
    return (run / "evaluation" / "results.json").read_text(encoding="utf-8")


@app.function(image=image, volumes=volumes, timeout=3600)
def report(name: str) -> str:
    """Writes the report of an evaluated run again and returns it (HTML)."""
    run = run_folder(name)
    subprocess.run([*launcher(num_processes=1), "report", str(run)], check=True)
    return (run / "report" / "report.html").read_text(encoding="utf-8")


@app.local_entrypoint()
def main(config: str, name: str, overrides: str = "", nodes: bool = False) -> None:
    """Trains with a configuration of this machine; prints where the run is on the volume."""
    run_folder(name)  # a wrong name is told here, before there is a container
    text, options = Path(config).read_text(encoding="utf-8"), shlex.split(overrides)
    function = train_nodes if nodes else train
    answer = function.remote(text, name, options)
    if answer.startswith(REFUSAL):
        raise SystemExit(answer)
    print(answer)
