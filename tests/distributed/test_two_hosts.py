"""A run on two hosts is the run of one host with as many processes, also after its faults."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from tests.distributed.processes import environment, finished, torchrun
from tests.distributed.runs import assert_same_run
from tests.hosts import NEEDS_HOSTS, Host, two_hosts

pytestmark = [pytest.mark.slow, NEEDS_HOSTS]

RUN_KEYS = ("--machine.rank_timeout_seconds=20",)
PORT = 29500
"""Of the rendezvous; a host has all ports to itself."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def on_one_host(started: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run, continued to its end by two processes of one host."""
    path = Path(shutil.copytree(started, tmp_path_factory.mktemp("one") / "run"))
    result = finished(torchrun(2, "train", "--run-dir", path, "--resume", "--no-evaluate"))
    assert result.returncode == 0, result.stderr
    return RunDirectory(path)


def start(host: Host, run: RunDirectory) -> subprocess.Popen[str]:
    """`torchrun` on a host: one process of two, which goes on with a run."""
    return subprocess.Popen(
        host.command(
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host.number)),
            *("--master-addr", Host(0).address, "--master-port", str(PORT)),
            *("-m", "ragen_apo", "train", "--run-dir", str(run.path), "--resume", "--no-evaluate"),
        ),
        env={**environment(), "GLOO_SOCKET_IFNAME": host.interface},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes: list[subprocess.Popen[str]], *, seconds: float = 200.0) -> list[str]:
    """What each printed until its end."""
    return [process.communicate(timeout=seconds)[0] for process in processes]


def test_two_hosts_make_the_run_of_one_host(
    hosts: tuple[Host, Host], copy: Callable[[str], RunDirectory], on_one_host: RunDirectory
) -> None:
    run = copy("on_two")
    processes = [start(host, run) for host in hosts]
    outputs = ended(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_same_run(run, on_one_host, tolerance=0.0)


def test_a_lost_network_ends_both_hosts_with_rank_and_phase_and_the_run_goes_on(
    hosts: tuple[Host, Host], copy: Callable[[str], RunDirectory], on_one_host: RunDirectory
) -> None:
    run = copy("cut")
    processes = [start(host, run) for host in hosts]
    while len(read_json_lines(run.metrics)) < 2 and processes[0].poll() is None:
        time.sleep(0.05)
    hosts[1].cable("down")
    outputs = ended(processes)
    assert all(process.returncode for process in processes)
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2 is without the others at 'stage 2: " in output, output
    hosts[1].cable("up")
    processes = [start(host, run) for host in hosts]
    outputs = ended(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_same_run(run, on_one_host, tolerance=0.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=64m", "none", path), check=True)
    try:
        yield path
    finally:
        subprocess.run(("umount", "--lazy", path), check=True)


def test_a_full_disk_ends_all_ranks_with_one_message_and_the_run_goes_on(
    started: Path, on_one_host: RunDirectory, small_disk: Path
) -> None:
    run = RunDirectory(Path(shutil.copytree(started, small_disk / "run")))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 200 * 1024))
    command = torchrun(2, "train", "--run-dir", run.path, "--resume", "--no-evaluate")
    failed = finished(command)
    assert failed.returncode != 0
    assert failed.stderr.count("error: the disk is full") == 1, failed.stderr
    filler.unlink()
    went_on = finished(command)
    assert went_on.returncode == 0, went_on.stderr
    assert_same_run(run, on_one_host, tolerance=0.0)
