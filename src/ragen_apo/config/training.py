"""The sections on the course of training: steps, stop rules, monitors, evaluation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from ragen_apo.config.section import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Section,
    Size,
    whole_number,
)


class EarlyStopConfig(Section):
    """When Stage 2 ends before training.max_steps; all rules are off by default. One stops the run
    when it held in `patience` rows of metrics.jsonl one after the other.
    """

    patience: Count = 3
    """Rows in succession; rows without the metric of a rule are passed over."""
    max_return_drop: Positive | None = None
    """Largest fall of return_mean from its best so far."""
    min_mutual_information: Positive | None = None
    """Least mutual_information in nats; measured as often as monitors.every_steps says."""
    min_entropy: Positive | None = None
    """Least entropy in nats per sampled token."""
    max_entropy: Positive | None = None
    """Largest entropy in nats per sampled token."""
    max_kl: Positive | None = None
    """Largest kl_per_sequence."""
    max_format_error_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of turns without readable thought and action."""

    @model_validator(mode="after")
    def _entropy_has_room(self) -> EarlyStopConfig:
        low, high = self.min_entropy, self.max_entropy
        if low is not None and high is not None and low >= high:
            raise ValueError(f"min_entropy ({low:g}) must be less than max_entropy ({high:g})")
        return self


class TrainingConfig(Section):
    """The loop of Stage 2."""

    max_steps: CountOrZero = 60
    """Steps; each makes policy_gradient.num_epochs * num_minibatches updates, A*-PO makes one."""
    max_tasks: Count | None = None
    """Training tasks of Stage 1 and Stage 2, drawn from the seed; null for the whole split."""
    tasks_per_step: Size = 64
    """Tasks per step, each rolled out once or policy_gradient.group_size times."""
    micro_batch_size: Size = 16
    """Contexts per forward pass; bounds memory, does not change the result. Those of one trajectory
    (one in `full`, up to one a turn in windows) stay together, even if they are more."""
    num_rows: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=10_000)] = 128
    """Episodes that are played side by side at most."""
    eval_every: Count | None = 10
    """Steps between two evaluations on evaluation.split; null for none."""
    eval_episodes: Size = 100
    """Episodes of such an evaluation."""
    checkpoint_every: Count = 10
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep."""
    early_stop: EarlyStopConfig = EarlyStopConfig()


class MonitorsConfig(Section):
    """Measurements in Stage 2 that take time and change nothing else (docs/metrics.md)."""

    every_steps: Count | None = 10
    """Measure in the first step and then each time after so many; null for never."""
    num_thoughts: Annotated[int, BeforeValidator(whole_number), Field(ge=2, le=1000)] = 16
    """Tasks whose first thoughts are scored under each other's prompts; costs its square."""
    gradient_buckets: bool = False
    """Also measure the gradient's norm by the variance of returns; costs a pass of gradients."""


class EvaluationConfig(Section):
    """The evaluation after training and of `ragen-apo evaluate`."""

    split: str = "test"
    """Tasks to play."""
    num_episodes: Size = 100
    """Tasks in the split's order, one episode each. A smaller split begins again, with other seeds;
    where nothing is drawn (greedy play, a deterministic environment) it is played once."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    pass_k: Size | None = None
    """Also play each task this often at apo.temperature and give pass@k."""
