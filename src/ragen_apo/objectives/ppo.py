"""PPO's critic side: advantages from values (GAE), over tokens or over turns first; value losses.

Consumes rewards, values and turn numbers per token, produces advantages and value targets per
token. The policy loss is `policy_gradient.clipped_policy_loss`. Schulman et al., GAE (arXiv
1506.02438) and PPO (1707.06347):

    delta_t = r_t + gamma V_{t'} - V_t
    A_t     = delta_t + gamma lambda A_{t'}          return (value target) = A_t + V_t

t' is the next *sampled* token. What the environment wrote between two turns is skipped, because it
is part of the transition. V_t is the value of the text before token t. Bi-level GAE runs the same
recursion over turns first, see `bi_level_gae` (VAGEN, 2510.16907; an option of RAGEN, 2504.20073).

Assumes terminated trajectories: V = 0 after the end.

Axes: B sequences, T token positions, K turns.

- `rewards_BT`: the reward at the token that earned it. A turn's reward is at the turn's last
  sampled token, a KL penalty at every token.
- `values_BT`: the critic's values.
- `mask_BT`: True exactly at sampled tokens.
- `turn_index_BT`: int64, -1 except at sampled tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.objectives.tensors import (
    at_least_float32,
    check_finite_tokens,
    check_ids,
    check_range,
    check_tokens,
    discounted_sum,
    next_sampled,
    sampled_or_zero,
)


@dataclass(frozen=True)
class AdvantageEstimate:
    """Constants of shape [B, T], 0 where no token was sampled."""

    advantages_BT: Tensor
    """Not whitened: `tensors.whiten` does that, over the whole batch."""
    returns_BT: Tensor
    """A + V: what the critic is regressed on."""


def gae(
    rewards_BT: Tensor,
    *,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
) -> AdvantageEstimate:
    """Generalised advantage estimation over sampled tokens.

    gamma counts tokens, not turns: below 1 it discounts long thoughts. Raises ValueError for shapes
    that differ, numbers that are not finite at sampled tokens, and gamma or lambda outside [0, 1].
    """
    _check(rewards_BT, values_BT, mask_BT, gamma=gamma, gae_lambda=gae_lambda)
    values_BT = sampled_or_zero(at_least_float32(values_BT.detach()), mask_BT)
    delta_BT = rewards_BT + gamma * next_sampled(values_BT, mask_BT=mask_BT, end=0)
    advantages_BT = discounted_sum(delta_BT - values_BT, mask_BT=mask_BT, decay=gamma * gae_lambda)
    return AdvantageEstimate(advantages_BT=advantages_BT, returns_BT=advantages_BT + values_BT)


def bi_level_gae(
    rewards_BT: Tensor,
    *,
    values_BT: Tensor,
    mask_BT: Tensor,
    turn_index_BT: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    gamma_turn: float = 1.0,
    lambda_turn: float = 1.0,
) -> AdvantageEstimate:
    """GAE from turn to turn, then from token to token within each turn.

    With e_k the last token of turn k and i_k the sum of the rewards at its other tokens (0 unless a
    KL penalty is paid by token):

        delta_k = r_{e_k} + gamma_turn (i_{k+1} + V_{e_{k+1}}) - V_{e_k}
        A_{e_k} = delta_k + gamma_turn lambda_turn A_{e_{k+1}}
        A_t     = r_t + gamma V_{t'} - V_t + gamma lambda A_{t'}      for the other tokens of a turn

    As in VAGEN's released code, a turn's advantage *replaces* the token-level one of its last
    token. With all four constants 1 the result is that of `gae`; what makes the difference is a
    gamma_turn below gamma, which discounts by turns, or a lambda_turn of its own. `turn_index_BT`
    must not fall along a row. Raises ValueError where `gae` does and for a turn index that is -1 at
    a sampled token, not -1 elsewhere, or falling.
    """
    _check(
        rewards_BT,
        values_BT,
        mask_BT,
        gamma=gamma,
        gae_lambda=gae_lambda,
        gamma_turn=gamma_turn,
        lambda_turn=lambda_turn,
    )
    next_turn_BT = _check_turns(turn_index_BT, mask_BT)
    rewards_BT = sampled_or_zero(at_least_float32(rewards_BT.detach()), mask_BT)
    values_BT = sampled_or_zero(at_least_float32(values_BT.detach()), mask_BT)
    last_BT = mask_BT & (next_turn_BT != turn_index_BT)

    turn_BT = turn_index_BT.clamp(min=0)
    inner_BT = torch.where(last_BT, torch.zeros_like(rewards_BT), rewards_BT)
    inner_BK = rewards_BT.new_zeros(len(mask_BT), int(turn_BT.max()) + 1)
    inner_BK = inner_BK.scatter_add(1, turn_BT, inner_BT)
    reached_BT = inner_BK.gather(1, turn_BT) + values_BT
    turn_delta_BT = rewards_BT - values_BT
    turn_delta_BT += gamma_turn * next_sampled(reached_BT, mask_BT=last_BT, end=0)
    turn_advantage_BT = discounted_sum(
        turn_delta_BT, mask_BT=last_BT, decay=gamma_turn * lambda_turn
    )

    next_values_BT = next_sampled(values_BT, mask_BT=mask_BT, end=0)
    token_delta_BT = rewards_BT + gamma * next_values_BT - values_BT
    advantages_BT = discounted_sum(
        torch.where(last_BT, turn_advantage_BT, token_delta_BT),
        mask_BT=mask_BT,
        decay=torch.where(last_BT, 0.0, gamma * gae_lambda),
    )
    return AdvantageEstimate(advantages_BT=advantages_BT, returns_BT=advantages_BT + values_BT)


def clipped_value_loss(
    values_BT: Tensor,
    *,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    clip: float | None = 0.2,
) -> Tensor:
    """Half the squared error of the critic by token; a step beyond `clip` from V_old gains nothing.

        max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2

    [B, T], 0 where no token was sampled; `aggregate` it as token_mean. `values_BT` carries the
    gradient. `clip` is in the unit of a return; None for the plain square.
    Raises ValueError for shapes that differ, a clip that is not positive, and old values or returns
    that are not finite at sampled tokens.
    """
    check_tokens(mask_BT, values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT)
    check_finite_tokens(mask_BT, old_values_BT=old_values_BT, returns_BT=returns_BT)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive or None for the plain square, got {clip}")
    values_BT = sampled_or_zero(at_least_float32(values_BT), mask_BT)
    old_BT = sampled_or_zero(old_values_BT.detach(), mask_BT).to(values_BT.dtype)
    returns_BT = sampled_or_zero(returns_BT.detach(), mask_BT).to(values_BT.dtype)
    plain_BT = (values_BT - returns_BT).square()
    if clip is None:
        return plain_BT / 2
    near_BT = old_BT + (values_BT - old_BT).clamp(min=-clip, max=clip)
    clipped_BT = (near_BT - returns_BT).square()
    # where, not maximum: where both are equal, maximum would give each half of the gradient.
    return torch.where(clipped_BT > plain_BT, clipped_BT, plain_BT) / 2


def explained_variance(values_BT: Tensor, *, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """1 - var(R - V) / var(R) over sampled tokens: 1 is a perfect critic, 0 one that says nothing.

    NaN if the returns of the batch are all the same, where there is nothing to explain. Raises
    ValueError for shapes that differ and numbers that are not finite at sampled tokens.
    """
    check_tokens(mask_BT, values_BT=values_BT, returns_BT=returns_BT)
    check_finite_tokens(mask_BT, values_BT=values_BT, returns_BT=returns_BT)
    returns_N, values_N = returns_BT[mask_BT].double(), values_BT[mask_BT].double()
    if len(returns_N) == 0 or returns_N.min() == returns_N.max():
        return math.nan
    unexplained = (returns_N - values_N).var(correction=0) / returns_N.var(correction=0)
    return 1 - unexplained.item()


def _check(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, **constants: float) -> None:
    check_tokens(mask_BT, rewards_BT=rewards_BT, values_BT=values_BT)
    check_finite_tokens(mask_BT, rewards_BT=rewards_BT, values_BT=values_BT)
    for name, value in constants.items():
        check_range(name, value, low=0.0, high=1.0)


def _check_turns(turn_index_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the turn of the next sampled token [B, T], -1 after the last."""
    check_tokens(mask_BT, turn_index_BT=turn_index_BT)
    check_ids(turn_index_BT=turn_index_BT)
    if not torch.equal(turn_index_BT >= 0, mask_BT):
        raise ValueError("turn_index_BT must be at least 0 at sampled tokens and -1 elsewhere")
    next_turn_BT = next_sampled(turn_index_BT, mask_BT=mask_BT, end=-1)
    falling_BT = mask_BT & (next_turn_BT >= 0) & (next_turn_BT < turn_index_BT)
    if falling_BT.any():
        row = int(falling_BT.nonzero()[0, 0])
        raise ValueError(
            f"turn_index_BT must not fall along a row, got {turn_index_BT[row].tolist()}"
        )
    return next_turn_BT
