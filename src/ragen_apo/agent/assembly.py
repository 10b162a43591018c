"""Builds the agent from a configuration, the same way for Stage 1, Stage 2 and evaluation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ragen_apo.agent.context import ContextManager, ContextWindow, TokenLimits, system_prompt
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.config import RunConfig
from ragen_apo.config.agent import AgentConfig, ContextConfig
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.machine import MachineConfig
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.environments.process import ProcessEnvironment
from ragen_apo.errors import ConfigError
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.inference_server.engine import ServerEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import Progress
from ragen_apo.values.conditions import SamplingConditions

PARSER_VERSIONS = {"think_answer": "think-answer-2", "tool_call": "tool-call-4"}
"""Raise one whenever another action is read in the same text."""


def set_up_machine(machine: MachineConfig) -> tuple[torch.device, torch.dtype]:
    """Sets the thread count and returns device and number format of the policy.

    Each process that torchrun starts on a host has a GPU of its own.

    Raises ConfigError for a device that this machine or this build of torch does not have.
    """
    if machine.num_threads is not None:
        torch.set_num_threads(machine.num_threads)
    name = machine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
        raise ConfigError(
            f"machine.device is cuda, and torch {torch.__version__}, {built}, finds no GPU here. "
            "Set machine.device to auto or cpu, or install a CUDA build and check `nvidia-smi`"
        )
    worker = this_worker()
    if name == "cuda" and worker.local_size > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun has started {worker.local_size} processes on this host, which has "
            f"{torch.cuda.device_count()} GPUs; give --nproc-per-node gpu, or machine.device cpu"
        )
    if name == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = machine.tf32
        torch.backends.cudnn.allow_tf32 = machine.tf32
        # cuDNN plans attention anew for every shape, and nearly every prompt here has its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if machine.deterministic:
        # cuBLAS reads it when it starts; with more workspaces it may choose among algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(machine.deterministic)
    shares_gpus = name == "cuda" and worker.size > 1
    device = torch.device(name, worker.local_rank) if shares_gpus else torch.device(name)
    return device, getattr(torch, machine.dtype)


def build_environments(
    environment: EnvironmentConfig,
    agent: AgentConfig,
    rollouts: RolloutsConfig | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> EnvironmentManager:
    """The pool of the configured environment, with the configured costs.

    Of `rollouts` what is said of environments is used; `say` tells the user of episodes that begin
    again.
    """
    rollouts = rollouts or RolloutsConfig()
    name, options = environment.name, environment.options

    def in_a_process(like: TextEnvironment) -> TextEnvironment:
        seconds = rollouts.environment_timeout_seconds
        return ProcessEnvironment(name, options, like=like, timeout_seconds=seconds)

    return EnvironmentManager(
        lambda: make_environment(name, options),
        format_penalty=agent.format_penalty,
        invalid_action_penalty=agent.invalid_action_penalty,
        calls_tools=agent.calls_tools,
        num_workers=rollouts.num_environment_workers,
        num_retries=rollouts.environment_retries,
        make_elsewhere=in_a_process if rollouts.environment_processes else None,
        say=say,
        name=name,
    )


def build_context(
    agent: AgentConfig, model: LanguageModel, environments: EnvironmentManager
) -> ContextManager:
    """The context manager with the configured system prompt, window and limits."""
    return context_of_tokenizer(agent, model.tokenizer, environments, end_ids=model.end_ids)


def context_of_tokenizer(
    agent: AgentConfig,
    tokenizer: PreTrainedTokenizerBase,
    environments: EnvironmentManager,
    *,
    end_ids: Sequence[int] = (),
) -> ContextManager:
    """As `build_context`; scripted episodes need no model."""
    rules = environments.properties.rules
    return ContextManager(
        tokenizer,
        system_prompt=system_prompt(agent.system_prompt, rules=rules, tools=environments.tools),
        window=context_window(agent.context),
        limits=TokenLimits(agent.max_context_tokens, agent.max_response_tokens),
        end_ids=end_ids,
        tools=environments.tools,
    )


def context_window(context: ContextConfig) -> ContextWindow:
    """The window of a mode; the full context is the one that leaves nothing out."""
    if context.mode == "full":
        return ContextWindow()
    assert context.num_turns is not None, "ContextConfig refuses it"
    if context.mode == "last_turns":
        return ContextWindow(num_turns=context.num_turns)
    return ContextWindow(num_turns=0, num_actions=context.num_turns)


def build_proxy(
    config: RunConfig,
    model: LanguageModel,
    environments: EnvironmentManager,
    *,
    ranks: Ranks = ALONE,
    progress: Progress | None = None,
) -> AgentProxy:
    """The agent that plays with `model`, by the weights that it has when a rollout begins.

    `ranks` share its episodes; `training.num_rows` are those of each. `progress` is told of
    inference servers that fail while others play.
    """
    num_rows, capacity = config.training.num_rows, config.agent.max_context_tokens
    stops_at_answer = not config.agent.calls_tools
    if config.rollouts.engine == "vllm":
        engine = ServerEngine(
            model,
            config.rollouts,
            num_rows=num_rows,
            capacity=capacity,
            temperature=config.sampling.temperature,
            stops_at_answer=stops_at_answer,
            ranks=ranks,
            progress=progress,
        )
    else:
        engine = GenerationEngine(
            model, num_rows=num_rows, capacity=capacity, stops_at_answer=stops_at_answer
        )
    context = build_context(config.agent, model, environments)
    return AgentProxy(
        engine,
        environments,
        context,
        ranks=ranks,
        schedule=config.rollouts.schedule,
        lockstep=config.rollouts.lockstep,
    )


def sampling_conditions(
    config: RunConfig, reference: LanguageModel, environments: EnvironmentManager
) -> SamplingConditions:
    """The full key, task aside, under which the reference's returns are stored."""
    properties = environments.properties
    context = build_context(config.agent, reference, environments)
    template = str(reference.tokenizer.chat_template)
    if context.template.tools:
        template += json.dumps(context.template.tools)
    version = PARSER_VERSIONS[config.agent.response_format]
    return SamplingConditions(
        reference_fingerprint=reference.fingerprint(),
        environment=properties.name,
        environment_version=properties.version,
        environment_options=json.dumps(config.environment.options, sort_keys=True),
        reward_version=properties.reward_version,
        context_mode=config.agent.context.label,
        chat_template_hash=hashlib.sha256(template.encode()).hexdigest()[:16],
        system_prompt=context.system_prompt or "",
        parser_version=version + ("-opened" if context.template.opening else ""),
        max_response_tokens=config.agent.max_response_tokens,
        max_context_tokens=config.agent.max_context_tokens,
        temperature=config.sampling.temperature,
        format_penalty=config.agent.format_penalty,
        invalid_action_penalty=config.agent.invalid_action_penalty,
    )
