"""The options that have names: what a configuration may write and what the mathematics switches on.

Each choice is declared here once. `config` reads it as the type of a key, `objectives` as the type
of an argument; nothing here imports torch.
"""

from __future__ import annotations

from typing import Literal

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

Credit = Literal["episode", "turn"]
"""What distillation weighs as a whole: an episode by its return, or each turn by V* after and
before it."""

EpisodeSchedule = Literal["static", "dynamic"]
"""Who of several processes plays an episode: its number decides, or the first that has room."""

FilterStrategy = Literal["none", "top_p", "top_fraction"]
"""How many of the tasks whose returns vary most are kept (`objectives.filters`); none keeps all."""

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

Relabel = Literal["none", "numbers", "copied"]
"""Which tokens of a sequence are exchanged at random before a model imitates it: none, all numbers,
or all that are copied and no fixed phrase."""

ResponseFormat = Literal["think_answer", "tool_call"]
"""How a model writes its action: between tags, or as a call of one of the environment's tools."""

Schedule = Literal["constant", "linear", "cosine"]
"""Learning rate after the warm-up."""

RunEnd = Literal["reference", "policy"]
"""What a run is made up to: the end of the warm start, or the trained policy."""

SearchMethod = Literal["beam", "best_of_n"]
"""How an episode is searched for: the best branches turn by turn, or the best of whole episodes."""

SearchRanking = Literal["values", "likelihood", "votes", "reward"]
"""What decides between the branches of a search: V* where it is known and likelihood elsewhere,
likelihood alone, how many candidates do the same, or the reward, which a deployed agent cannot
see."""

ZeroVariance = Literal["drop", "keep"]
"""What happens to tasks whose returns are all equal, before the strategy is applied."""
