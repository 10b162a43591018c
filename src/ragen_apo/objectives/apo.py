"""A*-PO, Stage 2: regress the policy's log-ratio on the optimal advantage.

Consumes log-probabilities of the sampled tokens under policy and reference, returns and V*;
produces a scalar loss and the per-sequence quantities that are monitored. Brantley et al.
(arXiv 2505.20686):

    pi*(tau | x) = pi_ref(tau | x) exp((R(tau) - V*(x)) / beta)
    Delta(tau)   = sum over sampled tokens of log pi - log pi_ref
    A(tau)       = (R - V*) - beta Delta                                     (`residual`)
    regression   = A^2,               weighted = -detach(A) log pi           per trajectory

grad regression = 2 beta grad weighted. Every loss here is the regression divided by 2 beta. So both
forms have the same gradient, and a clipping threshold means the same for both and for every beta.
On-policy, the expected gradient is -grad (E[R] - beta KL(pi || pi_ref)), whatever baseline is used
for V*.

Losses are sums over the given sequences divided by `num_sequences`, the size of the whole batch.
Add them up over micro-batches and over workers. (If a wrapper averages gradients over W workers,
multiply the loss by W.)

Axes: B sequences, T token positions. `_B` one number per sequence, `_BT` one per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_apo.choices import LengthNormalization, LossForm, check_choice
from ragen_apo.objectives.tensors import check_tokens, check_vectors, token_log_ratio

MIN_VARIANCE_SHARE = 1e-10
"""Of the variance of all values: where the others have less, it may be a rest of rounding."""
ROUNDING_SHARE = 2.0**-46
"""Of the mean square of all values: those that spread less are all the same in float32."""


@dataclass(frozen=True)
class ApoSettings:
    """The knobs of Stage 2; the defaults are the paper's. Raises ValueError out of range."""

    beta2: float = 1e-3
    """Weight of KL(pi || pi_ref), in the unit of a return."""
    loss: LossForm = "regression"
    length_normalization: LengthNormalization = "none"
    advantage_clamp: float | None = None
    """Largest |A| that a gradient sees, on both sides alike; None for no limit."""
    kl_coefficient: float = 0.0
    """Weight lambda of the additional `kl_penalty`, in the same unit as beta2."""

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, LossForm)
        check_choice("length_normalization", self.length_normalization, LengthNormalization)
        if not (math.isfinite(self.beta2) and self.beta2 > 0):
            raise ValueError(f"beta2 must be positive and finite, got {self.beta2}")
        if self.advantage_clamp is not None and not self.advantage_clamp > 0:
            raise ValueError(
                f"advantage_clamp must be positive or None for no limit, got {self.advantage_clamp}"
            )
        if not (math.isfinite(self.kl_coefficient) and self.kl_coefficient >= 0):
            raise ValueError(
                f"kl_coefficient must be 0 or positive and finite, got {self.kl_coefficient}"
            )


@dataclass(frozen=True)
class ApoLoss:
    """What one (micro-)batch yields."""

    loss: Tensor
    """Scalar; the part of the batch's loss that these sequences contribute."""
    residual: Tensor
    """A of each sequence [B], before any clamp; carries no gradient."""


def apo_loss(
    logprobs_BT: Tensor,
    *,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    returns_B: Tensor,
    v_star_B: Tensor,
    settings: ApoSettings,
    num_sequences: int,
    offset: float | Tensor = 0.0,
) -> ApoLoss:
    """The loss of some sequences out of a batch of `num_sequences`.

    `logprobs_BT` carries the gradient; the other tensors are constants. `mask_BT` is True exactly
    at the sampled tokens. Entries elsewhere do not matter, not even NaN.

    `offset` is one number, or one per sequence [B]. It is subtracted from the residuals before the
    clamp, as a control variate. Without length normalisation and clamp it changes no expected
    gradient on the policy's own samples, if it does not depend on the sequence itself.
    `mean_of_others` and `line_of_others` are such offsets and lower the variance.

    Raises ValueError for shapes that do not agree, no sequences, a return or V* that is not finite,
    and num_sequences < 1.
    """
    check_tokens(mask_BT, logprobs_BT=logprobs_BT, reference_logprobs_BT=reference_logprobs_BT)
    check_vectors(len(mask_BT), returns_B=returns_B, v_star_B=v_star_B)
    if num_sequences < 1:
        raise ValueError(f"num_sequences counts the whole batch, at least 1, got {num_sequences}")
    log_ratio_B = sequence_log_ratio(
        logprobs_BT, reference_logprobs_BT=reference_logprobs_BT, mask_BT=mask_BT
    )
    num_tokens_B = mask_BT.sum(dim=1)
    regressed_B = regressed_log_ratio(log_ratio_B, num_tokens_B, settings.length_normalization)
    residual_B = residual(regressed_B, returns_B=returns_B, v_star_B=v_star_B, beta2=settings.beta2)
    if settings.loss == "regression":
        loss_B = regression_loss(
            residual_B - offset, beta2=settings.beta2, advantage_clamp=settings.advantage_clamp
        )
    else:
        loss_B = weighted_loss(
            residual_B - offset, log_ratio_B=regressed_B, advantage_clamp=settings.advantage_clamp
        )
    if settings.kl_coefficient > 0:
        loss_B = loss_B + settings.kl_coefficient * kl_penalty(log_ratio_B)
    return ApoLoss(loss=loss_B.sum() / num_sequences, residual=residual_B.detach())


def sequence_log_ratio(
    logprobs_BT: Tensor, *, reference_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """Delta [B]: the sum over sampled tokens of log pi - log pi_ref.

    Summed in at least float32; 0 for a sequence without sampled tokens. The gradient flows into
    `logprobs_BT` at sampled tokens only.
    """
    return token_log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT).sum(dim=1)


def regressed_log_ratio(
    log_ratio_B: Tensor, num_tokens_B: Tensor, normalization: LengthNormalization
) -> Tensor:
    """What is regressed [B]: Delta, or Delta by sampled token."""
    return log_ratio_B / num_tokens_B.clamp(min=1) if normalization == "tokens" else log_ratio_B


def residual(log_ratio_B: Tensor, *, returns_B: Tensor, v_star_B: Tensor, beta2: float) -> Tensor:
    """A [B] = (R - V*) - beta2 Delta: what is left of the advantage; 0 at the optimum."""
    return (returns_B - v_star_B).to(log_ratio_B.dtype) - beta2 * log_ratio_B


def mean_of_others(values_BS: Tensor, *, present_BS: Tensor) -> Tensor:
    """For each row the mean of what is present in the other rows [B]: an offset to centre it by.

    E[grad log pi] of a sequence is 0 whatever the other sequences are. So an offset made only of
    the others changes no expected gradient. The mean of all rows does change it. With one value per
    row it is A_i / B + (1 - 1/B) (mean of the others), which keeps only 1 - 1/B of the gradient,
    and nothing at B = 1. All of the row's own values are left out, because a sequence's later
    residuals depend on what its earlier turns wrote. Raises ValueError for fewer than two rows, and
    for a row in which nothing is present.
    """
    if len(values_BS) < 2:
        raise ValueError(
            "centring subtracts the mean of the other sequences and needs at least 2 of them, got "
            f"{len(values_BS)}"
        )
    count_B = present_BS.sum(dim=1)
    if not bool((count_B > 0).all()):
        raise ValueError(f"every sequence needs a value, got {count_B.tolist()} of them")
    sum_B = torch.where(present_BS, values_BS, 0.0).sum(dim=1)
    return (sum_B.sum() - sum_B) / (count_B.sum() - count_B)


def line_of_others(residual_BS: Tensor, *, values_BS: Tensor, present_BS: Tensor) -> Tensor:
    """For each value, what the least-squares line through the other rows says of its residual.

    The line is residual = a + c V over everything that is present in the other rows. The offset of
    an entry [B, S] is a + c V at its own V. Subtracting it makes a + (1 + c) V the baseline in
    place of V. So a V that says nothing about the returns (c near -1) adds no noise to them. This
    happens with V* of few samples, and with V* of a reference that the policy has left behind.
    `mean_of_others` is the line with c = 0.

    The line is read within the range of the others' V: an own V far outside a narrow range would
    make an offset of many times the residuals.

    The expected gradient does not change, as with `mean_of_others`: a, c and the range are made of
    other rows, and V was known before the row's own tokens were sampled. c is 0 if all V of the
    others are the same. Control variates with a fitted coefficient: Glasserman, Monte Carlo Methods
    in Financial Engineering, section 4.1. Raises ValueError where `mean_of_others` does.
    """
    # In float64 and around the means of all rows: equal values have a variance of 0 to 1e-30.
    middle = residual_BS[present_BS].double().mean()
    value_BS = values_BS.double() - values_BS[present_BS].double().mean()
    centred_BS = residual_BS.double() - middle
    mean_value_B = mean_of_others(value_BS, present_BS=present_BS)
    mean_centred_B = mean_of_others(centred_BS, present_BS=present_BS)
    products_B = mean_of_others(value_BS * centred_BS, present_BS=present_BS)
    squares_B = mean_of_others(value_BS.square(), present_BS=present_BS)
    covariance_B = products_B - mean_value_B * mean_centred_B
    variance_B = squares_B - mean_value_B.square()
    rest = MIN_VARIANCE_SHARE * value_BS[present_BS].square().mean()
    rest = rest.maximum(ROUNDING_SHARE * values_BS[present_BS].double().square().mean())
    is_spread_B = variance_B > rest
    slope_B = torch.where(is_spread_B, covariance_B / variance_B, 0.0)
    lowest_B = _least_of_others(torch.where(present_BS, value_BS, math.inf).amin(dim=1))
    highest_B = -_least_of_others(-torch.where(present_BS, value_BS, -math.inf).amax(dim=1))
    read_BS = value_BS.clamp(lowest_B[:, None], highest_B[:, None])
    rise_BS = slope_B[:, None] * (read_BS - mean_value_B[:, None])
    return (middle + mean_centred_B[:, None] + rise_BS).to(residual_BS.dtype)


def _least_of_others(numbers_B: Tensor) -> Tensor:
    """For each of at least two numbers the smallest of the others [B]."""
    least = numbers_B.topk(2, largest=False)
    result_B = least.values[0].expand_as(numbers_B).clone()
    result_B[least.indices[0]] = least.values[1]
    return result_B


def regression_loss(
    residual_B: Tensor, *, beta2: float, advantage_clamp: float | None = None
) -> Tensor:
    """A^2 / (2 beta2) [B], through which the gradient flows.

    Beyond the clamp c the square continues as its tangent, (2 c |A| - c^2) / (2 beta2) (Huber). So
    the gradient is that of the weighted form with A clamped to [-c, c].
    """
    if advantage_clamp is None:
        return residual_B.square() / (2 * beta2)
    size_B = residual_B.abs()
    inner_B = size_B.clamp(max=advantage_clamp)
    return (inner_B * (2 * size_B - inner_B)) / (2 * beta2)


def weighted_loss(
    residual_B: Tensor, *, log_ratio_B: Tensor, advantage_clamp: float | None = None
) -> Tensor:
    """-A Delta [B] with A held constant; the gradient is that of -A log pi, as pi_ref has none.

    A must be the residual at the current weights. Holding it constant is what makes this the
    regression's gradient, and negative A is kept.
    """
    advantage_B = residual_B.detach()
    if advantage_clamp is not None:
        advantage_B = advantage_B.clamp(min=-advantage_clamp, max=advantage_clamp)
    return -advantage_B * log_ratio_B


def kl_penalty(log_ratio_B: Tensor) -> Tensor:
    """Delta^2 / 2 [B]: on samples of pi its gradient is an unbiased grad KL(pi || pi_ref).

    Other estimators of the KL are better as a value but fail as a loss. Differentiated on samples
    of pi, Delta itself has expected gradient 0, and exp(-Delta) - 1 + Delta has that of KL(pi_ref
    || pi). The square is of the whole sequence, because a square per token ignores how a token
    affects later ones. Without clamp and length normalisation, a weight lambda is the same as
    adding lambda to the beta2 of the residual.
    """
    return log_ratio_B.square() / 2


def sequence_kl(logprobs_BT: Tensor, *, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Estimate of KL(pi || pi_ref) [B], for monitoring: sum over tokens of exp(-d) - 1 + d.

    d = log pi - log pi_ref of one token. Unbiased for samples of pi, never negative, and less noisy
    than Delta near the reference. Far from it one token with d near -10 adds exp(10). Carries no
    gradient.
    """
    with torch.no_grad():
        token_BT = token_log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT)
        return (torch.expm1(-token_BT) + token_BT).sum(dim=1)


def residual_metrics(residual_B: Tensor) -> dict[str, float]:
    """Mean and variance (which divides by B), from a vector over the whole batch."""
    residual_64 = residual_B.double()
    return {
        "residual_mean": residual_64.mean().item(),
        "residual_variance": residual_64.var(correction=0).item(),
    }


def value_metrics(*, v_star_B: Tensor, success_B: Tensor) -> dict[str, float]:
    """Pearson's correlation of V* with success; nothing where one is the same for all sequences."""
    if v_star_B.min() == v_star_B.max() or success_B.min() == success_B.max():
        return {}
    both = torch.stack([v_star_B.double(), success_B.double()])
    return {"v_star_success_correlation": torch.corrcoef(both)[0, 1].item()}


def divergence_metrics(
    *, log_ratio_B: Tensor, kl_B: Tensor, num_tokens_B: Tensor
) -> dict[str, float]:
    """How far the policy is from the reference, from vectors over the whole batch."""
    log_ratio_64 = log_ratio_B.double()
    return {
        "log_ratio_mean": log_ratio_64.mean().item(),
        "log_ratio_max_abs": log_ratio_64.abs().max().item(),
        "kl_per_sequence": kl_B.double().mean().item(),
        "kl_per_token": kl_B.double().sum().item() / max(int(num_tokens_B.sum()), 1),
    }
