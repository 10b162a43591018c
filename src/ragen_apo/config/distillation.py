"""Between Stage 1 and Stage 2: imitating what the reference did well."""

from __future__ import annotations

from pydantic import model_validator

from ragen_apo.choices import Credit, Relabel
from ragen_apo.config.section import Count, LearningRate, NonNegative, Section, Size


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
