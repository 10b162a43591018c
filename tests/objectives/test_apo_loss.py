"""The A*-PO loss as a function: its value, its gradient, its options, and what it must not see."""

import math
from typing import get_args

import pytest
import torch

from ragen_apo.choices import LossForm
from ragen_apo.objectives.apo import (
    ApoSettings,
    apo_loss,
    divergence_metrics,
    kl_penalty,
    regression_loss,
    residual,
    residual_metrics,
    sequence_kl,
    value_metrics,
    weighted_loss,
)

SETTINGS = {
    "plain": {},
    "clamped": {"advantage_clamp": 0.3},
    "mean over tokens": {"length_normalization": "tokens"},
    "more KL": {"kl_coefficient": 0.2},
    "everything": {
        "advantage_clamp": 0.3,
        "length_normalization": "tokens",
        "kl_coefficient": 0.2,
    },
}


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Six sequences of up to nine tokens with holes in the mask, and one without any token."""
    mask_BT = torch.rand(6, 9) < 0.6
    mask_BT[4] = False
    return {
        "logprobs_BT": -torch.rand(6, 9),
        "reference_logprobs_BT": -torch.rand(6, 9),
        "mask_BT": mask_BT,
        "returns_B": torch.rand(6),
        "v_star_B": torch.rand(6),
    }


def loss_and_gradient(batch, *, rows=slice(None), num_sequences=6, **settings):
    logprobs_BT = batch["logprobs_BT"].clone().requires_grad_()
    rest = {name: tensor[rows] for name, tensor in batch.items() if name != "logprobs_BT"}
    output = apo_loss(
        logprobs_BT[rows],
        **rest,
        settings=ApoSettings(**{"beta2": 0.1, **settings}),
        num_sequences=num_sequences,
    )
    (gradient_BT,) = torch.autograd.grad(output.loss, logprobs_BT)
    return output.loss.detach(), gradient_BT


def test_a_hand_computed_loss():
    # Delta = (-0.5 + 0.7) + (-0.1 + 0.2) = 0.3;  A = (1 - 0.4) - 0.1 * 0.3 = 0.57
    # regression: 0.57^2 / (2 * 0.1) = 1.6245;  d/dlogp = -2 * 0.1 * 0.57 / (2 * 0.1) = -0.57
    # weighted: -0.57 * 0.3 = -0.171, with the same derivative -0.57
    batch = {
        "logprobs_BT": torch.tensor([[-0.5, -9.0, -0.1]]),
        "reference_logprobs_BT": torch.tensor([[-0.7, -1.0, -0.2]]),
        "mask_BT": torch.tensor([[True, False, True]]),
        "returns_B": torch.tensor([1.0]),
        "v_star_B": torch.tensor([0.4]),
    }
    for form, value in (("regression", 1.6245), ("weighted", -0.171)):
        loss, gradient_BT = loss_and_gradient(batch, loss=form, num_sequences=1)
        assert loss.item() == pytest.approx(value, abs=1e-12)
        assert gradient_BT.tolist() == [[pytest.approx(-0.57), 0.0, pytest.approx(-0.57)]]


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_both_forms_have_the_same_gradient_with_every_option(batch, options):
    _, regression_BT = loss_and_gradient(batch, loss="regression", **options)
    _, weighted_BT = loss_and_gradient(batch, loss="weighted", **options)
    assert regression_BT.abs().max() > 1e-3
    torch.testing.assert_close(regression_BT, weighted_BT, rtol=1e-13, atol=1e-15)


def test_the_gradient_is_that_of_the_papers_loss_over_two_beta(batch):
    beta = 0.1
    logprobs_BT = batch["logprobs_BT"].clone().requires_grad_()
    log_ratio_B = (batch["mask_BT"] * (logprobs_BT - batch["reference_logprobs_BT"])).sum(1)
    advantage_B = batch["returns_B"] - batch["v_star_B"]
    paper = (beta * log_ratio_B - advantage_B).square().mean() / (2 * beta)
    (expected_BT,) = torch.autograd.grad(paper, logprobs_BT)
    loss, gradient_BT = loss_and_gradient(batch, beta2=beta)
    torch.testing.assert_close(loss, paper.detach())
    torch.testing.assert_close(gradient_BT, expected_BT)


def test_an_advantage_that_is_not_held_constant_gives_another_gradient(batch):
    beta, mask_BT = 0.1, batch["mask_BT"]
    logprobs_BT = batch["logprobs_BT"].clone().requires_grad_()
    logprob_B = (mask_BT * logprobs_BT).sum(1)
    log_ratio_B = logprob_B - (mask_BT * batch["reference_logprobs_BT"]).sum(1)
    advantage_B = batch["returns_B"] - batch["v_star_B"] - beta * log_ratio_B
    gradient_of = {
        name: torch.autograd.grad(-(weight_B * logprob_B).mean(), logprobs_BT, retain_graph=True)[0]
        for name, weight_B in (("held", advantage_B.detach()), ("not held", advantage_B))
    }
    for form in get_args(LossForm):
        _, gradient_BT = loss_and_gradient(batch, loss=form, beta2=beta)
        torch.testing.assert_close(gradient_BT, gradient_of["held"])
        error = (gradient_of["not held"] - gradient_BT).norm() / gradient_BT.norm()
        assert error > 0.1


def test_a_bad_trajectory_is_pushed_down():
    # A = 0 - 0.5 = -0.5: clamping negative advantages at zero would be a different method.
    zeros_BT, mask_BT = torch.zeros(1, 2), torch.tensor([[True, True]])
    for form in get_args(LossForm):
        batch = {
            "logprobs_BT": zeros_BT,
            "reference_logprobs_BT": zeros_BT,
            "mask_BT": mask_BT,
            "returns_B": torch.tensor([0.0]),
            "v_star_B": torch.tensor([0.5]),
        }
        _, gradient_BT = loss_and_gradient(batch, loss=form, num_sequences=1)
        assert gradient_BT.tolist() == [[0.5, 0.5]]


def test_the_clamp_limits_what_one_sequence_can_do_on_both_sides():
    residual_B = torch.tensor([-2.0, -0.2, 0.0, 0.2, 2.0], requires_grad=True)
    loss_B = regression_loss(residual_B, beta2=0.5, advantage_clamp=0.3)
    (gradient_B,) = torch.autograd.grad(loss_B.sum(), residual_B)
    assert gradient_B.tolist() == pytest.approx([-0.6, -0.4, 0.0, 0.4, 0.6])  # 2 A / (2 beta2)
    # Inside A^2 = 0.04, outside 2 * 0.3 * 2 - 0.09 = 1.11, both over 2 beta2 = 1.
    assert loss_B.tolist() == pytest.approx([1.11, 0.04, 0.0, 0.04, 1.11])
    log_ratio_B = torch.zeros(5, requires_grad=True)
    weighted_B = weighted_loss(residual_B, log_ratio_B=log_ratio_B, advantage_clamp=0.3)
    (gradient_B,) = torch.autograd.grad(weighted_B.sum(), log_ratio_B)
    assert gradient_B.tolist() == pytest.approx([0.3, 0.2, 0.0, -0.2, -0.3])


def test_the_normalised_log_ratio_has_its_optimum_at_tokens_times_advantage_over_beta():
    # Both sequences have advantage 0.6 and beta2 = 0.1. Sum: Delta = 6. Mean: Delta = T * 6.
    advantage_over_beta, num_tokens = 6.0, torch.tensor([1, 3])
    mask_BT = torch.tensor([[True, False, False], [True, True, True]])
    for normalization, optimum_B in (
        ("none", torch.full((2,), advantage_over_beta)),
        ("tokens", advantage_over_beta * num_tokens),
    ):
        batch = {
            "logprobs_BT": mask_BT * (optimum_B / num_tokens)[:, None],
            "reference_logprobs_BT": torch.zeros(2, 3),
            "mask_BT": mask_BT,
            "returns_B": torch.tensor([1.0, 1.0]),
            "v_star_B": torch.tensor([0.4, 0.4]),
        }
        loss, gradient_BT = loss_and_gradient(
            batch, length_normalization=normalization, num_sequences=2
        )
        assert loss.item() == pytest.approx(0, abs=1e-12)
        torch.testing.assert_close(gradient_BT, torch.zeros(2, 3))


def on_policy_gradient(logits, per_outcome):
    """Exact expected gradient of a loss on samples of softmax(logits)."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    expected = (logprobs.detach().exp() * per_outcome(logprobs)).sum()
    return torch.autograd.grad(expected, logits)[0]


def test_the_kl_penalty_has_the_gradient_of_the_kl_and_other_estimators_do_not():
    logits, reference = torch.randn(5), torch.randn(5).log_softmax(0)

    def kl(logits):
        logprobs = logits.log_softmax(0)
        return (logprobs.exp() * (logprobs - reference)).sum()

    exact = torch.autograd.functional.jacobian(kl, logits)
    squared = on_policy_gradient(logits, lambda logprobs: kl_penalty(logprobs - reference))
    plain = on_policy_gradient(logits, lambda logprobs: logprobs - reference)
    exponential = on_policy_gradient(
        logits, lambda logprobs: torch.expm1(reference - logprobs) + logprobs - reference
    )
    torch.testing.assert_close(squared, exact)
    torch.testing.assert_close(plain, torch.zeros(5), rtol=0, atol=1e-14)
    assert (exponential - exact).norm() > 0.1 * exact.norm()


def test_a_kl_coefficient_adds_to_beta2_in_the_residual(batch):
    _, with_penalty_BT = loss_and_gradient(batch, beta2=0.1, kl_coefficient=0.2)
    _, larger_beta_BT = loss_and_gradient(batch, beta2=0.3)
    torch.testing.assert_close(with_penalty_BT, larger_beta_BT)


def test_the_kl_estimate_is_unbiased_on_policy_and_never_negative():
    logprobs, reference = torch.randn(5).log_softmax(0), torch.randn(5).log_softmax(0)
    estimates = sequence_kl(
        logprobs[:, None],
        reference_logprobs_BT=reference[:, None],
        mask_BT=torch.ones(5, 1, dtype=torch.bool),
    )
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    torch.testing.assert_close((logprobs.exp() * estimates).sum(), exact)
    assert (estimates >= 0).all()


@pytest.mark.parametrize("form", get_args(LossForm))
@pytest.mark.parametrize("wrong_by", [0.0, 0.3, -5.0])
def test_on_policy_any_baseline_gives_the_gradient_of_the_objective(form, wrong_by):
    # J = E[R] - beta2 KL(pi || pi_ref); the baseline costs variance, not bias.
    beta2, returns = 0.3, torch.rand(5)
    logits, reference = torch.randn(5), torch.randn(5).log_softmax(0)
    baseline = torch.full((5,), 0.5 + wrong_by)

    def objective(logits):
        logprobs = logits.log_softmax(0)
        return (logprobs.exp() * (returns - beta2 * (logprobs - reference))).sum()

    def loss(logprobs):
        log_ratio = logprobs - reference
        left = residual(log_ratio, returns_B=returns, v_star_B=baseline, beta2=beta2)
        if form == "regression":
            return regression_loss(left, beta2=beta2)
        return weighted_loss(left, log_ratio_B=log_ratio)

    torch.testing.assert_close(
        on_policy_gradient(logits, loss), -torch.autograd.functional.jacobian(objective, logits)
    )


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_micro_batches_add_up_to_the_batch(batch, options, size):
    loss, gradient_BT = loss_and_gradient(batch, **options)
    parts = [
        loss_and_gradient(batch, rows=slice(start, start + size), **options)
        for start in range(0, 6, size)
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), loss)
    torch.testing.assert_close(sum(part_BT for _, part_BT in parts), gradient_BT)


def test_workers_that_average_gradients_and_multiply_by_their_number_equal_one_worker(batch):
    _, gradient_BT = loss_and_gradient(batch)
    of_workers = [
        loss_and_gradient(batch, rows=slice(worker, None, 3))[1] * 3 for worker in range(3)
    ]
    torch.testing.assert_close(sum(of_workers) / 3, gradient_BT)


@pytest.mark.parametrize("padding", [0.0, -1e9, math.nan, -math.inf])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_padding_changes_neither_loss_nor_gradient_whatever_it_holds(batch, options, padding):
    loss, gradient_BT = loss_and_gradient(batch, **options)
    padded = dict(batch)
    for name in ("logprobs_BT", "reference_logprobs_BT"):
        padded[name] = torch.cat([batch[name], torch.full((6, 4), padding)], dim=1)
    no_tokens_BT = torch.zeros(6, 4, dtype=torch.bool)
    padded["mask_BT"] = torch.cat([batch["mask_BT"], no_tokens_BT], dim=1)
    padded_loss, padded_gradient_BT = loss_and_gradient(padded, **options)
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient_BT[:, :9], gradient_BT)
    assert (padded_gradient_BT[:, 9:] == 0).all()


def test_half_precision_logprobs_are_summed_in_float32(batch):
    for name in ("logprobs_BT", "reference_logprobs_BT"):
        batch[name] = batch[name].bfloat16()
    output = apo_loss(**batch, settings=ApoSettings(), num_sequences=6)
    difference_BT = batch["logprobs_BT"].float() - batch["reference_logprobs_BT"].float()
    log_ratio_B = (batch["mask_BT"] * difference_BT).sum(1)
    expected_B = residual(
        log_ratio_B, returns_B=batch["returns_B"], v_star_B=batch["v_star_B"], beta2=1e-3
    )
    assert output.residual.dtype is torch.float32
    torch.testing.assert_close(output.residual, expected_B, rtol=0, atol=1e-6)


def test_only_the_loss_carries_a_gradient_and_the_residual_is_per_sequence(batch):
    batch["logprobs_BT"].requires_grad_()
    batch["reference_logprobs_BT"].requires_grad_()
    output = apo_loss(**batch, settings=ApoSettings(length_normalization="tokens"), num_sequences=6)
    output.loss.backward()
    assert batch["reference_logprobs_BT"].grad is None
    assert output.residual.shape == (6,)
    assert not output.residual.requires_grad


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logprobs_BT", torch.zeros(6), r"logprobs_BT must have shape \(6, 9\), got \(6,\)"),
        ("reference_logprobs_BT", torch.zeros(6, 8), r"must have shape \(6, 9\), got \(6, 8\)"),
        ("mask_BT", torch.ones(6, 9), "mask_BT must be boolean"),
        ("returns_B", torch.zeros(6, 1), "returns_B must have one axis"),
        ("returns_B", torch.zeros(1), "returns_B must have 6 entries, got 1"),
        ("v_star_B", torch.full((6,), math.nan), "v_star_B must be finite"),
        ("num_sequences", 0, "whole batch, at least 1, got 0"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected(batch, name, value, message):
    arguments = {**batch, "settings": ApoSettings(), "num_sequences": 6, name: value}
    with pytest.raises(ValueError, match=message):
        apo_loss(**arguments)


def test_the_default_settings_are_the_papers():
    assert ApoSettings() == ApoSettings(
        beta2=1e-3,
        loss="regression",
        length_normalization="none",
        advantage_clamp=None,
        kl_coefficient=0.0,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta2": 0.0}, "beta2 must be positive"),
        ({"beta2": math.inf}, "beta2 must be positive and finite, got inf"),
        ({"beta2": math.nan}, "beta2 must be"),
        ({"loss": "ppo"}, "must be one of 'regression', 'weighted', got 'ppo'"),
        ({"length_normalization": "mean"}, "must be one of 'none', 'tokens', got 'mean'"),
        ({"advantage_clamp": 0.0}, "advantage_clamp must be positive or None"),
        ({"advantage_clamp": math.nan}, "advantage_clamp must be"),
        ({"kl_coefficient": -0.1}, "kl_coefficient must be 0 or positive"),
    ],
)
def test_settings_out_of_range_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        ApoSettings(**change)


VALUES = {
    "v_star_B": torch.tensor([0.9, 0.1, 0.3, 0.7]),
    "success_B": torch.tensor([True, False, False, True]),
}


def test_metrics_computed_by_hand():
    metrics = {
        **residual_metrics(torch.tensor([1.0, -1.0, 0.0, 2.0])),
        **divergence_metrics(
            log_ratio_B=torch.tensor([0.5, -3.0, 0.0, 0.5]),
            kl_B=torch.tensor([0.1, 0.2, 0.0, 0.1]),
            num_tokens_B=torch.tensor([3, 4, 1, 2]),
        ),
        **value_metrics(**VALUES),
    }
    assert metrics == pytest.approx(
        {
            "residual_mean": 0.5,
            "residual_variance": 1.25,  # (0.25 + 2.25 + 0.25 + 2.25) / 4
            "log_ratio_mean": -0.5,
            "log_ratio_max_abs": 3.0,
            "kl_per_sequence": 0.1,
            "kl_per_token": 0.04,  # 0.4 / 10
            "v_star_success_correlation": 3 / 10**0.5,  # 0.6 / sqrt(0.4 * 1)
        }
    )
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize("name", ["v_star_B", "success_B"])
def test_a_correlation_with_a_constant_is_left_out(name):
    assert value_metrics(**{**VALUES, name: torch.full((4,), 0.1)}) == {}
