"""The configuration of a run: pydantic models, read from YAML, written back fully resolved.

`load_config` takes a YAML file and command-line overrides and gives a `RunConfig`; `resolved_yaml`
is its inverse and is what a run directory keeps. Unknown keys, wrong types and values out of range
are refused together in one ConfigError. `python -m ragen_apo.config` prints docs/configuration.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ragen_apo.config_messages import Key, describe_problem, keys_of, reference_page, shown
from ragen_apo.config_overrides import merge, parse_overrides
from ragen_apo.config_yaml import dump_yaml, parse_yaml
from ragen_apo.errors import ConfigError


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_whole_number), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_whole_number), Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Penalty = Annotated[float, Field(le=0)]


class Section(BaseModel):
    """A part of the configuration; immutable, finite numbers only, no conversion between types.

    The docstring of a field is its line in docs/configuration.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section_means_defaults(cls, values: Any) -> Any:
        return {} if values is None else values


class MachineConfig(Section):
    """How the run uses the machine."""

    num_threads: Count | None = 2
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
    """Name of a built-in or installed environment."""

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
    num_turns: Count | None = None
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

    max_response_tokens: Count = 40
    """Sampled tokens per turn at most."""
    max_context_tokens: Count = 1024
    """Tokens of one context at most, prompt and response (`full`: of a whole episode); an episode
    that needs more is truncated."""
    format_penalty: Penalty = -0.05
    """Reward of a response without readable `<think>` and `<answer>`."""
    invalid_action_penalty: Penalty = 0.0
    """Reward added when the environment could not execute the action."""
    system_prompt: str = "none"
    """`none`, `rules` (the environment's rules) or the text itself."""
    context: ContextConfig = ContextConfig()

    @model_validator(mode="after")
    def _a_response_fits(self) -> AgentConfig:
        if self.max_response_tokens >= self.max_context_tokens:
            raise ValueError(
                f"max_response_tokens ({self.max_response_tokens}) must be less than "
                f"max_context_tokens ({self.max_context_tokens})"
            )
        return self


class SmallModelConfig(Section):
    """The model that is built on the spot when `policy.path` is null."""

    vocab_size: Annotated[int, BeforeValidator(_whole_number), Field(ge=300)] = 1536
    """Entries of the BPE tokenizer: 256 bytes, special tokens and merges."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    num_layers: Count = 3
    """Decoder layers."""
    num_heads: Count = 4
    """Attention heads; hidden_size / num_heads must be even."""
    intermediate_size: Count = 384
    """Width of the feed-forward layers."""
    max_position: Count = 2048
    """Longest sequence in tokens."""

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
    """Low-rank adapters, trained in place of the weights; needs `pip install ragen-apo[lora]`.

    Folders that a run writes hold the sum of both, rounded to run.dtype, and load like any model.
    """

    rank: Count = 16
    """Rank of the change that an adapter can make to its layer."""
    alpha: Count = 32
    """The change is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is left out in the warm start. Stage 2 has no dropout: it
    would sample from one policy and train another."""
    target_modules: Annotated[list[str], BeforeValidator(_one_or_more)] = [ALL_LINEAR]
    """Names of the linear layers that get an adapter, such as [q_proj, v_proj]; all-linear takes
    all but the vocabulary projection."""


class PolicyConfig(Section):
    """The language model that acts."""

    path: str | None = None
    """A Hugging Face model folder or hub name; null builds the small model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; only for models you trust."""
    freeze_embeddings: bool = False
    """Leave token embeddings as they are in Stage 2: less is learned about one id that does not
    hold for all of them."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of a pretrained model; null trains all weights."""
    small: SmallModelConfig = SmallModelConfig()


class CopyConfig(Section):
    """The copy curriculum: tiled random segments, until copying is learned."""

    max_steps: CountOrZero = 1500
    """Optimizer steps at most; 0 leaves it out."""
    batch_size: Count = 32
    """Sequences per step."""
    sequence_length: Annotated[int, BeforeValidator(_whole_number), Field(ge=8)] = 96
    """Tokens per sequence."""
    target_accuracy: Annotated[float, Field(gt=0, le=1)] = 0.97
    """Next-token accuracy on the repeats at which the curriculum ends."""
    learning_rate: Positive = 1e-3
    """Peak learning rate."""


class DemonstrationsConfig(Section):
    """Supervised training on a scripted teacher's episodes, or on those that people played."""

    teacher: str = "teacher"
    """Name of a scripted policy of the environment."""
    recordings: str | None = None
    """Take the episodes in this file or folder, recorded with `ragen-apo play --record`, in place
    of the teacher's: those of training tasks of this environment in this version, each once."""
    num_episodes_per_task: Count = 3
    """Demonstrations per training task."""
    relabel_numbers: bool = False
    """Give the numbers of each demonstration other values, the same one for the same number, so
    that ids are copied and not learned by heart; for environments whose numbers are names."""
    num_steps: CountOrZero = 250
    """Optimizer steps; 0 leaves it out."""
    batch_size: Count = 64
    """Episodes per step."""
    learning_rate: Positive = 1e-3
    """Peak learning rate."""


class WarmStartConfig(Section):
    """What makes a reference policy out of an untrained model."""

    enabled: bool = True
    """`false`: the policy as it is becomes the reference."""
    checkpoint_every: Count = 100
    """Optimizer steps between two checkpoints."""
    copy_curriculum: CopyConfig = Field(default=CopyConfig(), alias="copy")
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()


class ReferenceRefreshConfig(Section):
    """When the policy becomes the new reference and V* is estimated again."""

    every_steps: Count | None = None
    """After this many steps; null for never."""
    max_kl: Positive | None = None
    """When the mean KL per trajectory passes this; null for never."""


class ReplayConfig(Section):
    """Trajectories of earlier steps that `algorithm: apo` trains on again; only with beta1 = beta2
    and in a deterministic environment.
    """

    num_trajectories_per_step: CountOrZero = 0
    """Stored trajectories that a step trains on beside its own; 0 for none."""
    capacity: Count = 1024
    """Newest trajectories to keep, of the present reference only."""

    @model_validator(mode="after")
    def _there_is_room(self) -> ReplayConfig:
        if self.num_trajectories_per_step > self.capacity:
            raise ValueError(
                f"num_trajectories_per_step ({self.num_trajectories_per_step}) must be at most "
                f"capacity ({self.capacity})"
            )
        return self


APO_ALIASES: Mapping[str, tuple[str, ...]] = {
    "beta": ("beta1", "beta2"),
    "v_star_samples": ("num_value_samples",),
}
"""Other names of keys in `apo`: `beta` sets both temperatures at once."""


def _replace_aliases(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    replaced = dict(values)
    for alias, names in APO_ALIASES.items():
        if alias not in replaced:
            continue
        clashes = [name for name in names if name in replaced]
        if clashes:
            raise ValueError(
                f"{alias} is another name of {' and '.join(names)}; "
                f"remove {alias} or {' and '.join(clashes)}"
            )
        value = replaced.pop(alias)
        replaced.update(dict.fromkeys(names, value))
    return replaced


class ApoConfig(Section):
    """A*-PO (Stage 1 and Stage 2) and, for every algorithm, sampling, optimizer and reference;
    `beta` sets beta1 and beta2.
    """

    beta1: NonNegative = 0.5
    """Temperature of V* in Stage 1; 0 takes the best return of a task."""
    beta2: Positive = 0.05
    """Weight of the log ratio to the reference in Stage 2."""
    num_value_samples: Count = 4
    """Reference rollouts per task in Stage 1; also called v_star_samples."""
    adaptive_vstar: bool = False
    """Double the rollouts of tasks without a success, up to max_value_samples."""
    max_value_samples: Count = 16
    """Rollouts per task at most, if adaptive."""
    value_store: str | None = None
    """Take V* from this existing value store instead of sampling the reference."""
    value_baseline: Literal["v_star", "mean", "zero"] = "v_star"
    """What is subtracted from the return; mean and zero are ablations."""
    loss: Literal["regression", "weighted"] = "regression"
    """The squared residual, or the log-likelihood weighted with the detached residual."""
    length_normalization: Literal["none", "tokens"] = "none"
    """`tokens` divides the log ratio by the sampled tokens: another algorithm."""
    advantage_clamp: Positive | None = None
    """Limit of the residual on both sides; a Huber tail in the regression form."""
    kl_coefficient: NonNegative = 0.0
    """Weight of an added KL penalty; adds to beta2 what pulls towards the reference."""
    temperature: Positive = 1.0
    """Sampling temperature of Stage 1 and Stage 2."""
    shuffle_returns: bool = False
    """Control experiment: give each trajectory another one's return."""
    learning_rate: Positive = 3e-4
    """Peak learning rate of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping, on the loss divided by 2 beta2."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, down to 0 at training.max_steps."""
    reference_refresh: ReferenceRefreshConfig = ReferenceRefreshConfig()
    replay: ReplayConfig = ReplayConfig()

    @model_validator(mode="before")
    @classmethod
    def _accept_aliases(cls, values: Any) -> Any:
        return _replace_aliases(values)

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> ApoConfig:
        if self.adaptive_vstar and self.max_value_samples < self.num_value_samples:
            raise ValueError(
                f"max_value_samples ({self.max_value_samples}) must be at least "
                f"num_value_samples ({self.num_value_samples}) if adaptive_vstar is true"
            )
        refresh = self.reference_refresh
        if self.value_store is not None and (refresh.every_steps or refresh.max_kl):
            raise ValueError(
                "value_store holds values of one reference and reference_refresh makes new ones; "
                "remove one of the two"
            )
        return self


AlgorithmName = Literal[
    "apo",
    "apo_turn",
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "brpo",
    "gigpo",
]
VALUE_ALGORITHMS = ("apo", "apo_turn")
"""Those that subtract V*: they sample the reference in Stage 1 and roll each task out once."""
GROUP_ALGORITHMS = ("grpo", "dr_grpo", "rloo", "gigpo")
"""Those that compare several rollouts of one task."""
DEFAULT_GROUP_SIZE = 8


class TurnLevelConfig(Section):
    """What only `algorithm: apo_turn` reads: A*-PO on the turns between states of known value."""

    trace: Annotated[float, Field(ge=0, le=1)] = 0.9
    """lambda: 0 trusts the values of states, 1 only what was earned after them."""
    min_visits: Count = 2
    """Reference episodes that must have passed a state before its value is used."""


class PolicyGradientConfig(Section):
    """What all algorithms but `apo` and `apo_turn` share: rollouts, clipping, KL, entropy."""

    group_size: Count | None = None
    """Rollouts per task; null for 8 where rollouts of a task are compared (grpo, dr_grpo, rloo,
    gigpo) and for 1 elsewhere."""
    num_epochs: Count = 1
    """Passes over the rollouts of a step."""
    num_minibatches: Count = 1
    """Updates of a pass."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far below 1 a token's ratio still has a gradient; 1 for no limit."""
    clip_high: NonNegative = 0.2
    """How far above 1; 0.28 is clip-higher (DAPO)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest loss of a token with a negative advantage, in advantages; null for no limit."""
    aggregation: (
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
        | None
    ) = None
    """How token losses become one number; null for what the algorithm's paper does."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty stands: added to the loss, or subtracted from the rewards of tokens."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL penalty to the reference."""
    kl_estimator: Literal["k1", "k2", "k3", "low_variance", "absolute"] | None = None
    """Estimate of a token's KL; null for the one with the right gradient: k2 in the loss, k1 in the
    reward."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""


class PpoConfig(Section):
    """What only `algorithm: ppo` reads: the critic and its advantages."""

    critic_learning_rate: Positive = 1e-3
    """Peak learning rate of the critic; follows apo.warmup_steps and apo.schedule."""
    critic_warmup_steps: CountOrZero = 0
    """First steps, in which only the critic is trained."""
    value_clip: Positive | None = 0.2
    """How far a value may move from that at the start of the step; null for no limit."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount from token to token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda from token to token."""
    bi_level_gae: bool = False
    """GAE over turns first, then within each turn."""
    gamma_turn: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount from turn to turn, if bi-level."""
    lambda_turn: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda from turn to turn, if bi-level."""
    whiten_advantages: bool = True
    """Bring the advantages of a step to mean 0 and standard deviation 1."""


class GigpoConfig(Section):
    """What only `algorithm: gigpo` reads: advantages of turns within anchor states."""

    omega: NonNegative = 1.0
    """Weight of the turn's advantage beside the episode's."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount from turn to turn in what a turn is compared by."""
    scale: Literal["std", "none"] = "std"
    """Divide deviations from a group's mean by its standard deviation, or not."""


class RolloutFilterConfig(Section):
    """Which tasks of a step are trained on, by a score of their rollouts (StarPO-S)."""

    strategy: Literal["none", "top_p", "top_p_softmax", "top_k", "top_fraction", "min_p"] = "none"
    """`none` keeps all; best tasks first until they hold the share p of all scores (top_p), the k
    best, the share p of the tasks, or those that have p times the best score (min_p)."""
    value: Annotated[float, Field(ge=0)] = 0.9
    """p, or k for top_k."""
    score: Literal["return", "entropy", "length"] = "return"
    """What is scored: returns, mean -log pi of the sampled tokens, or their number."""
    statistic: Literal["std", "variance", "mean"] = "std"
    """How the rollouts of a task give one score."""
    order: Literal["largest", "smallest"] = "largest"
    """Which scores are best."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """What happens to tasks whose returns are all equal."""

    @model_validator(mode="after")
    def _value_fits_the_strategy(self) -> RolloutFilterConfig:
        if self.strategy == "top_k":
            if self.value < 1 or not self.value.is_integer():
                raise ValueError(f"value of top_k must be a whole number >= 1, got {self.value:g}")
        elif self.value > 1:
            raise ValueError(f"value must be at most 1 except for top_k, got {self.value:g}")
        may_be_negative = self.score == "return" and self.statistic == "mean"
        if may_be_negative and self.strategy in ("top_p", "min_p"):
            raise ValueError(
                f"{self.strategy} takes shares of scores, and mean returns may be negative; use "
                "top_p_softmax, top_k or top_fraction"
            )
        return self


class RewardNormalizationConfig(Section):
    """What is done to returns before advantages are formed; not for `apo` and `apo_turn`."""

    method: Literal["identity", "mean", "mean_std", "asym_clip"] = "identity"
    """Subtract the mean; also divide by the standard deviation; also clamp to [-1, 3]. A changed
    return is paid at the end of the episode."""
    grouping: Literal["state", "batch", "environment"] = "batch"
    """Whose statistics: rollouts of the same task, of the step, or of the same environment."""


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
    tasks_per_step: Count = 64
    """Tasks per step, each rolled out once or policy_gradient.group_size times."""
    micro_batch_size: Count = 16
    """Contexts per forward pass; bounds memory, does not change the result. Those of one trajectory
    (one in `full`, up to one a turn in windows) stay together, even if they are more."""
    num_rows: Count = 128
    """Episodes that are played side by side at most."""
    eval_every: Count | None = 10
    """Steps between two evaluations on evaluation.split; null for none."""
    eval_episodes: Count = 100
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
    num_thoughts: Annotated[int, BeforeValidator(_whole_number), Field(ge=2)] = 16
    """Tasks whose first thoughts are scored under each other's prompts; costs its square."""
    gradient_buckets: bool = False
    """Also measure the gradient's norm by the variance of returns; costs a pass of gradients."""


class EvaluationConfig(Section):
    """The evaluation after training and of `ragen-apo evaluate`."""

    split: str = "test"
    """Tasks to play."""
    num_episodes: Count = 100
    """Episodes; one per task, in the split's order."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    pass_k: Count | None = None
    """Also play each task this often at apo.temperature and give pass@k."""


class RunConfig(Section):
    """Everything that a run depends on."""

    seed: CountOrZero = 0
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
        why = f"algorithm {self.algorithm} rolls each task out once"
        if not self.needs_values:
            why += " with policy_gradient.group_size = 1"
        if one_each and self.algorithm in GROUP_ALGORITHMS:
            raise ValueError(
                f"algorithm {self.algorithm} compares rollouts of one task; "
                "policy_gradient.group_size must be at least 2, got 1"
            )
        chosen = self.rollout_filter
        reads_variance = chosen.zero_variance == "drop" or chosen.statistic != "mean"
        if one_each and chosen.strategy != "none" and reads_variance:
            raise ValueError(
                f"rollout_filter needs several rollouts of a task to see variance, and {why}; "
                "use statistic mean with zero_variance keep, or a group algorithm"
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
    def _adapters_have_something_to_adapt(self) -> RunConfig:
        if self.policy.lora is not None and self.policy.path is None:
            raise ValueError(
                "policy.lora adapts a pretrained model and policy.path names none; set policy.path "
                "to a model folder or hub name, or policy.lora to null"
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


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a YAML file, changed by overrides `--apo.beta2 0.05` or `--seed=3`.

    Raises ConfigError with everything that is wrong, in the file and in the overrides.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration {path}. Give the path of a YAML file; "
            "examples are in the folder configs/."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} cannot be read as text: {error}") from error
    return parse_config(text, source=str(path), overrides=overrides)


def parse_config(text: str, *, source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Like `load_config` with the YAML itself; `source` names it in messages."""
    try:
        values, problems = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds {shown(values)}, expected a mapping of sections such as "
            "`apo: {beta2: 0.05}`"
        )
    keys = _known_keys()
    changes, override_problems = parse_overrides(overrides, keys=keys, open_section="environment")
    problems += override_problems
    layers = [_without_aliases(layer, problems) for layer in (values, changes)]
    try:
        config = RunConfig.model_validate(merge(*layers))
    except ValidationError as error:
        problems += [describe_problem(detail, keys) for detail in error.errors()]
    else:
        if not problems:
            return config
    raise ConfigError(
        f"{source} cannot be used:\n"
        + "\n".join(f"  - {problem}" for problem in problems)
        + "\nEvery key, its default and its range: docs/configuration.md."
    )


def resolved_yaml(config: RunConfig) -> str:
    """YAML with every key, defaults included, that loads back to an equal configuration."""
    return dump_yaml(config.model_dump(by_alias=True))


def _known_keys() -> dict[str, Key]:
    """Every key written with dots, other names included."""
    keys = {key.path: key for key in keys_of(RunConfig)}
    for alias, names in APO_ALIASES.items():
        keys[f"apo.{alias}"] = Key(f"apo.{alias}", keys[f"apo.{names[-1]}"].field)
    return keys


def _without_aliases(layer: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Aliases replaced within one source, so that the next source overrides the keys they set."""
    if "apo" not in layer:
        return layer
    try:
        return {**layer, "apo": _replace_aliases(layer["apo"])}
    except ValueError as error:
        problems.append(f"apo: {error}")
        apo = {key: value for key, value in layer["apo"].items() if key not in APO_ALIASES}
        return {**layer, "apo": apo}


if __name__ == "__main__":
    sys.stdout.write(reference_page({key.path: key for key in keys_of(RunConfig)}))
