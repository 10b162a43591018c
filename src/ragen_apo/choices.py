"""The options that have names: what a configuration may write and what the mathematics switches on.

Each choice is declared here once. `config` reads it as the type of a key, and the key says what the
values mean; `objectives` reads it as the type of an argument. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

Credit = Literal["episode", "turn"]
EpisodeSchedule = Literal["static", "dynamic"]
FilterStrategy = Literal["none", "top_p", "top_fraction"]
Relabel = Literal["none", "numbers", "copied"]
ResponseFormat = Literal["think_answer", "tool_call"]
Schedule = Literal["constant", "linear", "cosine"]
SearchMethod = Literal["beam", "best_of_n"]
SearchRanking = Literal["values", "regression", "likelihood", "votes", "reward"]
TurnState = Literal["key", "observation"]
ZeroVariance = Literal["drop", "keep"]

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
]
"""How the losses of tokens become one number; each divides by a count of the whole batch.

token_mean                 sum over tokens / tokens: long responses weigh more. DAPO; PPO in RAGEN
sequence_mean_token_mean   mean over a sequence's tokens, mean over sequences: GRPO. A token of a
                           long response weighs less, so long failures are punished less per token
sequence_mean_token_sum    sum over tokens / sequences: the policy gradient of the return, without a
                           length bias
constant                   sum over tokens / (sequences x max_tokens): Dr. GRPO. The sum above with
                           another rate
"""

Baseline = Literal["v_star", "mean", "zero"]
"""What A*-PO subtracts from a return: V*, or for ablations the mean of the samples, or nothing."""

ValueEstimator = Literal["samples", "regression"]
"""How V* is computed from the episodes of Stage 1: of a task or state from its own samples, or by a
regression over all of them (`values.regression`), which values states that were never seen, too."""

KlPlace = Literal["loss", "reward"]
"""Where a KL penalty stands: added to the loss, or subtracted from the rewards of tokens. Each has
the one estimate of a token's KL whose gradient is right there (`objectives.policy_gradient.kl_loss`
and `penalize_rewards`)."""

LengthNormalization = Literal["none", "tokens"]
"""The log ratio of a sequence: the sum over its tokens (A*-PO), or their mean, which is another
algorithm with the optimum Delta = T A / beta for T tokens."""

LossForm = Literal["regression", "weighted"]
"""Two losses of A*-PO with the same gradient; they differ in the number that is logged."""

NormalizationGrouping = Literal["state", "batch", "category"]
"""Whose statistics normalise a return: rollouts of the same task, which start in the same state; of
the step; or of tasks of the same category, which in a mixture is the environment (RAGEN:
inductive)."""

NormalizationMethod = Literal["identity", "mean", "mean_std", "asym_clip"]
"""What is done with returns: nothing; minus the mean; also divided by the standard deviation; also
clamped to [-1, 3]."""

RunEnd = Literal["reference", "policy"]
"""What a run is made up to: the end of the warm start, or the trained policy."""


def check_choice(name: str, value: Any, choice: Any) -> None:
    """Raises ValueError unless `value` is one of a choice above."""
    if value not in get_args(choice):
        expected = ", ".join(map(repr, get_args(choice)))
        raise ValueError(f"{name} must be one of {expected}, got {value!r}")
