"""Clipping, aggregation and KL: values, gradients, and what they must not see."""

import itertools
import math
from typing import get_args

import pytest
import torch

from ragen_apo.choices import Aggregation
from ragen_apo.objectives.policy_gradient import (
    aggregate,
    clipped_policy_loss,
    entropy_bonus,
    importance_weights,
    kl_loss,
    penalize_rewards,
)

CLIPS = {
    "PPO": {},
    "decoupled": {"clip_low": 0.2, "clip_high": 0.28},
    "off": {"clip_low": 1.0, "clip_high": math.inf},
}


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Six sequences of up to nine tokens with holes in the mask, and one without any token."""
    mask_BT = torch.rand(6, 9) < 0.6
    mask_BT[4] = False
    return {
        "logprobs_BT": -2 * torch.rand(6, 9),
        "old_logprobs_BT": -2 * torch.rand(6, 9),
        "advantages_BT": torch.randn(6, 9),
        "mask_BT": mask_BT,
    }


def counts(batch):
    return {
        "num_sequences": len(batch["mask_BT"]),
        "num_tokens": int(batch["mask_BT"].sum()),
        "max_tokens": 9,
    }


def scalar_loss(batch, *, aggregation="token_mean", rows=slice(None), **clips):
    """Loss and gradient of `rows` as a part of the whole batch."""
    logprobs_BT = batch["logprobs_BT"].clone().requires_grad_()
    given = {name: tensor[rows] for name, tensor in batch.items() if name != "logprobs_BT"}
    output = clipped_policy_loss(logprobs_BT[rows], **given, **clips)
    loss = aggregate(
        output.loss_BT, mask_BT=given["mask_BT"], aggregation=aggregation, **counts(batch)
    )
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss.detach(), gradient_BT


def slow_token_loss(logprob, old, advantage, *, clip_low=0.2, clip_high=0.2):
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    return max(-ratio * advantage, -clipped * advantage)


@pytest.mark.parametrize("clips", CLIPS.values(), ids=CLIPS)
def test_token_losses_equal_a_slow_recomputation(batch, clips):
    output = clipped_policy_loss(**batch, **clips)
    for row, column in itertools.product(range(6), range(9)):
        expected = 0.0
        if batch["mask_BT"][row, column]:
            names = ("logprobs_BT", "old_logprobs_BT", "advantages_BT")
            numbers = [batch[name][row, column].item() for name in names]
            expected = slow_token_loss(*numbers, **clips)
        assert output.loss_BT[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_the_clip_stops_the_gradient_on_the_profitable_side_only():
    # Ratios 0.5, 1, 1.5 with A = 1, then with A = -1. The gradient of -A rho is -A rho.
    ratios = torch.tensor([[0.5, 1.0, 1.5, 0.5, 1.0, 1.5]])
    output, gradient_BT = one_row(ratios, torch.tensor([[1.0, 1, 1, -1, -1, -1]]))
    assert output.loss_BT.tolist() == [pytest.approx([-0.5, -1, -1.2, 0.8, 1, 1.5])]
    assert gradient_BT.tolist() == [pytest.approx([-0.5, -1, 0, 0, 1, 1.5])]
    assert output.clipped_BT.tolist() == [[False, False, True, True, False, False]]


def one_row(ratios, advantages_BT, **clips):
    logprobs_BT = ratios.log().requires_grad_()
    output = clipped_policy_loss(
        logprobs_BT,
        old_logprobs_BT=torch.zeros_like(ratios),
        advantages_BT=advantages_BT,
        mask_BT=torch.ones_like(ratios, dtype=torch.bool),
        **clips,
    )
    (gradient_BT,) = torch.autograd.grad(output.loss_BT.sum(), logprobs_BT)
    return output, gradient_BT


def test_at_the_weights_that_sampled_the_gradient_is_that_of_reinforce(batch):
    batch["old_logprobs_BT"] = batch["logprobs_BT"].clone()
    _, gradient_BT = scalar_loss(batch, aggregation="sequence_mean_token_sum")
    expected_BT = torch.where(batch["mask_BT"], -batch["advantages_BT"] / 6, 0.0)
    torch.testing.assert_close(gradient_BT, expected_BT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ratio_that_would_overflow_has_a_finite_loss_and_gradient(dtype):
    logprobs_BT = torch.tensor([[0.0, -200.0]], dtype=dtype, requires_grad=True)
    output = clipped_policy_loss(
        logprobs_BT,
        old_logprobs_BT=torch.tensor([[-200.0, 0.0]], dtype=dtype),
        advantages_BT=torch.tensor([[1.0, 1.0]]),
        mask_BT=torch.ones(1, 2, dtype=torch.bool),
    )
    (gradient_BT,) = torch.autograd.grad(output.loss_BT.sum(), logprobs_BT)
    assert output.loss_BT.isfinite().all()
    assert gradient_BT.isfinite().all()


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_aggregation_equals_a_slow_recomputation(batch, aggregation):
    loss_BT, mask_BT = torch.randn(6, 9), batch["mask_BT"]
    rows = [
        [x for x, sampled in zip(losses, mask, strict=True) if sampled]
        for losses, mask in zip(loss_BT.tolist(), mask_BT.tolist(), strict=True)
    ]
    expected = {
        "token_mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "sequence_mean_token_mean": sum(sum(row) / max(len(row), 1) for row in rows) / 6,
        "sequence_mean_token_sum": sum(map(sum, rows)) / 6,
        "constant": sum(map(sum, rows)) / (6 * 9),
    }
    loss = aggregate(loss_BT, mask_BT=mask_BT, aggregation=aggregation, **counts(batch))
    assert loss.item() == pytest.approx(expected[aggregation], abs=1e-12)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_micro_batches_add_up(batch, aggregation):
    whole, whole_gradient_BT = scalar_loss(batch, aggregation=aggregation)
    parts = [
        scalar_loss(batch, aggregation=aggregation, rows=rows)
        for rows in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(sum(gradient for _, gradient in parts), whole_gradient_BT)


@pytest.mark.parametrize("clips", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_what_was_not_sampled_is_not_seen(batch, aggregation, clips):
    before, gradient_BT = scalar_loss(batch, aggregation=aggregation, **clips)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        for name in ("logprobs_BT", "old_logprobs_BT", "advantages_BT"):
            batch[name] = torch.where(batch["mask_BT"], batch[name], garbage)
        after, dirty_gradient_BT = scalar_loss(batch, aggregation=aggregation, **clips)
        assert torch.equal(before, after)
        assert torch.equal(gradient_BT, dirty_gradient_BT)
    assert gradient_BT[~batch["mask_BT"]].count_nonzero() == 0


def test_the_gradient_flows_into_the_current_log_probabilities_only(batch):
    constants = {name: batch[name].clone().requires_grad_() for name in list(batch)[1:3]}
    logprobs_BT = batch["logprobs_BT"].clone().requires_grad_()
    clipped = clipped_policy_loss(logprobs_BT, **constants, mask_BT=batch["mask_BT"]).loss_BT
    kl_BT = kl_loss(
        logprobs_BT, reference_logprobs_BT=constants["old_logprobs_BT"], mask_BT=batch["mask_BT"]
    )
    (clipped + kl_BT).sum().backward()
    assert logprobs_BT.grad is not None
    assert all(tensor.grad is None for tensor in constants.values())


def test_padding_changes_no_loss(batch):
    padded = {
        name: torch.nn.functional.pad(tensor, (2, 3), value=0) for name, tensor in batch.items()
    }
    for aggregation in get_args(Aggregation):
        loss, _ = scalar_loss(batch, aggregation=aggregation)
        padded_loss, _ = scalar_loss(padded, aggregation=aggregation)
        torch.testing.assert_close(loss, padded_loss)


def test_one_token_under_every_aggregation():
    one = torch.tensor([[-3.0]])
    for aggregation in get_args(Aggregation):
        loss = aggregate(
            one,
            mask_BT=one < 0,
            aggregation=aggregation,
            num_sequences=1,
            num_tokens=1,
            max_tokens=1,
        )
        assert loss.item() == -3.0


# KL: everything below is an exact sum over a categorical with four outcomes.


@pytest.fixture
def categorical():
    """Logits with gradient, log pi and log pi_ref of each of the four outcomes, as [4, 1]."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.1], requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.5, 0.0]).log_softmax(0)
    return logits, logits.log_softmax(0)[:, None], reference[:, None]


def gradient_of(categorical, number):
    return torch.autograd.grad(number, categorical[0], retain_graph=True)[0]


def test_both_penalties_have_the_expected_gradient_of_the_kl(categorical):
    _, log_pi, log_ref = categorical
    pi, mask_BT = log_pi.exp().detach(), torch.ones(4, 1, dtype=torch.bool)
    expected = gradient_of(categorical, (log_pi.exp() * (log_pi - log_ref)).sum())
    loss_BT = kl_loss(log_pi, reference_logprobs_BT=log_ref, mask_BT=mask_BT)
    assert loss_BT.flatten().tolist() == pytest.approx(
        [d * d / 2 for d in (log_pi - log_ref).flatten().tolist()]
    )
    penalty_BT = -penalize_rewards(
        torch.zeros(4, 1), kl_BT=log_pi - log_ref, mask_BT=mask_BT, coefficient=1.0
    )
    for number in ((pi * loss_BT).sum(), (pi * penalty_BT * log_pi).sum()):
        torch.testing.assert_close(gradient_of(categorical, number), expected, rtol=0, atol=1e-12)


def test_in_the_loss_a_token_is_not_charged_for_the_kl_of_later_ones():
    """Two tokens; after one first token the second is the reference's, after the other it is not.

    The KL of the whole falls by saying the first more often. Of its own KL the first token has 0.
    """
    first = torch.zeros(2, requires_grad=True)
    second = torch.tensor([[0.0, 0.0], [2.0, -1.0]])
    paths = list(itertools.product(range(2), repeat=2))
    log_pi = torch.stack(
        [torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]]) for a, b in paths]
    )
    log_ref, mask_BT = torch.full((4, 2), math.log(0.5)), torch.ones(4, 2, dtype=torch.bool)
    path_log_pi, d = log_pi.sum(1), (log_pi - log_ref).detach()
    pi = path_log_pi.exp().detach()
    kl = (path_log_pi.exp() * (log_pi - log_ref).sum(1)).sum()
    penalty_BT = -penalize_rewards(torch.zeros(4, 2), kl_BT=d, mask_BT=mask_BT, coefficient=1.0)
    in_reward = (pi * penalty_BT.sum(1) * path_log_pi).sum()
    in_loss = (pi * kl_loss(log_pi, reference_logprobs_BT=log_ref, mask_BT=mask_BT).sum(1)).sum()
    whole, rewarded, lost = (
        torch.autograd.grad(number, first, retain_graph=True)[0]
        for number in (kl, in_reward, in_loss)
    )
    torch.testing.assert_close(rewarded, whole, rtol=0, atol=1e-6)
    assert whole[0].item() < -0.1 and lost.abs().max() < 1e-6


def test_other_estimates_of_the_kl_have_another_gradient(categorical):
    """Of d as a loss nothing is left; of "k3" KL(ref || pi), also where it is in the reward."""
    _, log_pi, log_ref = categorical
    pi, ref, d = log_pi.exp().detach(), log_ref.exp(), log_pi - log_ref
    k3 = torch.expm1(-d) + d
    reverse, forward, of_d, of_k3, in_reward = (
        gradient_of(categorical, number)
        for number in (
            (log_pi.exp() * d).sum(),
            -(ref * d).sum(),
            (pi * d).sum(),
            (pi * k3).sum(),
            (pi * k3.detach() * log_pi).sum(),
        )
    )
    assert of_d.norm() < 1e-12
    torch.testing.assert_close(of_k3, forward, rtol=0, atol=1e-12)
    torch.testing.assert_close(in_reward, reverse - forward, rtol=0, atol=1e-12)
    assert (reverse - forward).norm() > 0.1


def test_kl_does_not_see_what_was_not_sampled(batch):
    mask_BT = batch["mask_BT"]

    def value_and_gradient(garbage):
        leaf_BT = torch.where(mask_BT, batch["logprobs_BT"], garbage).requires_grad_()
        kl_BT = kl_loss(
            leaf_BT,
            reference_logprobs_BT=torch.where(mask_BT, batch["old_logprobs_BT"], garbage),
            mask_BT=mask_BT,
        )
        return kl_BT.detach(), torch.autograd.grad(kl_BT.sum(), leaf_BT)[0]

    clean, dirty = value_and_gradient(0.0), value_and_gradient(math.nan)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[0][~mask_BT].count_nonzero() == 0


def test_weights_make_a_samplers_expected_gradient_that_of_the_policy():
    """Enumerated: one token of four, drawn by a sampler that is far from the policy."""
    logits_V = torch.randn(4, requires_grad=True)
    logprobs_V = logits_V.log_softmax(0)
    sampled_V, advantages_V = torch.randn(4).log_softmax(0), torch.randn(4)
    one_token = {"mask_BT": torch.ones(4, 1, dtype=torch.bool)}

    def expected_gradient(probabilities_V, weights_V):
        output = clipped_policy_loss(
            logprobs_V[:, None],
            old_logprobs_BT=logprobs_V.detach()[:, None],
            advantages_BT=advantages_V[:, None],
            **one_token,
        )
        loss = (probabilities_V * weights_V * output.loss_BT[:, 0]).sum()
        return torch.autograd.grad(loss, logits_V, retain_graph=True)[0]

    def weights(cap):
        given = {"sampled_logprobs_BT": sampled_V[:, None], **one_token}
        return importance_weights(logprobs_V[:, None], cap=cap, **given)[:, 0]

    exact_V = expected_gradient(logprobs_V.detach().exp(), torch.ones(4))
    torch.testing.assert_close(expected_gradient(sampled_V.exp(), weights(math.inf)), exact_V)
    for biased_V in (torch.ones(4), weights(1.0)):
        assert (expected_gradient(sampled_V.exp(), biased_V) - exact_V).norm() > 0.05
    assert not weights(math.inf).requires_grad


def test_importance_weights_by_hand():
    old_BT = torch.tensor([[0.5, 0.25, 0.9, math.nan, 1.0]]).log()
    sampled_BT = torch.tensor([[0.25, 0.5, 0.1, 0.5, 1e-30]]).log()
    mask_BT = torch.tensor([[True, True, True, False, True]])
    given = {"sampled_logprobs_BT": sampled_BT, "mask_BT": mask_BT}
    weights_BT = importance_weights(old_BT, cap=3.0, **given)
    assert weights_BT.tolist() == [pytest.approx([2, 0.5, 3, 0, 3])]
    huge_BT = torch.tensor([[1e3, -1e3]])
    zeros_BT, both_BT = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    given_both = {"sampled_logprobs_BT": zeros_BT, "mask_BT": both_BT}
    weights_BT = importance_weights(huge_BT, cap=math.inf, **given_both)
    assert 1 < weights_BT[0, 0] < math.inf and 0 < weights_BT[0, 1] < 1
    with pytest.raises(ValueError, match=r"cap must lie in \[1.0, inf\], got 0.5"):
        importance_weights(old_BT, cap=0.5, **given)


def test_a_hand_computed_penalty_and_bonus():
    mask_BT = torch.tensor([[True, False, True]])
    rewards_BT = torch.tensor([[0.0, math.nan, 1.0]])
    kl_BT = torch.tensor([[0.5, math.nan, -0.1]])
    penalized = penalize_rewards(rewards_BT, kl_BT=kl_BT, mask_BT=mask_BT, coefficient=0.1)
    assert penalized.tolist() == [pytest.approx([-0.05, 0, 1.01])]
    entropy_BT = torch.tensor([[0.5, math.nan, 2.0]], requires_grad=True)
    bonus_BT = entropy_bonus(entropy_BT, mask_BT=mask_BT, coefficient=0.1)
    (gradient_BT,) = torch.autograd.grad(bonus_BT.sum(), entropy_BT)
    assert bonus_BT.tolist() == [pytest.approx([-0.05, 0, -0.2])]
    assert gradient_BT.tolist() == [pytest.approx([-0.1, 0, -0.1])]


def test_refusals(batch):
    for wrong, message in (
        ({"clip_low": 1.5}, r"clip_low must lie in \[0.0, 1.0\], got 1.5"),
        ({"clip_high": math.nan}, "clip_high must lie in"),
        ({"old_logprobs_BT": torch.zeros(6, 8)}, r"must have shape \(6, 9\), got \(6, 8\)"),
        ({"advantages_BT": torch.full((6, 9), math.nan)}, "advantages_BT must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            clipped_policy_loss(**{**batch, **wrong})
    loss_BT, mask_BT = torch.zeros(6, 9), batch["mask_BT"]
    for wrong, message in (
        ({"num_sequences": 5}, "at least 6, got 5"),
        ({"num_tokens": 1}, "num_tokens counts the sampled tokens of the whole batch"),
        ({"max_tokens": None}, "needs max_tokens"),
        ({"aggregation": "mean"}, "aggregation must be one of 'token_mean'"),
    ):
        given = {"aggregation": "constant", **counts(batch), **wrong}
        with pytest.raises(ValueError, match=message):
            aggregate(loss_BT, mask_BT=mask_BT, **given)
    with pytest.raises(ValueError, match=r"must have shape \(6, 9\), got \(6, 8\)"):
        kl_loss(loss_BT, reference_logprobs_BT=torch.zeros(6, 8), mask_BT=mask_BT)
    for name in ("rewards_BT", "kl_BT"):
        for wrong, message in (
            ({name: loss_BT[:, 1:]}, f"{name} must have shape"),
            ({name: loss_BT / 0}, f"{name} must be finite"),
            ({"coefficient": -1}, "coefficient"),
        ):
            given = {"rewards_BT": loss_BT, "kl_BT": loss_BT, "coefficient": 0.1, **wrong}
            with pytest.raises(ValueError, match=message):
                penalize_rewards(mask_BT=mask_BT, **given)
    with pytest.raises(ValueError, match="coefficient must be finite"):
        entropy_bonus(loss_BT, mask_BT=mask_BT, coefficient=math.nan)
