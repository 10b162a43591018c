"""What the trainer asks of an algorithm in a step.

sampling  around the rollouts: the weights that play them, or beside the updates: `sampler`
keeps     which of them can teach something
prepare   once a step, from all rollouts: advantages, values; no gradient
loss      for each micro-batch of each pass
update    after each of the policy's updates: what the algorithm trains besides (a critic)
metrics   what it reports beyond `StepMetrics.metrics`

An algorithm's file has its configuration too, which commands read without torch. So it imports
torch, and whatever needs torch, inside its methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

from ragen_apo.training.named_tensors import check_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ragen_apo.policy.language_model import LanguageModel
    from ragen_apo.policy.scoring import TokenScores
    from ragen_apo.training.rollouts import MicroBatch, Rollouts
    from ragen_apo.training.step_metrics import LossPart, StepMetrics

Targets = TypeVar("Targets")
"""What `prepare` hands to `loss`: an algorithm's own frozen record of tensors over the step."""


class Algorithm(ABC, Generic[Targets]):
    """What is maximised, and how often each step's rollouts are used: here one pass, one update."""

    num_epochs: int = 1
    """Passes over the rollouts of a step."""
    num_minibatches: int = 1
    """Updates of a pass."""
    entropy_gradients: bool = False
    """Whether the loss differentiates the entropy; if not, only the first pass has it."""
    has_ratio: bool = False
    """Whether the loss divides by the probabilities of the policy that sampled."""
    uses_reference: bool = True
    """Whether anything but a metric needs what the reference says of the rollouts."""

    @property
    def other_models(self) -> Sequence[nn.Module]:
        """What is trained besides the policy: `loss` reaches it, `update` updates it."""
        return ()

    def sampling(self) -> AbstractContextManager[None]:
        """Inside, the policy has the weights that play the rollouts of a step: here its own.

        May be entered more than once in a step.
        """
        return nullcontext()

    def sampler(self) -> LanguageModel | None:
        """What `sampling` puts in the policy's place, as a model of its own.

        None if what samples changes every step. The model shares its tensors with what `sampling`
        puts in, so it must not play while anyone is inside `sampling`.
        """
        return None

    def num_steps_of_sampler(self) -> int:
        """At the start of a step: how many steps, this one first, have rollouts of one sampler.

        Surely, whatever the updates will be.
        """
        return 1

    def keeps(self, rollouts: Rollouts) -> Tensor:
        """Which episodes [B] can teach something, from all of the step; the others are dropped."""
        import torch

        return torch.ones_like(rollouts.group_B, dtype=torch.bool)

    @abstractmethod
    def prepare(self, rollouts: Rollouts) -> Targets:
        """Everything that has to be known of the whole batch before the first update."""

    @abstractmethod
    def loss(self, targets: Targets, micro: MicroBatch, scores: TokenScores) -> LossPart:
        """The part of a minibatch's loss that these episodes contribute."""

    def update(self, *, rate_scale: float) -> dict[str, float]:
        """Updates what is trained besides the policy, at `rate_scale` times its learning rate.

        Returns metrics of this update.
        """
        return {}

    def metrics(
        self, rollouts: Rollouts, targets: Targets, collected: StepMetrics
    ) -> dict[str, float]:
        """The algorithm's own monitors, after the last update of a step."""
        return {}

    def state_tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint has to keep besides policy and moments; no copies are needed."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; raises ValueError for any others."""
        check_tensors(tensors, {})
