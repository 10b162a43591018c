"""Turn-level A*-PO on a tree of two turns with three actions each, enumerated in float64.

Every path is one sequence of two tokens, each of which is a segment; the policy is a softmax over
the actions of each state and the reference is uniform.
"""

import itertools
import math
from statistics import fmean

import pytest
import torch

from ragen_apo.objectives.apo import ApoSettings, apo_loss
from ragen_apo.objectives.turn_level import (
    TurnLevelSettings,
    segment_residuals,
    segment_sums,
    traced,
    turn_level_loss,
)
from ragen_apo.values.state_values import segments, state_values
from tests.factories import episode, turn

BETA = 0.2
PATHS = list(itertools.product(range(3), range(3)))
FIRST = torch.tensor([first for first, _ in PATHS])
SECOND = torch.tensor([second for _, second in PATHS])


class Problem:
    """Random rewards, random policy, and values that are right for no policy at all."""

    def __init__(self, seed=0):
        draws = torch.Generator().manual_seed(seed)
        self.first_logits = torch.randn(3, generator=draws, requires_grad=True)
        self.second_logits = torch.randn(3, 3, generator=draws, requires_grad=True)
        first_rewards, second_rewards = (
            torch.rand(3, generator=draws),
            torch.rand(9, generator=draws),
        )
        self.rewards_BS = torch.stack([first_rewards[FIRST], second_rewards], dim=1)
        values = torch.rand(4, generator=draws)
        self.values_BS = torch.stack([values[3].expand(9), values[:3][FIRST]], dim=1)
        self.reference_BT = torch.full((9, 2), math.log(1 / 3))

    @property
    def parameters(self):
        return [self.first_logits, self.second_logits]

    def logprobs(self):
        first_B = self.first_logits.log_softmax(0)[FIRST]
        second_B = self.second_logits.log_softmax(1)[FIRST, SECOND]
        return torch.stack([first_B, second_B], dim=1)

    def turn_loss(self, rows, *, trace, values_BS=None, offset=0.0):
        values_BS = self.values_BS if values_BS is None else values_BS
        return turn_level_loss(
            self.logprobs()[rows],
            reference_logprobs_BT=self.reference_BT[rows],
            mask_BT=torch.ones(len(rows), 2, dtype=torch.bool),
            segment_BT=torch.tensor([[0, 1]]).expand(len(rows), 2),
            rewards_BS=self.rewards_BS[rows],
            values_BS=values_BS[rows],
            settings=TurnLevelSettings(beta2=BETA, trace=trace),
            num_sequences=1,
            offset=offset,
        ).loss

    def whole_loss(self, rows, *, form="weighted", offset=0.0):
        return apo_loss(
            self.logprobs()[rows],
            reference_logprobs_BT=self.reference_BT[rows],
            mask_BT=torch.ones(len(rows), 2, dtype=torch.bool),
            returns_B=self.rewards_BS[rows].sum(1),
            v_star_B=self.values_BS[rows, 0],
            settings=ApoSettings(beta2=BETA, loss=form),
            num_sequences=1,
            offset=offset,
        ).loss

    def gradient(self, loss):
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat(
            [(g if g is not None else torch.zeros_like(p)).flatten() for g, p in pairs]
        )

    def moments(self, loss_of_row):
        """Exact mean and total variance of the gradient of one on-policy sample."""
        weights_B = self.logprobs().sum(1).detach().exp()
        rows = torch.stack([self.gradient(loss_of_row([row])) for row in range(9)])
        mean = (weights_B[:, None] * rows).sum(0)
        return mean, (weights_B * (rows - mean).square().sum(1)).sum().item()


@pytest.mark.parametrize("seed", range(3))
def test_with_trace_one_the_expected_gradient_is_that_of_the_trajectory_form(seed):
    problem = Problem(seed)
    turn_mean, _ = problem.moments(lambda rows: problem.turn_loss(rows, trace=1.0))
    whole_mean, _ = problem.moments(problem.whole_loss)
    torch.testing.assert_close(turn_mean, whole_mean, rtol=0, atol=1e-12)
    assert whole_mean.norm() > 1e-3
    biased_mean, _ = problem.moments(lambda rows: problem.turn_loss(rows, trace=0.0))
    assert (biased_mean - whole_mean).norm() > 1e-3, "wrong values bias the naive form"


@pytest.mark.parametrize(("trace", "gain"), [(0.0, 0.442), (0.9, 0.017), (1.0, -0.03)])
def test_with_luck_only_trace_one_goes_by_what_a_choice_pays_on_average(trace, gain):
    """The first turn takes 0.3 for sure, or goes to a state whose one turn pays 1 in 27 of 100.

    V of that state is 0.2 log(0.73 + 0.27 e^5) = 0.742, so the expected advantage of going there
    over taking 0.3 is (1 - trace) 0.742 + trace 0.27 - 0.3: below 0 only with trace near 1.
    """
    returns = [1.0] * 27 + [0.0] * 73
    gambles = [episode(turn(state_key="start"), turn(r, state_key="wheel")) for r in returns]
    safe = episode(turn(0.3, state_key="start"))
    values = state_values([*gambles, safe], beta=BETA, min_visits=2)
    assert values["wheel"] == pytest.approx(0.742, abs=5e-4)

    def first_advantage(played):
        parts = segments(played, task_value=values["start"], values=values)
        residual_1S = segment_residuals(
            torch.zeros(1, len(parts)),
            rewards_BS=torch.tensor([[part.reward for part in parts]]),
            values_BS=torch.tensor([[part.value for part in parts]]),
            beta2=BETA,
        )
        return traced(residual_1S, trace=trace)[0, 0].item()

    found = fmean(map(first_advantage, gambles)) - first_advantage(safe)
    assert found == pytest.approx(gain, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_values_of_the_present_policy_lower_the_variance_at_trace_one(seed):
    problem = Problem(seed)
    with torch.no_grad():
        first_B, second_B = problem.logprobs().unbind(1)
        soft_B = problem.rewards_BS[:, 1] - BETA * (second_B + math.log(3))
        second_values = (second_B.exp() * soft_B).reshape(3, 3).sum(1)
        q = problem.rewards_BS[::3, 0] - BETA * (first_B[::3] + math.log(3)) + second_values
        first_value = (first_B[::3].exp() * q).sum()
        values_BS = torch.stack([first_value.expand(9), second_values[FIRST]], dim=1)
    _, turn = problem.moments(lambda rows: problem.turn_loss(rows, trace=1.0, values_BS=values_BS))
    problem.values_BS = values_BS
    _, whole = problem.moments(problem.whole_loss)
    assert turn < whole


@pytest.mark.parametrize("form", ["weighted", "regression", "turns", "turns, trace 0.5"])
def test_an_offset_changes_no_expected_gradient_and_the_mean_residual_lowers_its_variance(form):
    problem = Problem()
    # A baseline that is far too high, as V* is once a policy fails where the reference did not.
    problem.values_BS = problem.values_BS + torch.tensor([3.0, 3.0])

    def loss(rows, offset=0.0):
        if form.startswith("turns"):
            trace = 0.5 if "0.5" in form else 1.0
            return problem.turn_loss(rows, trace=trace, offset=offset)
        return problem.whole_loss(rows, form=form, offset=offset)

    residual_B = problem.rewards_BS.sum(1) - problem.values_BS[:, 0]
    residual_B = residual_B - BETA * (problem.logprobs().detach() - problem.reference_BT).sum(1)
    mean_residual = (problem.logprobs().sum(1).detach().exp() * residual_B).sum().item()
    assert mean_residual < -1
    expected, variance = problem.moments(loss)
    for offset in (mean_residual, 0.7):
        mean, _ = problem.moments(lambda rows, offset=offset: loss(rows, offset))
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5)
    _, centered = problem.moments(lambda rows: loss(rows, mean_residual))
    assert centered < variance / 2


def test_what_is_reported_is_the_residual_without_the_offset():
    problem = Problem()
    arguments = {
        "reference_logprobs_BT": problem.reference_BT,
        "mask_BT": torch.ones(9, 2, dtype=torch.bool),
        "returns_B": problem.rewards_BS.sum(1),
        "v_star_B": problem.values_BS[:, 0],
        "settings": ApoSettings(beta2=BETA, advantage_clamp=0.5),
        "num_sequences": 9,
    }
    plain = apo_loss(problem.logprobs(), **arguments)
    shifted = apo_loss(problem.logprobs(), **arguments, offset=0.3)
    torch.testing.assert_close(shifted.residual, plain.residual)
    arguments["v_star_B"] = arguments["v_star_B"] + 0.3
    raised = apo_loss(problem.logprobs(), **arguments)
    torch.testing.assert_close(shifted.loss, raised.loss, msg="clamped after the offset")


def test_trace_zero_has_the_gradient_of_the_squared_segment_residuals():
    problem = Problem()
    log_ratio_BS = problem.logprobs() - problem.reference_BT
    residual_BS = segment_residuals(
        log_ratio_BS, rewards_BS=problem.rewards_BS, values_BS=problem.values_BS, beta2=BETA
    )
    square = residual_BS.square().sum() / (2 * BETA)
    torch.testing.assert_close(
        problem.gradient(problem.turn_loss(list(range(9)), trace=0.0)), problem.gradient(square)
    )


def test_one_segment_is_the_trajectory_form():
    problem = Problem()
    one = turn_level_loss(
        problem.logprobs(),
        reference_logprobs_BT=problem.reference_BT,
        mask_BT=torch.ones(9, 2, dtype=torch.bool),
        segment_BT=torch.zeros(9, 2, dtype=torch.int64),
        rewards_BS=problem.rewards_BS.sum(1, keepdim=True),
        values_BS=problem.values_BS[:, :1],
        settings=TurnLevelSettings(beta2=BETA, trace=0.3),
        num_sequences=9,
    )
    whole = problem.whole_loss(list(range(9))) / 9
    torch.testing.assert_close(one.loss, whole)
    torch.testing.assert_close(problem.gradient(one.loss), problem.gradient(whole))


def test_residuals_add_up_to_the_residual_of_the_trajectory():
    problem = Problem()
    log_ratio_BS = torch.randn(9, 2)
    residual_BS = segment_residuals(
        log_ratio_BS, rewards_BS=problem.rewards_BS, values_BS=problem.values_BS, beta2=BETA
    )
    whole_B = problem.rewards_BS.sum(1) - problem.values_BS[:, 0] - BETA * log_ratio_BS.sum(1)
    torch.testing.assert_close(residual_BS.sum(1), whole_B, rtol=0, atol=1e-12)
    torch.testing.assert_close(traced(residual_BS, trace=1.0)[:, 0], whole_B, rtol=0, atol=1e-12)
    torch.testing.assert_close(traced(residual_BS, trace=0.0), residual_BS)


def test_what_stands_outside_the_mask_does_not_matter():
    token_BT = torch.tensor([[1.0, math.nan, 2.0, 4.0]], requires_grad=True)
    mask_BT = torch.tensor([[True, False, True, True]])
    segment_BT = torch.tensor([[0, -7, 0, 2]])
    sums_BS = segment_sums(token_BT, mask_BT=mask_BT, segment_BT=segment_BT, like=torch.zeros(1, 3))
    assert sums_BS.tolist() == [[3.0, 0.0, 4.0]]
    sums_BS.sum().backward()
    assert token_BT.grad is not None
    assert token_BT.grad.tolist() == [[1.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_clamp_bounds_what_one_segment_contributes(sign):
    problem = Problem()
    problem.rewards_BS = problem.rewards_BS * 100 * sign
    clamped = turn_level_loss(
        problem.logprobs(),
        reference_logprobs_BT=problem.reference_BT,
        mask_BT=torch.ones(9, 2, dtype=torch.bool),
        segment_BT=torch.tensor([[0, 1]]).expand(9, 2),
        rewards_BS=problem.rewards_BS,
        values_BS=problem.values_BS,
        settings=TurnLevelSettings(beta2=BETA, trace=1.0, advantage_clamp=0.5),
        num_sequences=9,
    )
    expected = -sign * (0.5 * (problem.logprobs() - problem.reference_BT)).sum() / 9
    torch.testing.assert_close(clamped.loss, expected)


@pytest.mark.parametrize("trace", [-0.1, 1.5])
def test_a_trace_out_of_range_is_refused(trace):
    with pytest.raises(ValueError, match="trace must lie between 0 and 1"):
        Problem().turn_loss([0], trace=trace)


def test_reference_logprobs_of_another_shape_are_refused():
    problem = Problem()
    problem.reference_BT = problem.reference_BT[:, :1]  # would be used for both tokens
    with pytest.raises(ValueError, match=r"reference_logprobs_BT must have shape \(9, 2\)"):
        problem.turn_loss(list(range(9)), trace=1.0)
