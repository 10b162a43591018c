"""`RunConfig`: all sections together, and what must hold between them."""

from __future__ import annotations

from pydantic import model_validator

from ragen_apo.config.agent import (
    AgentConfig,
    EnvironmentConfig,
    MachineConfig,
    PolicyConfig,
    WarmStartConfig,
)
from ragen_apo.config.algorithms import (
    DEFAULT_GROUP_SIZE,
    GROUP_ALGORITHMS,
    VALUE_ALGORITHMS,
    AlgorithmName,
    ApoConfig,
    GigpoConfig,
    PolicyGradientConfig,
    PpoConfig,
    RewardNormalizationConfig,
    RolloutFilterConfig,
    TurnLevelConfig,
)
from ragen_apo.config.section import Section, Seed
from ragen_apo.config.training import (
    EvaluationConfig,
    MonitorsConfig,
    TrainingConfig,
)


class RunConfig(Section):
    """Everything that a run depends on."""

    seed: Seed = 0
    """All randomness of the run derives from it."""
    run: MachineConfig = MachineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    policy: PolicyConfig = PolicyConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: AlgorithmName = "apo"
    """What Stage 2 optimises; apo is A*-PO on whole trajectories, apo_turn on turns."""
    apo: ApoConfig = ApoConfig()
    turn_level: TurnLevelConfig = TurnLevelConfig()
    policy_gradient: PolicyGradientConfig = PolicyGradientConfig()
    ppo: PpoConfig = PpoConfig()
    gigpo: GigpoConfig = GigpoConfig()
    rollout_filter: RolloutFilterConfig = RolloutFilterConfig()
    reward_normalization: RewardNormalizationConfig = RewardNormalizationConfig()
    training: TrainingConfig = TrainingConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def needs_values(self) -> bool:
        """Whether Stage 2 subtracts V*, so that there is a Stage 1."""
        return self.algorithm in VALUE_ALGORITHMS

    @property
    def num_rollouts_per_task(self) -> int:
        """Episodes that Stage 2 plays of each task of a step."""
        if self.needs_values:
            return 1
        default = DEFAULT_GROUP_SIZE if self.algorithm in GROUP_ALGORITHMS else 1
        return self.policy_gradient.group_size or default

    @model_validator(mode="after")
    def _there_is_something_to_compare(self) -> RunConfig:
        """Refuses what would find no two rollouts to compare."""
        one_each = self.num_rollouts_per_task == 1
        why = f"algorithm {self.algorithm} rolls each task out once with group_size = 1"
        if one_each and self.algorithm in GROUP_ALGORITHMS:
            raise ValueError(
                f"algorithm {self.algorithm} compares rollouts of one task; "
                "policy_gradient.group_size must be at least 2, got 1"
            )
        chosen = self.rollout_filter
        reads_variance = chosen.zero_variance == "drop" or chosen.statistic != "mean"
        sees_one, why_one = one_each, why
        if self.needs_values:
            sees_one = self.apo.num_value_samples == 1 and self.apo.value_store is None
            why_one = "Stage 1 may take only one, as apo.num_value_samples is 1"
        if sees_one and chosen.strategy != "none" and reads_variance:
            raise ValueError(
                f"rollout_filter needs several rollouts of a task to see variance, and {why_one}; "
                "raise that, or use statistic mean with zero_variance keep"
            )
        normalized = self.reward_normalization
        if normalized.method != "identity":
            if self.needs_values:
                raise ValueError(
                    f"reward_normalization changes returns and algorithm {self.algorithm} compares "
                    "them with V* of unchanged ones; use method identity"
                )
            if one_each and normalized.grouping == "state":
                raise ValueError(
                    f"reward_normalization by state compares rollouts of a task, and {why}; use "
                    "grouping batch or raise group_size"
                )
        if self.algorithm == "apo_turn" and (
            self.apo.length_normalization != "none" or self.apo.kl_coefficient > 0
        ):
            raise ValueError(
                "apo.length_normalization and apo.kl_coefficient belong to algorithm apo; leave "
                "them out for apo_turn"
            )
        num_episodes = self.training.tasks_per_step * self.num_rollouts_per_task
        if self.algorithm == "brpo" and num_episodes < 2:
            raise ValueError(
                "algorithm brpo compares the episodes of a step; training.tasks_per_step must be "
                "at least 2, got 1"
            )
        return self

    @model_validator(mode="after")
    def _there_is_a_mean_of_others(self) -> RunConfig:
        centers = self.needs_values and self.apo.center_residuals
        if centers and self.training.tasks_per_step < 2:
            raise ValueError(
                "apo.center_residuals subtracts the mean of a step's other trajectories; "
                f"training.tasks_per_step must be at least 2, got {self.training.tasks_per_step}"
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
    def _monitors_have_something_to_measure(self) -> RunConfig:
        every_steps = self.monitors.every_steps
        if self.training.early_stop.min_mutual_information is not None and every_steps is None:
            raise ValueError(
                "training.early_stop.min_mutual_information reads what monitors measure; set "
                "monitors.every_steps"
            )
        if not self.monitors.gradient_buckets:
            return self
        if every_steps is None:
            raise ValueError("monitors.gradient_buckets needs monitors.every_steps, got null")
        if not self.needs_values and self.num_rollouts_per_task == 1:
            raise ValueError(
                "monitors.gradient_buckets compares the returns of a task, and each is rolled out "
                "once; raise policy_gradient.group_size"
            )
        own_store = self.needs_values and self.apo.value_store is None
        if own_store and self.apo.num_value_samples < 2:
            raise ValueError(
                "monitors.gradient_buckets compares the Stage 1 returns of a task; "
                f"apo.num_value_samples must be at least 2, got {self.apo.num_value_samples}"
            )
        return self

    @model_validator(mode="after")
    def _replay_has_the_right_minimum(self) -> RunConfig:
        """Refuses replay where the regression ends elsewhere on old trajectories than on new."""
        apo = self.apo
        if apo.replay.num_trajectories_per_step == 0:
            return self
        if self.algorithm != "apo":
            raise ValueError(
                f"apo.replay belongs to algorithm apo, got {self.algorithm}; set "
                "apo.replay.num_trajectories_per_step to 0"
            )
        why = "on trajectories of earlier policies the regression is right only if"
        if apo.beta1 != apo.beta2:
            raise ValueError(
                f"apo.replay needs apo.beta1 = apo.beta2, got {apo.beta1:g} and {apo.beta2:g}: "
                f"{why} V* has the temperature of the log ratio; set apo.beta for both, or leave "
                "out apo.replay"
            )
        if apo.value_baseline != "v_star":
            raise ValueError(
                f"apo.replay needs apo.value_baseline v_star, got {apo.value_baseline}: {why} "
                "V* is subtracted from the return"
            )
        if apo.length_normalization != "none" or apo.kl_coefficient > 0:
            raise ValueError(
                f"apo.replay needs apo.length_normalization none and apo.kl_coefficient 0: {why} "
                "the log ratio is the sum over tokens with the weight beta2"
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
