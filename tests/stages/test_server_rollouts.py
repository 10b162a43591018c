"""Runs whose episodes are sampled by a server: the weights follow, a failure loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.config import RunConfig, resolved_yaml
from ragen_apo.errors import ConfigError, ServerError
from ragen_apo.files import read_json_lines
from ragen_apo.policy.inference_server import rotation
from ragen_apo.policy.inference_server.weights import MARK
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages.inputs import check_start
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.factories import Sayings
from tests.fake_vllm import FakeVllm, HangupError, RefusalError, StallError, serving

pytestmark = pytest.mark.slow

ROUNDING = 1e-4
KEY = "sk-very-secret-0123456789"


@pytest.fixture
def server(finished_run: Path) -> Iterator[tuple[FakeVllm, str]]:
    with serving(finished_run / "references" / "0") as found:
        yield found


def config(server: tuple[FakeVllm, str], *overrides: str) -> RunConfig:
    """Two steps from the finished run's reference, with Stage 1 and evaluations."""
    fake, url = server
    return factories.config(
        f"--policy.path={fake.first_folder}",
        "--warm_start.enabled=false",
        "--agent.max_response_tokens=10",
        "--rollouts.engine=vllm",
        f"--rollouts.base_url={url}",
        "--rollouts.retries=0",
        "--reference.refresh_every_steps=null",
        "--values.adaptive=false",
        "--values.baseline=zero",  # returns may be equal here, and so would be they and V*
        "--training.max_steps=2",
        "--training.max_tasks=4",
        "--training.tasks_per_step=4",
        "--training.checkpoint_every=1",
        "--training.eval_every=null",
        "--evaluation.num_episodes=1",
        *overrides,
    )


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_each_step_samples_from_the_weights_of_the_step(
    server: tuple[FakeVllm, str], tmp_path: Path, lora: bool
) -> None:
    keys = ["--policy.lora.rank=2"] if lora else []
    said = Sayings()
    run = factories.run(config(server, *keys), tmp_path / "run", progress=said)
    rows = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["logprob_gap_max"] < ROUNDING for row in rows)
    assert all(row["gradient_norm"] > 0 for row in rows), "so the weights of the steps differ"
    assert any(line.startswith("rollouts by vLLM 0.32.0 at http://") for line in said.lines)


@pytest.mark.parametrize("error", [HangupError(), StallError("600")], ids=["dies", "stalls"])
def test_a_server_that_fails_in_an_episode_ends_the_run_and_resume_goes_on(
    server: tuple[FakeVllm, str], tmp_path: Path, error: Exception
) -> None:
    fake, _ = server
    asked = config(server, "--rollouts.timeout_seconds=3")

    def die_in_step_two(path: str, answer: Any) -> Any:
        if path == "/v1/completions" and list_checkpoints(tmp_path / "run" / "checkpoints"):
            raise error
        return answer

    fake.spoil = die_in_step_two
    with pytest.raises(ServerError, match="go on with --resume"):
        factories.run(asked, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    assert [row["step"] for row in read_json_lines(run.metrics)] == [1]
    fake.spoil = lambda path, answer: answer
    fake.restart()
    factories.run(asked, run.path)
    rows = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["logprob_gap_max"] < ROUNDING for row in rows)


def test_a_run_may_go_on_without_its_server(server: tuple[FakeVllm, str], tmp_path: Path) -> None:
    fake, _ = server
    fake.spoil = lambda path, answer: _raise() if path == "/v1/completions" else answer
    with pytest.raises(ServerError):
        factories.run(config(server), tmp_path / "run")
    closed = "--rollouts.base_url=http://127.0.0.1:9"
    local = factories.changed(config(server), "--rollouts.engine=local", closed)
    run = factories.run(local, tmp_path / "run")
    assert len(read_json_lines(run.metrics)) == 2


def _raise() -> None:
    raise HangupError


def test_a_start_without_a_server_is_refused_before_there_is_a_run(
    server: tuple[FakeVllm, str],
) -> None:
    with pytest.raises(ServerError, match="Start the server"):
        check_start(config(server, "--rollouts.base_url=http://127.0.0.1:9"))


def test_a_run_goes_on_with_the_servers_that_are_left(
    server: tuple[FakeVllm, str], tmp_path: Path
) -> None:
    """One is closed from the beginning, another dies in the first episode of step two."""
    with serving(server[0].first_folder) as (dying, dying_url):
        urls = ["http://127.0.0.1:9", dying_url, server[1]]
        one = config(server)
        several = one.rollouts.model_copy(update={"base_url": urls})
        asked = one.model_copy(update={"rollouts": several})
        check_start(asked)

        def die_in_step_two(path: str, answer: Any) -> Any:
            if list_checkpoints(tmp_path / "run" / "checkpoints"):
                raise HangupError
            return answer

        dying.spoil = die_in_step_two
        said = Sayings()
        run = factories.run(asked, tmp_path / "run", progress=said)
    rows = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["logprob_gap_max"] < ROUNDING for row in rows)
    assert sum(line.startswith("rollouts by vLLM") for line in said.lines) == 2
    assert sum(line.startswith(f"{dying_url}: ") for line in said.lines) == 1


def test_the_key_of_a_server_is_sent_and_stands_in_no_file(
    server: tuple[FakeVllm, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server repeats the key in everything that it says of itself, and in an error."""
    fake, _ = server
    fake.api_key = KEY
    monkeypatch.setenv("SERVER_KEY", KEY)
    monkeypatch.setattr(rotation, "RETRY_SECONDS", 0.01)
    failures = [HangupError(), RefusalError(500, f"{KEY} cannot")]

    def repeat(path: str, answer: Any) -> Any:
        if path == "/v1/completions" and failures:
            raise failures.pop()
        if path == "/version":
            answer["version"] += f" {KEY}"
        if path == "/v1/models":
            answer["data"][0]["root"] += KEY
        return answer

    fake.spoil = repeat
    said = Sayings()
    asked = config(server, "--rollouts.api_key_env=SERVER_KEY", "--rollouts.retries=2")
    check_start(asked)
    run = factories.run(asked, tmp_path / "run", progress=said)
    assert len(read_json_lines(run.metrics)) == 2
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert not any(KEY in line for line in said.lines)
    assert "[the key]" in " ".join(said.lines)


def test_a_start_without_the_key_of_its_servers_is_refused_before_there_is_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the server is to be started with a model that the run makes first."""
    monkeypatch.delenv("SERVER_KEY", raising=False)
    keys = ("--rollouts.engine=vllm", "--rollouts.base_url=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"rollouts\.api_key_env names is not set"):
        check_start(factories.config(*keys, "--rollouts.api_key_env=SERVER_KEY"))


def test_a_terminated_run_leaves_no_weights_for_its_server_behind(
    server: tuple[FakeVllm, str], tmp_path: Path
) -> None:
    """The adapter's folder is in use during a rollout, and a scheduler may end the run there."""
    for_files = tmp_path / "tmp"
    for_files.mkdir()
    endless = config(server, "--policy.lora.rank=2", "--training.max_steps=100000")
    (tmp_path / "run.yaml").write_text(resolved_yaml(endless), encoding="utf-8")
    asked = ("--config", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run"))
    process = subprocess.Popen(
        [sys.executable, "-m", "ragen_apo", "train", *asked],
        env={**os.environ, "TMPDIR": str(for_files)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not read_json_lines(tmp_path / "run" / "metrics.jsonl"):
        time.sleep(0.05)
    in_use = list(for_files.glob(f"{MARK}*"))
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert in_use
    assert process.returncode == 143, said
    assert "terminated. Nothing that was saved is lost" in said
    assert not list(for_files.glob(f"{MARK}*"))
