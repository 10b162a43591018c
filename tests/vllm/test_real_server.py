"""Rollouts by a real vLLM on a CPU, with a real model: `make test-vllm` (docs/server.md).

Two environment variables name what is needed: RAGEN_APO_VLLM_PYTHON, the python of an environment
with vLLM, and RAGEN_APO_VLLM_MODEL, a folder (or a hub name that is in the cache) with a small
instruction-tuned model. The server takes minutes to start on a busy machine.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import RunConfig
from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ServerError
from ragen_apo.policy.inference_server.engine import read_facts
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters
from ragen_apo.types import Trajectory
from tests import factories

PYTHON = os.environ.get("RAGEN_APO_VLLM_PYTHON")
MODEL = os.environ.get("RAGEN_APO_VLLM_MODEL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON or not MODEL,
        reason="RAGEN_APO_VLLM_PYTHON and RAGEN_APO_VLLM_MODEL name no vLLM; run `make test-vllm`",
    ),
]

MAX_START_SECONDS = 900
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
}
FLAGS = "--dtype bfloat16 --max-model-len 2048 --enable-lora --max-lora-rank 16 --enforce-eager"
MEAN_GAP, MAX_GAP = 0.1, 1.5
"""What bfloat16 does to log-probabilities, in nats."""


@dataclass(frozen=True)
class Vllm:
    """A server of its own process group."""

    process: subprocess.Popen[bytes]
    url: str

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    assert PYTHON
    folder = tmp_path_factory.mktemp("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS.split()]
    surroundings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT
    log = folder / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=surroundings,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Vllm(process, f"http://127.0.0.1:{port}")
        try:
            wait_for(server, port, log)
            yield server
        finally:
            if process.poll() is None:
                server.kill()


def wait_for(server: Vllm, port: int, log: Path) -> None:
    """Until it answers; fails with the end of its log."""
    until = time.monotonic() + MAX_START_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(1)
        finally:
            connection.close()
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture(scope="module")
def config(vllm: Vllm) -> RunConfig:
    return factories.config(
        f"--policy.path={MODEL}",
        "--warm_start.enabled=false",
        "--environment.max_turns=2",
        "--agent.system_prompt=rules_and_format",
        "--agent.max_context_tokens=1800",
        "--agent.max_response_tokens=24",
        "--rollouts.engine=vllm",
        f"--rollouts.base_url={vllm.url}",
        "--rollouts.timeout_seconds=900",
        "--rollouts.retries=1",
        "--rollouts.retry_seconds=0.5",
    )


@pytest.fixture(scope="module")
def policy() -> LanguageModel:
    """The model with adapters that do nothing yet."""
    model = load_language_model(MODEL, device=torch.device("cpu"))
    model.model.requires_grad_(False)
    add_adapters(model.model, LoraConfig(rank=8, alpha=16), seed=0)
    return model


@pytest.fixture(scope="module")
def proxy(config: RunConfig, policy: LanguageModel) -> AgentProxy:
    environments = build_environments(config.environment, config.agent)
    return build_proxy(config, policy, environments)


def play(
    proxy: AgentProxy, num_episodes: int, on_finished: Callable[..., None] | None = None
) -> list[Trajectory]:
    tasks = proxy.environments.tasks("train")[:num_episodes]
    requests = [EpisodeRequest(task, seed) for seed, task in enumerate(tasks)]
    return proxy.rollout(requests, temperature=1.0, policy_version="test", on_finished=on_finished)


@torch.no_grad()
def gaps(model: LanguageModel, episodes: list[Trajectory]) -> torch.Tensor:
    """Between the server's log-probabilities and ours, of every sampled token."""
    ours = torch.cat([factories.sampled_logprobs(model, episode) for episode in episodes])
    logprobs = [value for e in episodes for turn in e.turns for value in turn.logprobs]
    return (ours - torch.tensor(logprobs)).abs()


def move_adapters(model: LanguageModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if ".lora_B" in name:
                weight.add_(0.06 * torch.randn(weight.shape, generator=generator))


def test_a_real_server_from_its_start_to_its_death(
    vllm: Vllm, config: RunConfig, policy: LanguageModel, proxy: AgentProxy
) -> None:
    facts = read_facts(config.rollouts, num_tokens=config.agent.max_context_tokens)[vllm.url]
    assert facts.max_context_tokens == 2048

    episodes = play(proxy, 8)
    assert len(episodes) == 8
    before = gaps(policy, episodes)
    assert before.mean() < MEAN_GAP
    assert before.max() < MAX_GAP

    move_adapters(policy)
    apart = gaps(policy, episodes).mean()
    assert apart > MEAN_GAP, "other weights say something else"
    after = gaps(policy, play(proxy, 4))
    assert after.mean() < apart / 2
    assert after.max() < MAX_GAP

    with pytest.raises(ServerError, match=f"{vllm.url}: .* go on with --resume"):
        play(proxy, 8, on_finished=lambda ended: vllm.kill())
