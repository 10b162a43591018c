"""`RunConfig`: all sections together, and what must hold between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.algorithms import AlgorithmConfig, read_algorithm
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.machine import MachineConfig
from ragen_apo.config.policy import PolicyConfig
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.config.section import Section, Seed
from ragen_apo.config.tracking import TrackingConfig
from ragen_apo.config.training import (
    EvaluationConfig,
    MonitorsConfig,
    OptimizerConfig,
    ReferenceConfig,
    RolloutFilterConfig,
    SamplingConfig,
    TrainingConfig,
)
from ragen_apo.config.values import DistillationConfig, ValuesConfig
from ragen_apo.config.warm_start import WarmStartConfig


class RunConfig(Section):
    """Everything that a run depends on."""

    seed: Seed = 0
    """All randomness of the run derives from it."""
    machine: MachineConfig = MachineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    policy: PolicyConfig = PolicyConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    sampling: SamplingConfig = SamplingConfig()
    values: ValuesConfig = ValuesConfig()
    distillation: DistillationConfig = DistillationConfig()
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(read_algorithm)] = Field(
        default_factory=lambda: read_algorithm(None)
    )
    """What Stage 2 optimises: its name and its own options."""
    optimizer: OptimizerConfig = OptimizerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout_filter: RolloutFilterConfig = RolloutFilterConfig()
    training: TrainingConfig = TrainingConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def split_while_training(self) -> str:
        """The tasks of evaluations during training."""
        return self.training.eval_split or self.evaluation.split

    @property
    def needs_values(self) -> bool:
        """Whether Stage 2 subtracts V*."""
        return self.algorithm.traits.has_values

    @property
    def has_stage_one(self) -> bool:
        """Whether the reference is sampled: for V*, or for distillation."""
        return self.needs_values or self.distillation.enabled

    @model_validator(mode="after")
    def _sections_go_together(self) -> RunConfig:
        self.algorithm.check(self)
        conflicts = itertools.chain(_of_algorithm(self), _of_references(self), _of_model(self))
        if conflict := next(conflicts, None):
            raise ValueError(conflict)
        return self


def _of_algorithm(config: RunConfig) -> Iterator[str]:
    """What the sections of Stage 2 ask of each other in vain, a sentence each."""
    algorithm, values, training = config.algorithm, config.values, config.training
    needed, num_tasks = algorithm.min_episodes_per_step, training.tasks_per_step
    if num_tasks * algorithm.rollouts_per_task < needed:
        yield (
            f"algorithm {algorithm.short_name} compares the episodes of a step with each other; "
            f"training.tasks_per_step must be at least {needed}, got {num_tasks}"
        )
    if config.rollout_filter.strategy != "none":
        why = f"algorithm {algorithm.short_name} plays each task once a step"
        counts: dict[str, int | None] = {"algorithm.group_size": algorithm.rollouts_per_task}
        if config.needs_values:
            why = "Stage 1 may take only one"
            counts = {
                "values.num_samples": None if values.store is not None else values.num_samples,
                "reference.num_samples": config.reference.num_samples,
            }
        for key in (key for key, count in counts.items() if count == 1):
            yield (
                f"rollout_filter needs several rollouts of a task to see variance, and {why}; "
                f"raise {key}, which is 1"
            )
    if values.baseline != "v_star" and not config.needs_values:
        yield (
            f"values.baseline is {values.baseline}, and algorithm {algorithm.short_name} "
            "subtracts no V*, so nothing takes its place; leave values.baseline out"
        )
    if values.estimator == "regression" and not config.needs_values:
        yield (
            f"values.estimator is regression, and algorithm {algorithm.short_name} subtracts no "
            "V*; leave values.estimator out"
        )
    rule = training.early_stop.min_mutual_information
    if rule is not None and config.monitors.every_steps is None:
        yield (
            "training.early_stop.min_mutual_information reads what monitors measure; set "
            "monitors.every_steps"
        )
    if config.machine.deterministic and config.rollouts.schedule == "dynamic":
        yield (
            "machine.deterministic promises the same bits every time, and with "
            "rollouts.schedule dynamic their rounding depends on which process is faster; set "
            "one of them to its default"
        )


def _of_references(config: RunConfig) -> Iterator[str]:
    """What the sections values and reference ask of each other in vain."""
    values, num_samples = config.values, config.reference.num_samples
    if values.store is not None and config.reference.is_refreshed:
        yield (
            "values.store holds values of one reference and the section reference makes new "
            "ones; remove one of the two"
        )
    if num_samples is not None and not config.has_stage_one:
        yield (
            f"reference.num_samples is {num_samples}, and neither algorithm "
            f"{config.algorithm.short_name} nor distillation samples a reference; set it to null"
        )
    if num_samples is not None and values.adaptive and values.max_samples < num_samples:
        yield (
            f"values.max_samples ({values.max_samples}) must be at least "
            f"reference.num_samples ({num_samples}) if values.adaptive is true"
        )


def _of_model(config: RunConfig) -> Iterator[str]:
    """What a pretrained model cannot do, and what the small one cannot."""
    policy, agent, warm_start = config.policy, config.agent, config.warm_start
    copies = warm_start.enabled and warm_start.copy_curriculum.max_steps > 0
    if policy.path is not None:
        if copies:
            yield (
                "warm_start.copy trains on random tokens, for a model that starts from random "
                f"weights, and policy.path is {policy.path!r}; name the model by --pretrained, "
                "which also sets the far smaller learning rates that it needs, or set "
                "warm_start.copy.max_steps to 0, or warm_start.enabled to false"
            )
        return
    if policy.lora is not None:
        yield (
            "policy.lora adapts a pretrained model and policy.path names none; set policy.path "
            "to a model folder or hub name, or policy.lora to null"
        )
    if agent.template_options:
        yield (
            "agent.template_options are for the chat template of a pretrained model, and "
            "policy.path names none; set policy.path, or agent.template_options to {}"
        )
    longest = policy.small.max_position
    lengths = {"agent.max_context_tokens": agent.max_context_tokens}
    if warm_start.enabled:
        lengths["warm_start.copy.sequence_length"] = warm_start.copy_curriculum.sequence_length
    for key, length in lengths.items():
        if length > longest:
            yield f"{key} ({length}) must be at most policy.small.max_position ({longest})"
