"""Stage 2 and what is measured: sampling, steps, updates, references, stop rules, evaluation."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ragen_apo.choices import FilterStrategy, Schedule, ZeroVariance
from ragen_apo.config.search import SearchConfig
from ragen_apo.config.section import (
    LARGEST,
    Count,
    CountOrZero,
    LearningRate,
    NonNegative,
    Positive,
    Section,
    Size,
    whole_number,
)

LEAST_TEMPERATURE = 1e-3
"""Logits that are divided by less may be too large for a number."""


def _greedy_or_large_enough(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"{temperature} is too small to divide by; expected 0, which is greedy, or at least "
            f"{LEAST_TEMPERATURE}"
        )
    return temperature


class SamplingConfig(Section):
    """How the policy samples in Stage 1 and Stage 2."""

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=LARGEST)] = 1.0
    """Divides the logits. The tempered distribution is the policy that is trained."""


class OptimizerConfig(Section):
    """AdamW on the policy, for every algorithm."""

    learning_rate: LearningRate = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping; A*-PO's loss is divided by 2 beta2 first."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up, down to 0 at training.max_steps."""


class ReferenceConfig(Section):
    """When the policy becomes the new reference, and V* is estimated again where it is used."""

    refresh_every_steps: Count | None = None
    """Makes a new reference after this many steps; null for never."""
    refresh_max_kl: Positive | None = None
    """Makes a new reference when the mean KL per trajectory exceeds this; null for never.
    Distillation leaves the reference before the first step, and adapters that were merged into it
    round otherwise. With either, this is a limit for the growth since the first step."""
    num_samples: Size | None = None
    """Rollouts per task in the Stage 1 of new references, in place of values.num_samples; null for
    the same number."""

    @property
    def is_refreshed(self) -> bool:
        """Whether any rule makes new references."""
        return self.refresh_every_steps is not None or self.refresh_max_kl is not None

    def num_after_steps(self, max_steps: int) -> int:
        """New references that refresh_every_steps makes in so many steps; none after the last."""
        steps = self.refresh_every_steps
        return 0 if steps is None else max(max_steps - 1, 0) // steps

    @model_validator(mode="after")
    def _samples_are_of_something(self) -> ReferenceConfig:
        if self.num_samples is not None and not self.is_refreshed:
            raise ValueError(
                f"num_samples ({self.num_samples}) is for new references, and none are made; set "
                "refresh_every_steps or refresh_max_kl, or num_samples to null"
            )
        return self


class RolloutFilterConfig(Section):
    """Which tasks are trained on: those whose returns vary most, by their standard deviation
    (StarPO-S). Most algorithms filter the rollouts of each step. A*-PO filters all tasks by those
    of Stage 1, once for each reference.
    """

    strategy: FilterStrategy = "none"
    """`none` keeps all tasks. The tasks that vary most come first: `top_p` keeps them until they
    hold the share p of all deviations, `top_fraction` keeps the share p of them."""
    value: Annotated[float, Field(ge=0, le=1)] = 0.9
    """p."""
    zero_variance: ZeroVariance = "drop"
    """What happens to tasks whose returns are all equal: `drop` leaves them out before the share is
    taken."""


class EarlyStopConfig(Section):
    """When Stage 2 ends before training.max_steps; all rules are off by default. A rule stops the
    run when it has held in `patience` consecutive rows of metrics.jsonl.
    """

    patience: Count = 3
    """Consecutive rows; rows without the metric of a rule are skipped."""
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
    """Steps; each makes algorithm.num_epochs * num_minibatches updates, A*-PO makes one. More are
    possible when a run is resumed, also when it has ended."""
    max_tasks: Count | None = None
    """Training tasks of Stage 1 and Stage 2, drawn from the seed; null for the whole split."""
    tasks_per_step: Size = 64
    """Tasks per step, each rolled out once or algorithm.group_size times."""
    best_of: Size = 1
    """Episodes that are played in place of each one of a step; the one with the highest return is
    trained on (TSR). The chosen episode is not a sample of the policy: docs/search.md."""
    micro_batch_size: Size = 16
    """Contexts per forward pass, at most. It bounds memory and changes the result by rounding only.
    On a CPU contexts of different lengths go through in passes of their own, for less padding. A
    trajectory has one context with `full`, and up to one per turn with windows. One with more
    contexts than this is read in several passes, and each is made again for the gradient; with
    `machine.sharding: full` it is read in one."""
    num_rows: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=10_000)] = 128
    """Largest number of episodes that are played at the same time."""
    eval_every: Count | None = 10
    """Steps between two evaluations on eval_split; null for none."""
    eval_episodes: Size = 100
    """Episodes of such an evaluation."""
    eval_split: str | None = None
    """Tasks of these evaluations; null for those of evaluation.split. Of the split train, those
    that max_tasks leaves out of training come first."""
    keep_best: bool = False
    """The policy has the weights of the best of these evaluations, in place of the last step's:
    highest success, then average reward, then the latest. It may be the one before the first step,
    after distillation. eval_split must be another split than evaluation.split, such as train:
    success on the tasks by which weights were chosen is too high."""
    checkpoint_every: Count = 10
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep."""
    keep_episodes: CountOrZero = 4
    """Episodes of each step to keep in rollouts.jsonl, with the log-probabilities of their tokens:
    the best, the worst, and the first ones. `ragen-apo view` shows them; training never reads them.
    """
    shuffle_returns: bool = False
    """Control experiment: give each trajectory another one's return."""
    early_stop: EarlyStopConfig = EarlyStopConfig()

    @model_validator(mode="after")
    def _there_is_something_to_choose_by(self) -> TrainingConfig:
        if self.keep_best and self.eval_every is None:
            raise ValueError(
                "keep_best chooses among the evaluations during training, and eval_every is null; "
                "set it to the number of steps between two of them"
            )
        return self


class MonitorsConfig(Section):
    """Measurements in Stage 2 that take time and change nothing else (docs/metrics.md)."""

    every_steps: Count | None = 10
    """Measure in the first step and every so many steps after it; null for never."""
    num_thoughts: Annotated[int, BeforeValidator(whole_number), Field(ge=2, le=1000)] = 16
    """Tasks whose first thoughts are scored under each other's prompts; the cost grows with its
    square."""


class EvaluationConfig(Section):
    """The evaluation after training and of `ragen-apo evaluate`."""

    split: str = "test"
    """Tasks to play."""
    num_episodes: Size = 100
    """Tasks in the split's order, one episode each. If the split has fewer tasks, it is played
    again with other seeds. It is played only once if nothing is random (greedy play, deterministic
    environment)."""
    temperature: Annotated[NonNegative, AfterValidator(_greedy_or_large_enough)] = 0.0
    """Sampling temperature: 0, which is greedy, or at least 0.001."""
    pass_k: Size | None = None
    """Also play each task this often at sampling.temperature and give pass@k."""
    search: SearchConfig | None = None
    """Search over turns in the evaluation after training and in `evaluate`; null for none."""
