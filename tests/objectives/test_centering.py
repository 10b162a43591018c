"""Centred residuals, enumerated in float64: all batches of a tabular policy, with their chances.

A tree of two turns. The third first action ends the episode, so that trajectories have one segment
or two. Rewards, policy and values are random, the reference is uniform.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ragen_apo.objectives.apo import ApoSettings, apo_loss, line_of_others, mean_of_others, residual
from ragen_apo.objectives.turn_level import (
    TurnLevelSettings,
    segment_residuals,
    traced,
    turn_level_loss,
)

BETA = 0.2
PATHS = ((0, 0), (0, 1), (1, 0), (1, 1), (2, None))
TRACE = 0.6
Offsets = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The offsets of a batch [B, S] from its residuals, its values and which of them there are."""


class Tree:
    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(3)
        self.first_logits = torch.randn(3, generator=draws, requires_grad=True)
        self.second_logits = torch.randn(2, 2, generator=draws, requires_grad=True)
        self.present_BS = torch.tensor([[True, second is not None] for _, second in PATHS])
        self.rewards_BS = torch.rand(5, 2, generator=draws) * self.present_BS
        state_values = torch.rand(3, generator=draws)
        self.values_BS = (
            torch.stack(
                [state_values[2].expand(5), state_values[torch.tensor([0, 0, 1, 1, 0])]], dim=1
            )
            * self.present_BS
        )
        reference = [math.log(1 / 3), math.log(1 / 2)]
        self.reference_BT = torch.tensor(reference).expand(5, 2) * self.present_BS

    def logprobs(self) -> Tensor:
        first, second = self.first_logits.log_softmax(0), self.second_logits.log_softmax(1)
        rows = [
            torch.stack([first[one], first.new_zeros(()) if two is None else second[one, two]])
            for one, two in PATHS
        ]
        return torch.stack(rows)

    def advantages(self, form: str) -> tuple[Tensor, Tensor]:
        """What multiplies the gradient of log pi [B, S], and which of it there is."""
        log_ratio_BS = (self.logprobs() - self.reference_BT).detach()
        if form == "turns":
            residual_BS = segment_residuals(
                log_ratio_BS, rewards_BS=self.rewards_BS, values_BS=self.values_BS, beta2=BETA
            )
            return traced(residual_BS, trace=TRACE), self.present_BS
        whole_B = residual(
            log_ratio_BS.sum(1),
            returns_B=self.rewards_BS.sum(1),
            v_star_B=self.values_BS[:, 0],
            beta2=BETA,
        )
        return whole_B[:, None], torch.ones(5, 1, dtype=torch.bool)

    def gradient(self, form: str, rows: list[int], offset_BS: Tensor) -> Tensor:
        """Of the loss of one batch, in the code that trains."""
        common = {
            "reference_logprobs_BT": self.reference_BT[rows],
            "mask_BT": self.present_BS[rows],
            "num_sequences": len(rows),
        }
        if form == "turns":
            loss = turn_level_loss(
                self.logprobs()[rows],
                **common,
                segment_BT=torch.tensor([[0, 1]]).expand(len(rows), 2),
                rewards_BS=self.rewards_BS[rows],
                values_BS=self.values_BS[rows],
                settings=TurnLevelSettings(beta2=BETA, trace=TRACE),
                offset=offset_BS,
            ).loss
        else:
            loss = apo_loss(
                self.logprobs()[rows],
                **common,
                returns_B=self.rewards_BS[rows].sum(1),
                v_star_B=self.values_BS[rows, 0],
                settings=ApoSettings(beta2=BETA, loss=form),
                offset=offset_BS[:, 0],
            ).loss
        parts = torch.autograd.grad(
            loss, [self.first_logits, self.second_logits], materialize_grads=True
        )
        return torch.cat([part.flatten() for part in parts])

    def expected_gradient(self, form: str, *, size: int, offsets: Offsets | None) -> Tensor:
        """Over all batches of `size` trajectories, each with its probability."""
        chance_B = self.logprobs().sum(1).exp().detach()
        advantage_BS, present_BS = self.advantages(form)
        total = torch.zeros(7)
        for batch in itertools.product(range(5), repeat=size):
            rows = list(batch)
            offset_BS = torch.zeros_like(advantage_BS[rows])
            if offsets:
                values_BS = self.values_BS[rows, : advantage_BS.shape[1]]
                offset_BS = offsets(advantage_BS[rows], values_BS, present_BS[rows])
            total += chance_B[rows].prod() * self.gradient(form, rows, offset_BS)
        return total


def of_others(residual_BS: Tensor, values_BS: Tensor, present_BS: Tensor) -> Tensor:
    return mean_of_others(residual_BS, present_BS=present_BS)[:, None].expand_as(residual_BS)


def line(residual_BS: Tensor, values_BS: Tensor, present_BS: Tensor) -> Tensor:
    return line_of_others(residual_BS, values_BS=values_BS, present_BS=present_BS)


def of_all(residual_BS: Tensor, values_BS: Tensor, present_BS: Tensor) -> Tensor:
    return residual_BS[present_BS].mean().expand_as(residual_BS)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("form", "offsets"),
    [("regression", of_others), ("weighted", of_others), ("turns", of_others), ("turns", line)],
)
def test_offsets_made_of_the_others_leave_the_expected_gradient_as_it_was(
    form: str, offsets: Offsets, size: int
) -> None:
    tree = Tree()
    plain = tree.expected_gradient(form, size=1, offsets=None)
    assert plain.norm() > 0.05
    centred = tree.expected_gradient(form, size=size, offsets=offsets)
    torch.testing.assert_close(centred, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("form", ["regression", "weighted"])
def test_centring_by_the_mean_of_all_keeps_one_minus_one_over_the_batch(
    form: str, size: int
) -> None:
    tree = Tree()
    plain = tree.expected_gradient(form, size=1, offsets=None)
    centred = tree.expected_gradient(form, size=size, offsets=of_all)
    torch.testing.assert_close(centred, (1 - 1 / size) * plain, rtol=0, atol=1e-12)


def test_by_turn_it_is_not_enough_to_leave_the_segment_out() -> None:
    tree = Tree()

    def of_other_segments(residual_BS: Tensor, values_BS: Tensor, present_BS: Tensor) -> Tensor:
        total, count = residual_BS[present_BS].sum(), present_BS.sum()
        return (total - residual_BS) / (count - 1)

    chance_B = tree.logprobs().sum(1).exp().detach()
    advantage_BS, present_BS = tree.advantages("turns")
    expected = {"the segment": torch.zeros(7), "the trajectory": torch.zeros(7)}
    leaving_out = {"the segment": of_other_segments, "the trajectory": of_others}
    for batch in itertools.product(range(5), repeat=2):
        rows = list(batch)
        for name, offsets in leaving_out.items():
            offset_BS = offsets(advantage_BS[rows], tree.values_BS[rows], present_BS[rows])
            weight_BS = (advantage_BS[rows] - offset_BS) * present_BS[rows]
            loss = -(weight_BS * tree.logprobs()[rows]).sum() / 2
            parts = torch.autograd.grad(
                loss, [tree.first_logits, tree.second_logits], materialize_grads=True
            )
            flat = torch.cat([part.flatten() for part in parts])
            expected[name] += chance_B[rows].prod() * flat
    plain = tree.expected_gradient("turns", size=1, offsets=None)
    torch.testing.assert_close(expected["the trajectory"], plain, rtol=0, atol=1e-12)
    assert (expected["the segment"] - plain).norm() > 0.05 * plain.norm()


def test_the_mean_of_others_leaves_the_whole_row_out() -> None:
    values_BS = torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, 7.0]])
    present_BS = torch.tensor([[True, True], [True, False], [True, True]])
    expected = [(3 + 5 + 7) / 3, (1 + 2 + 5 + 7) / 4, (1 + 2 + 3) / 3]
    assert mean_of_others(values_BS, present_BS=present_BS).tolist() == expected


def test_the_line_is_the_least_squares_fit_to_the_other_rows() -> None:
    draws = torch.Generator().manual_seed(0)
    residual_BS = torch.randn(6, 3, generator=draws) + 100
    values_BS = torch.randn(6, 3, generator=draws) - 50
    present_BS = torch.rand(6, 3, generator=draws) < 0.7
    present_BS[:, 0] = True
    offset_BS = line_of_others(residual_BS, values_BS=values_BS, present_BS=present_BS)
    for row in range(6):
        others = present_BS.clone()
        others[row] = False
        slope, start = np.polyfit(values_BS[others].numpy(), residual_BS[others].numpy(), 1)
        own = values_BS[row].clamp(values_BS[others].min(), values_BS[others].max())
        expected = start + slope * own
        torch.testing.assert_close(offset_BS[row], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("is_solved", [True, False])
def test_a_value_far_from_the_others_gets_no_offset_beyond_their_range(is_solved: bool) -> None:
    """One task of 32 that the reference solved, or one that it failed: read at its V*, a line
    through the others' narrow range would say many times the largest return."""
    draws = torch.Generator().manual_seed(0)
    narrow_B1 = 0.05 * torch.rand(32, 1, generator=draws, dtype=torch.float64)
    values_B1 = narrow_B1 - 0.05 if is_solved else 1 - narrow_B1
    values_B1[7] = 1.0 if is_solved else 0.0
    returns_B1 = (torch.rand(32, 1, generator=draws) < 0.5).double()
    residual_B1 = returns_B1 - values_B1
    present_B1 = torch.ones(32, 1, dtype=torch.bool)
    slope, start = np.polyfit(np.delete(values_B1.numpy(), 7), np.delete(residual_B1.numpy(), 7), 1)
    assert abs(start + slope * values_B1[7]) > 2
    offset_B1 = line(residual_B1, values_B1, present_B1)
    assert offset_B1.abs().max() < 1
    centred, fitted = (
        (residual_B1 - offset)[:, 0].square().mean()
        for offset in (of_others(residual_B1, values_B1, present_B1), offset_B1)
    )
    assert fitted < 1.3 * centred


def test_of_equal_values_the_line_is_the_mean() -> None:
    residual_B1 = torch.tensor([[1.0], [2.0], [6.0]])
    arguments = {"present_BS": torch.ones(3, 1, dtype=torch.bool)}
    flat = line_of_others(residual_B1, values_BS=torch.full((3, 1), 0.1), **arguments)
    assert flat[:, 0].tolist() == pytest.approx([4.0, 3.5, 1.5])


@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e4, 1e8])
def test_the_line_is_the_same_in_every_unit_of_returns(unit: float) -> None:
    """One value that differs: without it the variance is a rest of rounding, which grows with the
    unit; and values that spread do so in a small one as well."""
    draws = torch.Generator().manual_seed(0)
    residual_B1 = torch.rand(8, 1, generator=draws)
    arguments = {"present_BS": torch.ones(8, 1, dtype=torch.bool)}
    one_other = torch.full((8, 1), 0.98468)
    one_other[0] = 0.08519
    for values_B1 in (one_other, torch.rand(8, 1, generator=draws)):
        plain = line_of_others(residual_B1, values_BS=values_B1, **arguments)
        scaled = line_of_others(residual_B1 * unit, values_BS=values_B1 * unit, **arguments)
        torch.testing.assert_close(scaled / unit, plain, rtol=1e-5, atol=1e-6)
    assert plain.std() > 0


@pytest.mark.parametrize(("middle", "spread"), [(1e5, 1.0), (1e6, 5.0), (1e4, 0.05), (0.0, 1e-6)])
def test_values_far_from_zero_have_a_slope(middle: float, spread: float) -> None:
    draws = torch.Generator().manual_seed(1)
    values_B1 = middle + spread * torch.rand(8, 1, generator=draws)
    residual_B1 = 2 * (values_B1 - middle)
    present_BS = torch.ones(8, 1, dtype=torch.bool)
    offset = line_of_others(residual_B1, values_BS=values_B1, present_BS=present_BS)
    second, last_but_one = values_B1.sort(dim=0).values[[1, -2]]  # the ends are read there
    expected = 2 * (values_B1.clamp(second, last_but_one) - middle)
    torch.testing.assert_close(offset, expected, rtol=0, atol=1e-2 * spread)


@pytest.mark.parametrize("size", [3, 16, 64])
def test_one_other_value_gives_no_slope_to_the_rows_that_are_equal(size: int) -> None:
    """Without it all values are one, and their variance in float32 a rest of rounding."""
    draws = torch.Generator().manual_seed(size)
    values_B1 = torch.full((size, 1), 0.1234567, dtype=torch.float32)
    values_B1[0] = 0.98765
    residual_B1 = torch.randn(size, 1, generator=draws).float()
    present_B1 = torch.ones(size, 1, dtype=torch.bool)
    offset_B1 = line(residual_B1, values_B1, present_B1)
    assert offset_B1.dtype == torch.float32
    assert offset_B1[0].item() == pytest.approx(residual_B1[1:].mean().item(), abs=1e-6)


def test_values_that_are_noise_leave_the_residuals_variance_that_of_the_returns() -> None:
    """V* of one sample each, of a reference that the policy has left behind."""
    draws = torch.Generator().manual_seed(1)
    returns_B1 = (torch.rand(400, 1, generator=draws) < 0.9).double()
    noise_B1 = (torch.rand(400, 1, generator=draws) < 0.4).double()
    present_B1 = torch.ones(400, 1, dtype=torch.bool)
    residual_B1 = returns_B1 - noise_B1
    centred = residual_B1 - of_others(residual_B1, noise_B1, present_B1)
    fitted = residual_B1 - line(residual_B1, noise_B1, present_B1)
    assert centred.var() > 3 * returns_B1.var()
    assert fitted.var() < 1.03 * returns_B1.var()


def test_a_trajectory_alone_has_no_others() -> None:
    with pytest.raises(ValueError, match="needs at least 2 of them, got 1"):
        mean_of_others(torch.ones(1, 3), present_BS=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"every sequence needs a value, got \[1, 0\]"):
        mean_of_others(torch.ones(2, 1), present_BS=torch.tensor([[True], [False]]))
