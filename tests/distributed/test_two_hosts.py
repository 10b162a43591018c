"""A run on two hosts is the run of one host with as many processes, also after its faults."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages import pipeline
from tests.distributed.processes import Torchrun
from tests.distributed.runs import assert_same_run
from tests.hosts import NEEDS_HOSTS, Host, two_hosts

pytestmark = [pytest.mark.slow, NEEDS_HOSTS]

RUN_KEYS = ("--machine.rank_timeout_seconds=8",)
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
    assert_trained([start(RunDirectory(path))])
    return RunDirectory(path)


def start(run: RunDirectory, host: Host | None = None, *, output: Path | None = None) -> Torchrun:
    """`torchrun`, which goes on with a run: two processes here, or one of two on a host."""
    arguments = ("train", "--run-dir", run.path, "--resume", "--no-evaluate")
    if host is None:
        return Torchrun(output or run.path.with_suffix(".out"), arguments)
    options = (
        *("--nnodes", 2, "--nproc-per-node", 1, "--node-rank", host.number),
        *("--master-addr", Host(0).address, "--master-port", PORT),
    )
    output = run.path.with_suffix(f".{host.number}.out")
    return Torchrun(output, arguments, *options, before=host.enter)


def assert_trained(processes: Sequence[Torchrun]) -> None:
    outputs = [each.ended() for each in processes]
    assert [each.returncode for each in processes] == [0] * len(processes), outputs


def test_two_hosts_make_the_run_of_one_host(
    hosts: tuple[Host, Host], copy: Callable[[str], RunDirectory], on_one_host: RunDirectory
) -> None:
    run = copy("on_two")
    assert_trained([start(run, host) for host in hosts])
    assert_same_run(run, on_one_host, tolerance=0.0)


def test_a_lost_network_ends_both_hosts_with_rank_and_phase_and_the_run_goes_on(
    hosts: tuple[Host, Host], copy: Callable[[str], RunDirectory], on_one_host: RunDirectory
) -> None:
    run = copy("cut")
    processes = [start(run, host) for host in hosts]
    while len(read_json_lines(run.metrics)) < 2 and processes[0].is_running():
        time.sleep(0.05)
    hosts[1].cable("down")
    outputs = [each.ended() for each in processes]
    assert all(process.returncode for process in processes)
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2 is without the others at 'stage 2: " in output, output
    hosts[1].cable("up")
    assert_trained([start(run, host) for host in hosts])
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
    started: Path,
    on_one_host: RunDirectory,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As of a disk that others fill when the run has begun; the processes are forks of this one.
    monkeypatch.setattr(pipeline, "free_disk", lambda _: 2**40)
    run = RunDirectory(Path(shutil.copytree(started, small_disk / "run")))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 200 * 1024))
    failed = start(run, output=small_disk.with_suffix(".out"))  # where there is room
    output = failed.ended()
    assert failed.returncode != 0
    assert output.count("error: the disk is full") == 1, output
    filler.unlink()
    assert_trained([start(run)])
    assert_same_run(run, on_one_host, tolerance=0.0)
