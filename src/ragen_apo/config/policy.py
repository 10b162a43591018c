"""The language model that acts, small or pretrained, and its adapters."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ragen_apo.config.section import (
    LARGEST_SIZE,
    Count,
    PathText,
    Section,
    Size,
    one_or_more,
    whole_number,
)

MAX_SMALL_WEIGHTS = 1_000_000_000
ALL_LINEAR = "all-linear"
ADAPTER_SETTINGS = "adapter_config.json"
"""The file of peft by which transformers, too, finds adapters in a folder."""

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class SmallModelConfig(Section):
    """The small model with random weights that is built when `policy.path` is null."""

    vocab_size: Annotated[int, BeforeValidator(whole_number), Field(ge=300, le=LARGEST_SIZE)] = 1536
    """Entries of the BPE tokenizer: 256 bytes, special tokens and merges."""
    hidden_size: Size = 128
    """Width of the residual stream."""
    num_layers: Size = 3
    """Decoder layers."""
    num_heads: Size = 4
    """Attention heads; hidden_size / num_heads must be even."""
    intermediate_size: Size = 384
    """Width of the feed-forward layers."""
    max_position: Size = 2048
    """Longest sequence in tokens."""

    @property
    def num_weights(self) -> int:
        """About how many numbers the model has: its matrices, without biases and norms."""
        layer = self.hidden_size * (4 * self.hidden_size + 3 * self.intermediate_size)
        return self.vocab_size * self.hidden_size + self.num_layers * layer

    @model_validator(mode="after")
    def _it_is_small(self) -> SmallModelConfig:
        if self.num_weights > MAX_SMALL_WEIGHTS:
            raise ValueError(
                "vocab_size, hidden_size, intermediate_size and num_layers give a model of "
                f"{self.num_weights:,} weights, expected at most {MAX_SMALL_WEIGHTS:,}; lower "
                "them, or name a pretrained model in policy.path"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> SmallModelConfig:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of 2 * num_heads "
                f"({2 * self.num_heads}): rotary positions need an even width per head"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the weights; needs peft (`pip install peft`).

    Model folders that a run writes contain the model with its adapters merged in, rounded to
    machine.dtype. They load like any model. The folder `adapter` has only the adapters, as peft
    writes them.
    """

    rank: Size = 16
    """Rank of the change that an adapter can make to its layer."""
    alpha: Count = 32
    """The change is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped in the warm start. Distillation and Stage 2 have
    no dropout: they would sample from one policy and train another."""
    target_modules: Annotated[list[str], BeforeValidator(one_or_more), Field(min_length=1)] = Field(
        default=[ALL_LINEAR]
    )
    """Names of the linear layers that get an adapter, such as [q_proj, v_proj]. all-linear means
    all except the vocabulary projection."""


class PolicyConfig(Section):
    """The language model that acts."""

    path: PathText | None = None
    """A Hugging Face model folder or hub name; null builds the small model."""
    revision: str | None = None
    """A branch, tag or commit of a model on the hub; null: the newest. A run keeps the commit that
    it was started with."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for models you trust. It applies when a run
    is started; later commands on the run need --trust-remote-code."""
    freeze_embeddings: bool = False
    """Do not train token embeddings in Stage 2, so the model memorises less about single ids. For a
    model in `path` this also holds in the warm start."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of a pretrained model; null trains all weights."""
    small: SmallModelConfig = SmallModelConfig()

    @field_validator("path")
    @classmethod
    def _a_folder_stays_where_it_is(cls, path: str | None) -> str | None:
        """Absolute: from another directory `models/mine` could be a name at the hub."""
        return os.path.abspath(path) if path and Path(path).is_dir() else path

    @model_validator(mode="after")
    def _a_revision_is_of_a_model(self) -> PolicyConfig:
        if self.revision is not None and self.path is None:
            raise ValueError(
                f"revision is {self.revision!r} and path is null, so the small model is built; set "
                "path to the name of a model at the hub, or revision to null"
            )
        return self


def is_hub_name(path: object) -> bool:
    """Whether a model is named as at the Hugging Face hub, such as Qwen/Qwen3-0.6B or gpt2.

    A folder of that name comes first, so what exists is none.
    """
    return isinstance(path, str) and bool(_HUB_NAME.fullmatch(path)) and not Path(path).exists()
