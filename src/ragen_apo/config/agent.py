"""The sections on the machine, the environment, the agent, its model and its warm start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ragen_apo.config.references import with_absolute_path, with_absolute_paths
from ragen_apo.config.section import (
    LARGEST_SIZE,
    Count,
    CountOrZero,
    LearningRate,
    Penalty,
    Section,
    Size,
    one_or_more,
    whole_number,
)


class MachineConfig(Section):
    """How the run uses the machine."""

    num_threads: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=4096)] | None = 2
    """CPU threads of torch; null for its own choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs; auto takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the policy's weights, and without mixed precision of all it computes."""
    mixed_precision: Literal["none", "bfloat16"] = "none"
    """Format of the matrix products (autocast); weights, sums and logits keep `dtype`."""
    gradient_checkpointing: bool = False
    """Compute each layer a second time for the backward pass instead of keeping what it computed:
    about a third more time, far less memory on long episodes."""


class EnvironmentConfig(Section):
    """The environment, by name; all further keys are its options and are checked by it."""

    model_config = ConfigDict(extra="allow")

    name: str = "shop"
    """Name of a built-in or installed environment, `path.py:function` or `module:function`; a
    relative path starts in the current directory and is kept as an absolute one."""

    @model_validator(mode="before")
    @classmethod
    def _paths_are_absolute(cls, values: Any) -> Any:
        """So that a run can be resumed, and evaluated, from another directory."""
        if not isinstance(values, Mapping) or not isinstance(values.get("name", ""), str):
            return values
        named = {"name": with_absolute_path(values["name"])} if "name" in values else {}
        return with_absolute_paths({**values, **named})

    @model_validator(mode="after")
    def _options_are_json_values(self) -> EnvironmentConfig:
        try:
            json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"options must be made of text, finite numbers, true, false, null, lists and "
                f"mappings: {error}"
            ) from error
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Every key of the section except `name`."""
        return dict(self.model_extra or {})


class ContextConfig(Section):
    """What the policy reads besides system prompt, first and present observation."""

    mode: Literal["full", "last_turns", "single_turn"] = "full"
    """`full`: every turn so far; `last_turns`: the last num_turns turns; `single_turn`: the actions
    of the last num_turns turns, one line each."""
    num_turns: Size | None = None
    """How many turns `last_turns` and `single_turn` look back; null for `full`."""

    @property
    def label(self) -> str:
        """Names the window among the conditions of stored values."""
        return self.mode if self.num_turns is None else f"{self.mode}-{self.num_turns}"

    @model_validator(mode="after")
    def _windows_have_a_length(self) -> ContextConfig:
        if self.mode == "full" and self.num_turns is not None:
            raise ValueError(
                f"mode full holds every turn, got num_turns = {self.num_turns}; remove it, or use "
                "mode last_turns or single_turn"
            )
        if self.mode != "full" and self.num_turns is None:
            raise ValueError(
                f"mode {self.mode} needs num_turns, how many turns it looks back, at least 1; got "
                "null"
            )
        return self


class AgentConfig(Section):
    """The boundary between policy and environment."""

    max_response_tokens: Size = 40
    """Sampled tokens per turn at most."""
    max_context_tokens: Size = 1024
    """Tokens of one context at most, prompt and response (`full`: of a whole episode); an episode
    that needs more is truncated, and so is a demonstration."""
    format_penalty: Penalty = -0.05
    """Reward of a response without readable `<think>` and `<answer>`."""
    invalid_action_penalty: Penalty = 0.0
    """Reward added when the environment could not execute the action."""
    system_prompt: str = "none"
    """`none`; `rules` (the environment's rules); `rules_and_format` (these, and the form of a
    response, which a model without a warm start has to be told); or the text itself."""
    context: ContextConfig = ContextConfig()

    @model_validator(mode="after")
    def _a_response_fits(self) -> AgentConfig:
        if self.max_response_tokens >= self.max_context_tokens:
            raise ValueError(
                f"max_response_tokens ({self.max_response_tokens}) must be less than "
                f"max_context_tokens ({self.max_context_tokens})"
            )
        return self


MAX_SMALL_WEIGHTS = 1_000_000_000


class SmallModelConfig(Section):
    """The model that is built on the spot when `policy.path` is null."""

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


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the weights; needs peft (`pip install peft`).

    Folders that a run writes hold the sum of both, rounded to run.dtype, and load like any model.
    """

    rank: Size = 16
    """Rank of the change that an adapter can make to its layer."""
    alpha: Count = 32
    """The change is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is left out in the warm start. Stage 2 has no dropout: it
    would sample from one policy and train another."""
    target_modules: Annotated[list[str], BeforeValidator(one_or_more)] = Field(default=[ALL_LINEAR])
    """Names of the linear layers that get an adapter, such as [q_proj, v_proj]; all-linear takes
    all but the vocabulary projection."""


class PolicyConfig(Section):
    """The language model that acts."""

    path: str | None = None
    """A Hugging Face model folder or hub name; null builds the small model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for models you trust. Counts when a run is
    started; later commands on the run ask for --trust-remote-code."""
    freeze_embeddings: bool = False
    """Leave token embeddings as they are in Stage 2, so that less can be learned by heart about
    single ids."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of a pretrained model; null trains all weights."""
    small: SmallModelConfig = SmallModelConfig()


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
    """Next-token accuracy on the repeats at which the curriculum ends."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate."""


class DemonstrationsConfig(Section):
    """Supervised training on a scripted teacher's episodes, or on those that people played."""

    teacher: str = "teacher"
    """Name of a scripted policy of the environment."""
    recordings: str | None = None
    """Take the episodes in this file or folder, recorded with `ragen-apo play --record`, in place
    of the teacher's: those of training tasks of this environment in this version, each once."""
    num_episodes_per_task: Size = 3
    """Demonstrations per training task."""
    relabel: Literal["none", "numbers", "copied"] = "none"
    """Renames tokens at random, each in the same way throughout a demonstration, so that the model
    must copy them and cannot know them by heart. `numbers`: all numbers, where they are names;
    `copied`: all tokens but those of fixed phrases, which most demonstrations have (see
    `relabel_spares`) or which the teacher says without having read them."""
    relabel_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the demonstrations that are relabelled; the others stay as they are."""
    relabel_spares: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With `copied`: tokens that this share of the demonstrations have keep their meaning. The
    smaller it is, the less has to be copied and the more can be known."""
    num_steps: CountOrZero = 250
    """Optimizer steps; 0 leaves it out."""
    batch_size: Size = 64
    """Episodes per step."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate."""


class WarmStartConfig(Section):
    """What makes a reference policy out of an untrained model."""

    enabled: bool = True
    """`false`: the policy as it is becomes the reference."""
    checkpoint_every: Count = 100
    """Optimizer steps between two checkpoints."""
    copy_curriculum: CopyConfig = Field(default=CopyConfig(), alias="copy")
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
