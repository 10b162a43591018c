"""What makes a reference policy out of a model: copying, then demonstrations."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ragen_apo.choices import Relabel
from ragen_apo.config.section import (
    LARGEST_SIZE,
    Count,
    CountOrZero,
    LearningRate,
    PathText,
    Section,
    Size,
    whole_number,
)


class CopyConfig(Section):
    """The copy curriculum: tiled random segments, until copying is learned."""

    max_steps: CountOrZero = 1500
    """Optimizer steps at most; 0 leaves it out."""
    batch_size: Size = 32
    """Sequences per step."""
    sequence_length: Annotated[int, BeforeValidator(whole_number), Field(ge=8, le=LARGEST_SIZE)] = (
        96
    )
    """Tokens per sequence."""
    target_accuracy: Annotated[float, Field(gt=0, le=1)] = 0.97
    """Next-token accuracy on the repeats at which the curriculum ends. The first token of a repeat
    can only be guessed: with a sequence_length below 44, 0.97 is reached by luck or not at all."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate, reached after 20 steps."""


class DemonstrationsConfig(Section):
    """Supervised training on a scripted teacher's episodes, or on those that people played."""

    teacher: str = "teacher"
    """Name of a scripted policy of the environment."""
    recordings: PathText | None = None
    """Use the episodes in this file or folder, recorded with `ragen-apo play --record`, in place of
    the teacher's. Each one of a training task of this environment in this version is used once."""
    num_episodes_per_task: Size = 3
    """Demonstrations per training task."""
    relabel: Relabel = "none"
    """Renames tokens at random, each in the same way throughout a demonstration. So the model must
    copy them and cannot know them by heart. `numbers`: all numbers, for environments where numbers
    are names. `copied`: all tokens except those of fixed phrases. These are phrases that most
    demonstrations have (see `relabel_spares`) or that the teacher says without having read them."""
    relabel_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the demonstrations that are relabelled; the others stay as they are."""
    relabel_spares: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With `copied`: a token that occurs in at least this share of the demonstrations is not
    renamed. A smaller share renames fewer tokens, so the model copies less and remembers more."""
    num_steps: CountOrZero = 250
    """Optimizer steps; 0 leaves it out."""
    batch_size: Size = 64
    """Episodes per step."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate, reached after 20 steps."""


class WarmStartConfig(Section):
    """What makes a reference policy out of an untrained model."""

    enabled: bool = True
    """`false`: the policy as it is becomes the reference."""
    checkpoint_every: Count = 100
    """Optimizer steps between two checkpoints."""
    copy_curriculum: CopyConfig = Field(default=CopyConfig(), alias="copy")
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
