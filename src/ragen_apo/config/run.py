"""`RunConfig`: all sections together, and what must hold between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.algorithms import AlgorithmConfig, read_algorithm
from ragen_apo.config.distillation import DistillationConfig
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
from ragen_apo.config.values import ValuesConfig
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
    def needs_values(self) -> bool:
        """Whether Stage 2 subtracts V*."""
        return self.algorithm.traits.has_values

    @property
    def has_stage_one(self) -> bool:
        """Whether the reference is sampled: for V*, or for distillation."""
        return self.needs_values or self.distillation.enabled

    @model_validator(mode="after")
    def _the_algorithm_fits(self) -> RunConfig:
        self.algorithm.check(self)
        needed = self.algorithm.min_episodes_per_step
        num_tasks = self.training.tasks_per_step
        if num_tasks * self.algorithm.rollouts_per_task < needed:
            raise ValueError(
                f"algorithm {self.algorithm.name} compares the episodes of a step with each other; "
                f"training.tasks_per_step must be at least {needed}, got {num_tasks}"
            )
        return self

    @model_validator(mode="after")
    def _the_filter_sees_variance(self) -> RunConfig:
        if self.rollout_filter.strategy == "none":
            return self
        why = f"algorithm {self.algorithm.name} plays each task once a step"
        counts: dict[str, int | None] = {"algorithm.group_size": self.algorithm.rollouts_per_task}
        if self.needs_values:
            why = "Stage 1 may take only one"
            stored = self.values.store is not None
            counts = {
                "values.num_samples": None if stored else self.values.num_samples,
                "reference.num_samples": self.reference.num_samples,
            }
        for key, count in counts.items():
            if count == 1:
                raise ValueError(
                    f"rollout_filter needs several rollouts of a task to see variance, and {why}; "
                    f"raise {key}, which is 1"
                )
        return self

    @model_validator(mode="after")
    def _the_baseline_is_subtracted(self) -> RunConfig:
        if self.values.baseline != "v_star" and not self.needs_values:
            raise ValueError(
                f"values.baseline is {self.values.baseline}, and algorithm {self.algorithm.name} "
                "subtracts no V*, so nothing takes its place; leave values.baseline out"
            )
        return self

    @model_validator(mode="after")
    def _a_store_has_one_reference(self) -> RunConfig:
        if self.values.store is not None and self.reference.is_refreshed:
            raise ValueError(
                "values.store holds values of one reference and the section reference makes new "
                "ones; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _new_references_are_sampled(self) -> RunConfig:
        num_samples = self.reference.num_samples
        if num_samples is None:
            return self
        if not self.has_stage_one:
            raise ValueError(
                f"reference.num_samples is {num_samples}, and neither algorithm "
                f"{self.algorithm.name} nor distillation samples a reference; set it to null"
            )
        if self.values.adaptive and self.values.max_samples < num_samples:
            raise ValueError(
                f"values.max_samples ({self.values.max_samples}) must be at least "
                f"reference.num_samples ({num_samples}) if values.adaptive is true"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_something_to_adapt(self) -> RunConfig:
        if self.policy.lora is not None and self.policy.path is None:
            raise ValueError(
                "policy.lora adapts a pretrained model and policy.path names none; set policy.path "
                "to a model folder or hub name, or policy.lora to null"
            )
        return self

    @model_validator(mode="after")
    def _template_options_have_a_template(self) -> RunConfig:
        if self.agent.template_options and self.policy.path is None:
            raise ValueError(
                "agent.template_options are for the chat template of a pretrained model, and "
                "policy.path names none; set policy.path, or agent.template_options to {}"
            )
        return self

    @model_validator(mode="after")
    def _pretrained_weights_are_kept(self) -> RunConfig:
        warm_start = self.warm_start
        copies = warm_start.enabled and warm_start.copy_curriculum.max_steps > 0
        if copies and self.policy.path is not None:
            raise ValueError(
                "warm_start.copy trains on random tokens, for a model that starts from random "
                f"weights, and policy.path is {self.policy.path!r}; set warm_start.copy.max_steps "
                "to 0 to keep the demonstrations only, or warm_start.enabled to false. "
                "Pretrained weights also need far smaller learning rates: see "
                "configs/webshop_qwen.yaml"
            )
        return self

    @model_validator(mode="after")
    def _stop_rules_have_something_to_read(self) -> RunConfig:
        rule = self.training.early_stop.min_mutual_information
        if rule is not None and self.monitors.every_steps is None:
            raise ValueError(
                "training.early_stop.min_mutual_information reads what monitors measure; set "
                "monitors.every_steps"
            )
        return self

    @model_validator(mode="after")
    def _the_clock_decides_nothing(self) -> RunConfig:
        if self.machine.deterministic and self.rollouts.schedule == "dynamic":
            raise ValueError(
                "machine.deterministic promises the same bits every time, and with "
                "rollouts.schedule dynamic their rounding depends on which process is faster; set "
                "one of them to its default"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit_the_small_model(self) -> RunConfig:
        if self.policy.path is not None:
            return self
        longest = self.policy.small.max_position
        lengths = {"agent.max_context_tokens": self.agent.max_context_tokens}
        if self.warm_start.enabled:
            copy_length = self.warm_start.copy_curriculum.sequence_length
            lengths["warm_start.copy.sequence_length"] = copy_length
        for key, length in lengths.items():
            if length > longest:
                raise ValueError(
                    f"{key} ({length}) must be at most policy.small.max_position ({longest})"
                )
        return self
