"""Rollouts by a real vLLM on a CPU follow the policy's weights: `make test-vllm` (docs/server.md).

Two environment variables name what is needed: RAGEN_APO_VLLM_PYTHON, the python of an environment
with vLLM, and RAGEN_APO_VLLM_MODEL, a folder (or a hub name that is in the cache) with a small
instruction-tuned model. The servers take minutes to start on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import RunConfig
from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ServerError
from ragen_apo.policy.inference_server.configured import read_facts, servers_of
from ragen_apo.policy.inference_server.untied import is_tied
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters
from ragen_apo.types import Trajectory
from tests import factories
from tests.vllm.servers import MAX_CONTEXT_TOKENS, MODEL, ROUNDING, Vllm, needed

pytestmark = [pytest.mark.slow, needed]
NUM_EPISODES = 2
"""Of two turns each: with adapters a server on a CPU writes 4 tokens a second."""


def config_for(server: Vllm, model: str | Path, *overrides: str) -> RunConfig:
    return factories.config(
        f"--policy.path={model}",
        "--warm_start.enabled=false",
        "--environment.max_turns=2",
        "--rollouts.engine=vllm",
        f"--rollouts.base_url={server.url}",
        "--rollouts.timeout_seconds=900",
        "--rollouts.retries=0",
        *overrides,
    )


def config_of_smollm2(server: Vllm) -> RunConfig:
    return config_for(
        server,
        MODEL,
        "--agent.system_prompt=rules_and_format",
        "--agent.max_context_tokens=1800",
        "--agent.max_response_tokens=24",
    )


def loaded(folder: str | Path) -> LanguageModel:
    model = load_language_model(str(folder), device=torch.device("cpu"))
    model.model.requires_grad_(False)
    return model


def proxy_of(config: RunConfig, policy: LanguageModel) -> AgentProxy:
    environments = build_environments(config.environment, config.agent)
    return build_proxy(config, policy, environments)


def play(proxy: AgentProxy, num_episodes: int) -> list[Trajectory]:
    tasks = proxy.environments.tasks("train")[:num_episodes]
    requests = [EpisodeRequest(task, seed) for seed, task in enumerate(tasks)]
    return proxy.rollout(requests, temperature=1.0, policy_version="test")


@torch.no_grad()
def gaps(model: LanguageModel, episodes: Sequence[Trajectory]) -> torch.Tensor:
    """Between the server's log-probabilities and ours, of every sampled token."""
    ours = torch.cat([factories.sampled_logprobs(model, episode) for episode in episodes])
    logprobs = [value for e in episodes for turn in e.turns for value in turn.logprobs]
    return (ours - torch.tensor(logprobs)).abs()


@torch.no_grad()
def move(model: LanguageModel, mark: str, *, by: float, but: str = "nothing") -> None:
    """Adds noise to all weights whose name has the mark, and not the other one."""
    draws = torch.Generator().manual_seed(0)
    for name, weight in model.model.named_parameters():
        if mark in name and but not in name:
            weight.add_(by * torch.randn(weight.shape, generator=draws))


def require_that_rollouts_follow(
    proxy: AgentProxy, policy: LanguageModel, mark: str, **how: Any
) -> None:
    """Episodes come from the policy as it is, and after its weights have moved as it is then."""
    before = play(proxy, NUM_EPISODES)
    assert gaps(policy, before).max() < ROUNDING
    move(policy, mark, **how)
    assert gaps(policy, before).mean() > 10 * ROUNDING, "other weights say something else"
    assert gaps(policy, play(proxy, NUM_EPISODES)).max() < ROUNDING


def test_adapters_of_a_real_model_follow(smollm2: Vllm) -> None:
    config = config_of_smollm2(smollm2)
    facts = read_facts(config.rollouts, num_tokens=config.agent.max_context_tokens)[smollm2.url]
    assert facts.max_context_tokens == MAX_CONTEXT_TOKENS
    policy = loaded(MODEL)
    add_adapters(policy.model, LoraConfig(rank=8, alpha=16), seed=0)
    require_that_rollouts_follow(proxy_of(config, policy), policy, ".lora_B", by=0.06)


def test_all_weights_of_a_tied_model_follow_through_an_untied_copy(
    small: Vllm, small_model: Path
) -> None:
    policy = loaded(small_model)
    assert is_tied(policy)
    proxy = proxy_of(config_for(small, small_model), policy)
    require_that_rollouts_follow(proxy, policy, "", by=0.05)


def test_a_tied_model_is_served_as_it_is_until_its_embeddings_move(smollm2: Vllm) -> None:
    config = config_of_smollm2(smollm2)
    policy = loaded(MODEL)
    if not is_tied(policy):
        pytest.skip(f"{MODEL} has a projection of its own")
    proxy = proxy_of(config, policy)
    require_that_rollouts_follow(proxy, policy, "", by=0.01, but="embed_tokens")
    (server,) = servers_of(config.rollouts)
    label = server.label()
    move(policy, "embed_tokens", by=0.01)
    copy = "Make a copy with `python -m ragen_apo.policy.inference_server.untied"
    with pytest.raises(ServerError, match=f"the vocabulary projection that .*{copy}"):
        play(proxy, 1)
    assert server.label() == label, "the server has the weights that it had"
