"""Whole runs by several processes against the run of one.

All go on from the same reference: a warm start by two processes ends with other last bits, and the
seeds of Stage 1 come from the bits of the reference.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

import ragen_apo
from ragen_apo import api, cli
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.environments.bandit.two_armed import TwoArmedWorld
from ragen_apo.errors import RanksError
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.command_line import snapshot
from tests.distributed.processes import Torchrun, answers, finished, in_ranks, torchrun
from tests.distributed.runs import (
    assert_same_rows,
    assert_same_run,
    config_file,
    curves,
    go_on,
    make_reference,
)
from tests.factories import made_once

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_one(with_reference: Path, shared: Path) -> RunDirectory:
    """The run, continued to its end by one process and evaluated; read only."""

    def make(path: Path) -> None:
        shutil.copytree(with_reference, path)
        assert answers(in_ranks(1, go_on, path)) == ["trained"]
        api.evaluate(path, progress=False)

    return RunDirectory(made_once(shared / "by-one", make))


@pytest.fixture(scope="module")
def by_two(with_reference: Path, shared: Path) -> RunDirectory:
    """The same by two processes of torchrun, on the command line."""

    def make(path: Path) -> None:
        shutil.copytree(with_reference, path)
        result = finished(torchrun(2, "train", "--run-dir", path, "--resume"))
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("\ntrained policy:") == 1, "the first rank speaks for all"

    return RunDirectory(made_once(shared / "by-two", make))


def test_a_warm_start_by_two_processes_has_the_losses_of_one(started: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path)
    answers(in_ranks(2, make_reference, config, tmp_path / "run"))
    run, expected = RunDirectory(tmp_path / "run"), RunDirectory(started)
    rows, wanted = curves(run)["warm_start.jsonl"], curves(expected)["warm_start.jsonl"]
    assert_same_rows(rows, wanted, tolerance=1e-6)
    left, right = (factories.tensors(each.reference(0)) for each in (run, expected))
    for name, tensor in right.items():
        assert (left[name] - tensor).abs().max() <= 1e-4 * max(1.0, tensor.abs().max()), name


def test_two_processes_of_torchrun_make_the_run_of_one(
    by_two: RunDirectory, by_one: RunDirectory
) -> None:
    assert_same_run(by_two, by_one, tolerance=1e-5)
    results = [json.loads(run.results.read_text()) for run in (by_two, by_one)]
    assert {**results[0], "policy": ""} == {**results[1], "policy": ""}
    episodes = [read_json_lines(run.episodes) for run in (by_two, by_one)]
    assert len(episodes[0]) == len(episodes[1]) > 0
    row = read_json_lines(by_two.metrics)[-1]
    assert row["num_ranks"] == 2
    assert 0 < row["communication_seconds"] < row["rollout_seconds"] + row["training_seconds"]
    status = by_two.read_status()
    assert status["attempts"] == 1, "one for all ranks"
    for phase in ("stage 1", "stage 2"):
        spent = status["phases"][phase]
        assert 0 < spent["waiting_seconds"] + spent["communication_seconds"] < spent["seconds"]


def test_a_run_goes_on_with_another_number_of_processes_after_each_kill(
    copy: Callable[[str], RunDirectory], by_one: RunDirectory
) -> None:
    run = copy("resized")
    survivor, killed = in_ranks(2, go_on, run.path, 3)
    assert killed is None
    assert "rank 0 of 2 is without the others at 'stage 2: trajectories of step-3'" in survivor
    assert in_ranks(1, go_on, run.path, 4) == [None]
    assert answers(in_ranks(3, go_on, run.path)) == 3 * ["trained"]
    assert_same_run(run, by_one, tolerance=1e-5)


def test_torchrun_starts_a_run_again_whose_rank_was_killed(
    copy: Callable[[str], RunDirectory], by_two: RunDirectory, tmp_path: Path
) -> None:
    run = copy("killed")
    arguments = ("train", "--run-dir", run.path, "--resume", "--no-evaluate")
    torchrun = Torchrun(tmp_path / "output", arguments, "--max-restarts", 1)
    while len(read_json_lines(run.metrics)) < 3 and torchrun.is_running():
        time.sleep(0.05)
    _, second = sorted(psutil.Process(torchrun.pid).children(), key=lambda each: each.pid)
    second.kill()
    output = torchrun.ended()
    assert torchrun.returncode == 0, output
    assert_same_run(run, by_two, tolerance=0.0)
    assert run.read_status()["attempts"] == 2


def test_what_torchrun_starts_again_goes_on_without_being_told_to(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    arguments = ("warm-start", "--config", config_file(tmp_path), "--run-dir", run.path)
    torchrun = Torchrun(tmp_path / "output", arguments, "--max-restarts", 1)
    while not list_checkpoints(run.checkpoints) and torchrun.is_running():
        time.sleep(0.05)
    _, second = sorted(psutil.Process(torchrun.pid).children(), key=lambda each: each.pid)
    second.kill()
    output = torchrun.ended()
    assert torchrun.returncode == 0, output
    assert "continuing after " in output
    assert run.reference(0).exists()


def test_a_run_that_was_there_before_torchrun_is_refused_at_every_start(
    started: Path, tmp_path: Path
) -> None:
    """The second start must not take it for what the first one has made."""
    before = snapshot(started)
    arguments = ("train", "--config", config_file(tmp_path), "--run-dir", started)
    torchrun = Torchrun(tmp_path / "output", arguments, "--max-restarts", 1)
    output = torchrun.ended()
    assert torchrun.returncode != 0
    assert output.count("exists already and is not an empty directory") == 2, output
    assert snapshot(started) == before


def go_on_apart(ranks: Ranks, runs: Path) -> str:
    """Each rank sees a run directory of its own."""
    with pytest.raises(RanksError) as caught:
        api.train(None, runs / str(ranks.rank), resume=True, progress=False)
    return str(caught.value)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_rank_that_sees_another_newest_checkpoint_than_the_first_says_so(
    lacking: int, started: Path, tmp_path: Path
) -> None:
    """As a disk of the network may show for a while: its weights would be of another step."""
    for rank in range(2):
        shutil.copytree(started, tmp_path / str(rank))
    newest = list_checkpoints(RunDirectory(tmp_path / str(lacking)).checkpoints)[-1]
    shutil.rmtree(newest)
    first, second = answers(in_ranks(2, go_on_apart, tmp_path, timeout_seconds=10.0))
    assert second.startswith("rank 1 of 2 on "), second
    what = f"does not find {newest}" if lacking == 1 else f"finds {newest.name} as the newest"
    assert what in second
    assert "rank 0 of 2 is without the others" in first
    assert not RunDirectory(tmp_path / "0").values.exists()


def from_reference(folder: Path, started: Path, *keys: str) -> Path:
    """The configuration of a run that begins with Stage 1."""
    return config_file(
        folder,
        "--warm_start.enabled=false",
        f"--policy.path={started / 'references' / '0'}",
        "--distillation.enabled=false",
        "--training.eval_every=null",
        *keys,
    )


def stop_early(ranks: Ranks, config: Path, run: Path) -> None:
    """After two steps the second rank's host shows the curve of steps as it was before them."""
    api.train(config, run, progress=False, training={"max_steps": 2})
    stale = patch("ragen_apo.stages.training.read_json_lines", lambda path: [])
    with stale if ranks.rank == 1 else contextlib.nullcontext():
        api.train(None, run, resume=True, progress=False, training={"max_steps": 5})


def test_ranks_stop_early_by_the_rows_that_the_first_one_reads(
    started: Path, tmp_path: Path
) -> None:
    # It holds in three rows in succession.
    config = from_reference(tmp_path, started, "--training.early_stop.max_entropy=1e-9")
    answers(in_ranks(2, stop_early, config, tmp_path / "run"))
    assert RunDirectory(tmp_path / "run").read_status()["early_stop"]["step"] == 3


def fail_once(ranks: Ranks, config: Path, run: Path) -> str:
    """The second rank's environment raises once; what the rank writes to the standard error."""
    failures = [OSError("no answer")] if ranks.rank == 1 else []
    act, errors = TwoArmedWorld.act, io.StringIO()

    def act_or_fail(self: TwoArmedWorld, action: str) -> Any:
        if failures:
            raise failures.pop()
        return act(self, action)

    with patch.object(TwoArmedWorld, "act", act_or_fail), contextlib.redirect_stderr(errors):
        api.train(config, run, training={"max_steps": 1})
    return errors.getvalue()


def test_a_later_rank_says_that_its_environment_failed(started: Path, tmp_path: Path) -> None:
    config = from_reference(tmp_path, started, "--rollouts.environment_retries=1")
    first, second = answers(in_ranks(2, fail_once, config, tmp_path / "run"))
    assert "no answer" not in first
    assert second.startswith("rank 1 of 2 on ") and second.count("\n") == 1
    assert "no answer" in second and "The episode begins again, 1 of 1 time at most" in second


def start_unequally(
    ranks: Ranks, config: Path, run: Path, sections: Mapping[str, Any], package: str
) -> str:
    """The second rank has other sections, or its host another state of the package."""
    mine = sections if ranks.rank == 1 else {}
    file = package if ranks.rank == 1 else ragen_apo.__file__
    with patch.object(ragen_apo, "__file__", file), pytest.raises(RanksError) as caught:
        api.train(config, run, progress=False, **mine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "difference"),
    [
        ({"seed": 7}, "seed is 7, and 0 on rank 0"),
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature is 0.5, and 1.0 on rank 0"),
        ({"rollouts": {"schedule": "dynamic"}}, 'rollouts.schedule is "dynamic", and "static"'),
        ({}, "packages.ragen_apo is"),
    ],
)
def test_a_rank_that_would_run_something_else_is_named_before_anything_is_computed(
    tmp_path: Path, sections: dict[str, Any], difference: str
) -> None:
    """Its losses would be added to those of the others, and nothing would tell."""
    package = tmp_path / "package" / "__init__.py"
    package.parent.mkdir()
    package.write_text("VERSION = 2\n")
    file = ragen_apo.__file__ if sections else str(package)
    options = (config_file(tmp_path), tmp_path / "run", sections, file)
    for message in answers(in_ranks(2, start_unequally, *options)):
        assert message.startswith("rank 1 of 2 on "), message
        assert difference in message
    assert not (tmp_path / "run").exists(), "its name is free again"


def start_with_threads(ranks: Ranks, config: Path, run: Path) -> str:
    api.train(
        config, run, until="reference", progress=False, machine={"num_threads": 1 + ranks.rank}
    )
    return "trained"


def test_ranks_may_have_different_numbers_of_threads(tmp_path: Path) -> None:
    results = in_ranks(2, start_with_threads, config_file(tmp_path), tmp_path / "run")
    assert answers(results) == 2 * ["trained"]


def refuse(ranks: Ranks, config: Path, run: Path) -> tuple[object, str]:
    """Exit status and standard error of the command."""
    errors = io.StringIO()
    command = ["ragen-apo", "train", "--config", str(config), "--run-dir", str(run)]
    with patch.object(sys, "argv", command), contextlib.redirect_stderr(errors):
        try:
            cli.main()
        except SystemExit as end:
            return end.code, errors.getvalue()
    return 0, ""


def test_what_the_first_rank_refuses_is_said_once(started: Path, tmp_path: Path) -> None:
    before = snapshot(started)
    results = answers(in_ranks(2, refuse, config_file(tmp_path), started))
    assert [status for status, _ in results] == [2, 2]
    said = [text for _, text in results if text]
    assert len(said) == 1
    assert "exists already and is not an empty directory" in said[0]
    assert snapshot(started) == before


def test_a_rank_that_alone_lacks_a_file_gives_its_name(tmp_path: Path) -> None:
    config = config_file(tmp_path, "--machine.rank_timeout_seconds=10")
    _, (status, said) = in_ranks(2, refuse_unshared, config, tmp_path / "run")
    assert status == 2
    assert said.startswith("error: rank 1 of 2 on "), said
    assert "elsewhere.yaml" in said


def refuse_unshared(ranks: Ranks, config: Path, run: Path) -> tuple[object, str]:
    """The configuration is on a disk of the first host alone."""
    return refuse(ranks, config if ranks.rank == 0 else config.with_name("elsewhere.yaml"), run)


def start_unshared(ranks: Ranks, config: Path, run: Path) -> str:
    """Each host has a disk of its own under the same path, or rather here under another one."""
    with pytest.raises(RanksError) as caught:
        api.train(config, run / str(ranks.rank), progress=False)
    return str(caught.value)


def test_a_rank_that_does_not_see_the_run_directory_says_so(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    _, message = answers(in_ranks(2, start_unshared, config, tmp_path, timeout_seconds=4.0))
    assert message.startswith("rank 1 of 2 on "), message
    assert f"does not find {tmp_path / '1' / 'config.yaml'}" in message
    assert "a disk that all hosts share" in message


def start_late(ranks: Ranks, config: Path, run: Path) -> str:
    """The second host sees what the first one has written up to two seconds later."""
    seen, is_over = run / str(ranks.rank), threading.Event()

    def mirror() -> None:
        while not is_over.wait(2.0):
            for name in ("config.yaml", "initial", "references"):
                if (run / "0" / name).exists() and not (seen / name).exists():
                    subprocess.run(["cp", "-r", run / "0" / name, run / "copy"], check=True)
                    seen.mkdir(exist_ok=True)
                    (run / "copy").rename(seen / name)

    mirroring = threading.Thread(target=mirror)
    if ranks.rank == 1:
        mirroring.start()
    try:
        api.train(config, seen, until="reference", progress=False)
    finally:
        is_over.set()
    return "trained"


def test_a_rank_waits_for_folders_that_its_host_does_not_see_yet(tmp_path: Path) -> None:
    config = config_file(tmp_path, "--warm_start.demonstrations.num_steps=2")
    results = in_ranks(2, start_late, config, tmp_path)
    assert answers(results) == 2 * ["trained"]
