"""A run says when its threads wait for cores that other processes use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ragen_apo.config import resolved_yaml
from ragen_apo.run_directory import create_run
from ragen_apo.stages import cores
from ragen_apo.stages.cores import allowed_cores, speed_of_threads
from ragen_apo.stages.pipeline import train
from tests import factories


@pytest.mark.parametrize("shares", ["all free", "crowded"])
def test_the_speed_is_that_of_all_threads_beside_one(
    shares: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that an operation moves on: twice as fast with two, or ten times slower."""
    now = 0.0
    with factories.threads_restored():
        torch.set_num_threads(2)
        of_two = {"all free": 0.001, "crowded": 0.02}[shares]

        def relu(numbers: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += of_two if torch.get_num_threads() == 2 else 0.002
            return numbers

        monkeypatch.setattr(cores.torch, "relu", relu)
        monkeypatch.setattr(cores.time, "perf_counter", lambda: now)
        expected = {"all free": 2.0, "crowded": 0.1}[shares]
        assert speed_of_threads(seconds=1.0) == pytest.approx(expected, rel=0.01)
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("num_threads", "speed", "is_said"), [(2, 0.1, True), (2, 1.8, False), (1, 0.1, False)]
)
def test_a_run_says_how_to_go_on_with_one_thread(
    num_threads: int,
    speed: float,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragen_apo.stages.cores.speed_of_threads", lambda: speed)
    monkeypatch.setattr("ragen_apo.stages.cores.allowed_cores", lambda: 8)
    said = factories.Sayings()
    config = factories.config(f"--machine.num_threads={num_threads}", "--warm_start.enabled=false")
    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(config))
    with factories.threads_restored():
        train(config, run, progress=said, until="reference")
    advice = f"ragen-apo train --run-dir {run.path} --resume --machine.num_threads 1"
    assert any(advice in line for line in said.lines) == is_said
    assert run.read_status().get("crowded_cores", False) == is_said


def test_a_run_that_may_use_one_core_says_so_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert allowed_cores() == 1
    monkeypatch.setattr("ragen_apo.stages.cores.speed_of_threads", lambda: 1.8)
    said = factories.Sayings()
    config = factories.config("--machine.num_threads=2", "--warm_start.enabled=false")
    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(config))
    with factories.threads_restored():
        train(config, run, progress=said, until="reference")
    [line] = [line for line in said.lines if "may use 1 core" in line]
    assert line.endswith("--resume --machine.num_threads 1")
