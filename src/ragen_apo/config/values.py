"""Stage 1: how values under the reference are estimated, and what is imitated of its episodes."""

from __future__ import annotations

from pydantic import model_validator

from ragen_apo.choices import Baseline, Credit, Relabel, ValueEstimator
from ragen_apo.config.section import Count, LearningRate, NonNegative, PathText, Section, Size


class ValuesConfig(Section):
    """Stage 1: V* of each task from rollouts of the frozen reference. Part of a run with A*-PO or
    distillation; `estimate-values` samples it for any run, and a search by values reads it.
    """

    beta1: NonNegative = 0.5
    """Temperature of V*; 0 takes the best return of a task."""
    num_samples: Size = 4
    """Rollouts of the reference per task."""
    adaptive: bool = False
    """Double the rollouts of tasks with few or no successes, up to max_samples."""
    max_samples: Size = 16
    """Rollouts per task at most, if adaptive."""
    store: PathText | None = None
    """Take V* from this existing value store instead of sampling the reference."""
    estimator: ValueEstimator = "samples"
    """V* of a task or state from its own samples; or by regression on the reference's hidden states
    over all samples, which needs fewer of them and, with apo_turn, gives every turn a value."""
    baseline: Baseline = "v_star"
    """What A*-PO subtracts from the return. mean and zero are ablations; they sample Stage 1 as
    well."""

    @model_validator(mode="after")
    def _the_first_round_fits(self) -> ValuesConfig:
        if self.adaptive and self.max_samples < self.num_samples:
            raise ValueError(
                f"max_samples ({self.max_samples}) must be at least num_samples "
                f"({self.num_samples}) if adaptive is true"
            )
        return self

    @model_validator(mode="after")
    def _a_regression_has_something_to_predict(self) -> ValuesConfig:
        if self.estimator == "regression" and self.baseline == "zero":
            raise ValueError("estimator is regression, and baseline zero subtracts nothing")
        if self.estimator == "regression" and self.baseline == "v_star" and self.beta1 == 0:
            raise ValueError(
                "estimator regression predicts exp(R / beta1), and beta1 is 0; set it above 0, or "
                "estimator to samples"
            )
        return self


class DistillationConfig(Section):
    """Before its first step, and at every new reference, the policy imitates the reference's
    episodes of Stage 1, each weighted by pi*/pi_ref. This distils pi*. Any algorithm can follow. In
    a stochastic environment lucky episodes are imitated as well.
    """

    enabled: bool = False
    """Stage 1 then samples the reference for every algorithm."""
    beta: NonNegative = 0.2
    """Temperature of pi*, independent of values.beta1; 0 imitates only the best episodes of a task.
    """
    credit: Credit = "episode"
    """What gets a weight: the episode, or each of its segments between states of known V*."""
    relabel: Relabel = "none"
    """As warm_start.demonstrations.relabel, with its relabel_spares."""
    num_epochs: Count = 3
    """Passes over the remaining episodes. Their number determines the number of updates."""
    batch_size: Size = 16
    """Episodes per update."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate, reached after 3 updates, then falling linearly to 0."""

    @model_validator(mode="after")
    def _turns_have_a_temperature(self) -> DistillationConfig:
        if self.credit == "turn" and self.beta == 0:
            raise ValueError("credit turn divides by beta, which is 0; set beta above 0")
        return self
