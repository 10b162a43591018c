"""Runs whose coming steps a server plays ahead: the same files, also after kill or interrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.config import RunConfig, resolved_yaml
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from tests import factories
from tests.factories import assert_same_tensors, rows
from tests.fake_vllm import FakeVllm, StallError, content_seed, serving
from tests.worlds import ticketed_shop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(finished_run: Path) -> Iterator[tuple[FakeVllm, str]]:
    with serving(finished_run / "references" / "0") as (fake, url):
        fake.seed_of = content_seed
        yield fake, url


@pytest.fixture(scope="module")
def config(server: tuple[FakeVllm, str]) -> RunConfig:
    """Seven steps with a sampler that stays for three, evaluations and a new reference between."""
    fake, url = server
    return factories.config(
        "--algorithm=oapl",
        "--algorithm.lag=3",
        "--algorithm.group_size=2",
        f"--policy.path={fake.first_folder}",
        "--warm_start.enabled=false",
        "--reference.refresh_every_steps=5",
        "--rollouts.engine=vllm",
        f"--rollouts.base_url={url}",
        "--rollouts.retries=0",
        "--training.max_steps=7",
        "--training.tasks_per_step=2",
        "--agent.max_response_tokens=8",
        "--training.checkpoint_every=2",
        "--training.eval_every=2",
        "--training.eval_episodes=2",
        "--evaluation.num_episodes=1",
        environment=ticketed_shop.SECTION,
    )


@pytest.fixture(scope="module")
def whole(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run whose trainer waits for every rollout."""
    waiting = factories.changed(config, "--rollouts.ahead=false")
    return factories.run(waiting, tmp_path_factory.mktemp("whole") / "run")


def assert_same_run(actual: RunDirectory, expected: RunDirectory) -> None:
    assert rows(actual.metrics) == rows(expected.metrics)
    assert read_json_lines(actual.rollouts) == read_json_lines(expected.rollouts)
    assert_same_tensors(actual.policy, expected.policy)


def ahead_seconds(run: RunDirectory) -> list[float | None]:
    return [row.get("rollout_ahead_seconds") for row in read_json_lines(run.metrics)]


def test_a_run_that_plays_ahead_has_the_files_of_one_that_does_not(
    config: RunConfig, whole: RunDirectory, tmp_path: Path
) -> None:
    run = factories.run(config, tmp_path / "run")
    assert_same_run(run, whole)
    assert set(ahead_seconds(whole)) == {None}
    assert sum(seconds or 0.0 for seconds in ahead_seconds(run)) > 0
    assert [row["sampler_lag"] for row in rows(run.metrics)] == [0, 1, 2, 0, 1, 2, 0]
    assert all(row["gradient_norm"] > 0 for row in rows(run.metrics))


FAULTS = {
    "at a new sampler": ("ragen_apo.training.trainer:Trainer.step", 4),
    "in the middle of a lag": ("ragen_apo.training.optimization:Optimizer.update", 3),
    "while the server plays": ("ragen_apo.policy.inference_server.vllm:VllmServer.completion", 10),
}
"""In the order of a run: where it dies, at which call since it was resumed."""


def test_a_run_killed_at_any_moment_plays_again_what_it_had_ahead(
    config: RunConfig, whole: RunDirectory, run_until_killed: Callable[..., int], tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    for fault, (target, call) in FAULTS.items():
        status = run_until_killed(tmp_path, target=target, call=call, text=resolved_yaml(config))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, fault
    assert len(read_json_lines(run.metrics)) in (4, 5, 6), "nothing was left to play again"
    assert_same_run(factories.run(config, run.path), whole)


def test_an_interrupt_ends_the_run_at_once_whatever_the_server_does(
    server: tuple[FakeVllm, str],
    config: RunConfig,
    whole: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDirectory(tmp_path / "run")
    interrupted_at: list[float] = []

    def interrupt_in_step_four(path: str, answer: Any) -> Any:
        if path == "/v1/completions" and len(read_json_lines(run.metrics)) >= 3:
            if not interrupted_at:
                interrupted_at.append(time.monotonic())
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
            raise StallError("60")
        return answer

    monkeypatch.setattr(server[0], "spoil", interrupt_in_step_four)
    # A shell that starts the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            factories.run(config, run.path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - interrupted_at[0] < 10.0
    assert not [each for each in threading.enumerate() if each.name.startswith("rollout")]
    monkeypatch.undo()
    assert_same_run(factories.run(config, run.path), whole)
