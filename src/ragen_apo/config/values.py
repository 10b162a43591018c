"""Stage 1: how the values of tasks under the reference are estimated."""

from __future__ import annotations

from pydantic import model_validator

from ragen_apo.choices import Baseline
from ragen_apo.config.section import NonNegative, Section, Size


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
    store: str | None = None
    """Take V* from this existing value store instead of sampling the reference."""
    baseline: Baseline = "v_star"
    """What A*-PO subtracts from the return; mean and zero are ablations."""

    @model_validator(mode="after")
    def _the_first_round_fits(self) -> ValuesConfig:
        if self.adaptive and self.max_samples < self.num_samples:
            raise ValueError(
                f"max_samples ({self.max_samples}) must be at least num_samples "
                f"({self.num_samples}) if adaptive is true"
            )
        return self
