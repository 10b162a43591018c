"""The sections on A*-PO and its rivals: objectives, advantages, filters, normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ragen_apo.config.section import (
    LARGEST,
    Count,
    CountOrZero,
    LearningRate,
    NonNegative,
    Positive,
    Section,
    Size,
    SizeOrZero,
)


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

    num_trajectories_per_step: SizeOrZero = 0
    """Stored trajectories that a step trains on beside its own; 0 for none."""
    capacity: Size = 1024
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


def replace_aliases(values: Any) -> Any:
    """The keys that aliases such as `beta` stand for; ValueError where both are given."""
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
    num_value_samples: Size = 4
    """Reference rollouts per task in Stage 1; also called v_star_samples."""
    adaptive_vstar: bool = False
    """Double the rollouts of tasks with few or no successes, up to max_value_samples."""
    max_value_samples: Size = 16
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
    center_residuals: bool = False
    """Subtract from each residual the mean of the step's other trajectories, before the clamp. The
    expected gradient stays the same, except with length_normalization `tokens`. Needs two tasks a
    step."""
    kl_coefficient: NonNegative = 0.0
    """Weight of an added KL penalty; acts as if beta2 were larger by it."""
    temperature: Positive = 1.0
    """Sampling temperature of Stage 1 and Stage 2."""
    shuffle_returns: bool = False
    """Control experiment: give each trajectory another one's return."""
    learning_rate: LearningRate = 3e-4
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
        return replace_aliases(values)

    @model_validator(mode="after")
    def _replay_is_not_centered(self) -> ApoConfig:
        if self.center_residuals and self.replay.num_trajectories_per_step > 0:
            raise ValueError(
                "center_residuals is right for the policy's own episodes only; set it to false or "
                "replay.num_trajectories_per_step to 0"
            )
        return self

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


@dataclass(frozen=True)
class AlgorithmTraits:
    """What a reader of a run has to know of its algorithm."""

    name: str
    """As it stands in tables and titles."""
    sentence: str
    """What it does; begins with its name."""
    advantage: str
    """What it gives an episode, a turn or a token for its outcome."""
    has_values: bool = False
    """It subtracts V*: it samples the reference in Stage 1 and plays each task once a step."""
    has_critic: bool = False
    """It learns a second model that predicts returns."""
    compares_groups: bool = False
    """It compares several rollouts of one task."""


ALGORITHMS: Mapping[AlgorithmName, AlgorithmTraits] = {
    "apo": AlgorithmTraits(
        name="A*-PO",
        sentence="A*-PO trains the agent with one rollout per task and step, without a critic",
        advantage="R − V*: the return minus the optimal value of the task",
        has_values=True,
    ),
    "apo_turn": AlgorithmTraits(
        name="A*-PO by turn",
        sentence="A*-PO by turn credits each turn by the change in V*, without a critic",
        advantage="Per segment: reward + V* of the next state − V* of its own",
        has_values=True,
    ),
    "ppo": AlgorithmTraits(
        name="PPO",
        sentence="PPO trains the agent with the advantages of a learned critic",
        advantage="GAE: what followed a token, minus what the critic expected",
        has_critic=True,
    ),
    "grpo": AlgorithmTraits(
        name="GRPO",
        sentence="GRPO compares several rollouts of a task with each other, without a critic",
        advantage="(R − mean) / deviation of the task’s rollouts",
        compares_groups=True,
    ),
    "dr_grpo": AlgorithmTraits(
        name="Dr. GRPO",
        sentence="Dr. GRPO compares several rollouts of a task with their mean, without a critic",
        advantage="R − mean of the task’s rollouts",
        compares_groups=True,
    ),
    "rloo": AlgorithmTraits(
        name="RLOO",
        sentence="RLOO compares each rollout with the others of its task, without a critic",
        advantage="R − mean of the task’s other rollouts",
        compares_groups=True,
    ),
    "reinforce_plus_plus": AlgorithmTraits(
        name="REINFORCE++",
        sentence="REINFORCE++ normalises the advantages of all tokens of a step, without a critic",
        advantage="What a token’s episode earns from there on, whitened over the step",
    ),
    "brpo": AlgorithmTraits(
        name="BRPO",
        sentence="BRPO compares all episodes of a step with each other, without a critic",
        advantage="(R − mean) / deviation of the step’s episodes",
    ),
    "gigpo": AlgorithmTraits(
        name="GiGPO",
        sentence="GiGPO compares rollouts of a task, and turns in the same state, without a critic",
        advantage="Episode: compared within its task; turn: within its state",
        compares_groups=True,
    ),
}
VALUE_ALGORITHMS = tuple(key for key, traits in ALGORITHMS.items() if traits.has_values)
GROUP_ALGORITHMS = tuple(key for key, traits in ALGORITHMS.items() if traits.compares_groups)
DEFAULT_GROUP_SIZE = 8


class TurnLevelConfig(Section):
    """What only `algorithm: apo_turn` reads: A*-PO on the turns between states of known value."""

    trace: Annotated[float, Field(ge=0, le=1)] = 0.9
    """lambda: 0 trusts the values of states, 1 only what was earned after them."""
    min_visits: Count = 2
    """Reference episodes that must have passed a state before its value is used."""


class PolicyGradientConfig(Section):
    """What all algorithms but `apo` and `apo_turn` share: rollouts, clipping, KL, entropy."""

    group_size: Size | None = None
    """Rollouts per task; null for 8 where rollouts of a task are compared (grpo, dr_grpo, rloo,
    gigpo) and for 1 elsewhere."""
    num_epochs: Count = 1
    """Passes over the rollouts of a step."""
    num_minibatches: Size = 1
    """Updates of a pass."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far below 1 a token's ratio still has a gradient; 1 for no limit."""
    clip_high: NonNegative = 0.2
    """How far above 1; 0.28 is clip-higher (DAPO)."""
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None = None
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

    critic_learning_rate: LearningRate = 1e-3
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
    """Which tasks are trained on, by a score of their rollouts (StarPO-S). Looks at the rollouts of
    each step; for `apo` and `apo_turn` at those of Stage 1, once for each reference, of all tasks.
    """

    strategy: Literal["none", "top_p", "top_p_softmax", "top_k", "top_fraction", "min_p"] = "none"
    """`none` keeps all; best tasks first until they hold the share p of all scores (top_p), the k
    best, the share p of the tasks, or those that have p times the best score (min_p)."""
    value: NonNegative = 0.9
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
