"""GAE over tokens and over turns against slow recomputations, and the critic's losses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.objectives.ppo import bi_level_gae, clipped_value_loss, explained_variance, gae


def make_batch(seed, *, num_sequences=4, num_positions=12, inner_rewards=False):
    """Random turns: observations of random length, then sampled tokens; the last row has none."""
    draws = torch.Generator().manual_seed(seed)
    turn_index_BT = torch.full((num_sequences, num_positions), -1)
    rewards_BT = torch.zeros(num_sequences, num_positions)
    for row in range(num_sequences - 1):
        position, turn = 0, 0
        while True:
            start = position + int(torch.randint(0, 3, (), generator=draws))
            position = start + int(torch.randint(1, 4, (), generator=draws))
            if position > num_positions:
                break
            turn_index_BT[row, start:position] = turn
            rewards_BT[row, position - 1] = torch.rand((), generator=draws)
            turn += 1
    mask_BT = turn_index_BT >= 0
    if inner_rewards:
        noise_BT = torch.rand(mask_BT.shape, generator=draws)
        rewards_BT = torch.where(mask_BT, rewards_BT - 0.1 * noise_BT, rewards_BT)
    return {
        "rewards_BT": rewards_BT,
        "values_BT": torch.rand(mask_BT.shape, generator=draws),
        "mask_BT": mask_BT,
        "turn_index_BT": turn_index_BT,
    }


def without_turns(batch):
    return {name: tensor for name, tensor in batch.items() if name != "turn_index_BT"}


def slow_gae(rewards, values, *, gamma, gae_lambda):
    """The definition: A_t = sum_l (gamma lambda)^l delta_{t+l}, over a list of sampled tokens."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * gae_lambda) ** j * delta for j, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def slow_bi_level(rewards, values, turns, *, token, turn):
    """Advantages of a list of sampled tokens; `token` and `turn` are (gamma, lambda)."""
    numbers = sorted(set(turns))
    last = [max(t for t, k in enumerate(turns) if k == number) for number in numbers]
    inner = [
        sum(rewards[t] for t, k in enumerate(turns) if k == number and t not in last)
        for number in numbers
    ]
    ends = [values[t] for t in last]
    reached = [*(i + v for i, v in zip(inner[1:], ends[1:], strict=True)), 0.0]
    deltas = [rewards[t] + turn[0] * n - v for t, v, n in zip(last, ends, reached, strict=True)]
    advantages = [0.0] * len(turns)
    for k, position in enumerate(last):
        decay = turn[0] * turn[1]
        advantages[position] = sum(decay**j * delta for j, delta in enumerate(deltas[k:]))
    for t in reversed(range(len(turns))):
        if t not in last:
            delta = rewards[t] + token[0] * values[t + 1] - values[t]
            advantages[t] = delta + token[0] * token[1] * advantages[t + 1]
    return advantages


def sampled(batch, row, name):
    return batch[name][row][batch["mask_BT"][row]].tolist()


constants = st.floats(0, 1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=constants, gae_lambda=constants)
def test_gae_equals_its_definition(seed, gamma, gae_lambda):
    batch = make_batch(seed, inner_rewards=True)
    estimate = gae(**without_turns(batch), gamma=gamma, gae_lambda=gae_lambda)
    expected_BT = torch.zeros(4, 12)
    for row in range(3):
        rewards, values = sampled(batch, row, "rewards_BT"), sampled(batch, row, "values_BT")
        expected_BT[row, batch["mask_BT"][row]] = torch.tensor(
            slow_gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
        )
    torch.testing.assert_close(estimate.advantages_BT, expected_BT)
    returns_BT = torch.where(batch["mask_BT"], expected_BT + batch["values_BT"], 0.0)
    torch.testing.assert_close(estimate.returns_BT, returns_BT)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    token=st.tuples(constants, constants),
    turn=st.tuples(constants, constants),
    inner_rewards=st.booleans(),
)
def test_bi_level_gae_equals_its_definition(seed, token, turn, inner_rewards):
    batch = make_batch(seed, inner_rewards=inner_rewards)
    estimate = bi_level_gae(
        **batch, gamma=token[0], gae_lambda=token[1], gamma_turn=turn[0], lambda_turn=turn[1]
    )
    expected_BT = torch.zeros(4, 12)
    for row in range(3):
        names = ("rewards_BT", "values_BT", "turn_index_BT")
        lists = [sampled(batch, row, name) for name in names]
        expected_BT[row, batch["mask_BT"][row]] = torch.tensor(
            slow_bi_level(*lists, token=token, turn=turn)
        )
    torch.testing.assert_close(estimate.advantages_BT, expected_BT)


@pytest.mark.parametrize("inner_rewards", [False, True])
def test_with_all_constants_one_both_levels_are_the_return_minus_the_value(inner_rewards):
    batch = make_batch(3, inner_rewards=inner_rewards)
    tokens, turns = gae(**without_turns(batch)), bi_level_gae(**batch)
    torch.testing.assert_close(tokens.advantages_BT, turns.advantages_BT)
    to_go_BT = batch["rewards_BT"].flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(
        tokens.returns_BT, torch.where(batch["mask_BT"], to_go_BT, 0.0), rtol=0, atol=1e-12
    )


def test_a_hand_computed_pair_of_turns():
    # Two turns of two tokens with an observation between them; rewards 0.5 and 1, values below.
    batch = {
        "rewards_BT": torch.tensor([[0.0, 0.5, math.nan, 0.0, 1.0]]),
        "values_BT": torch.tensor([[0.1, 0.2, math.nan, 0.3, 0.4]]),
        "mask_BT": torch.tensor([[True, True, False, True, True]]),
        "turn_index_BT": torch.tensor([[0, 0, -1, 1, 1]]),
    }
    # Tokens, gamma 1, lambda 0.5: 1 - 0.4 = 0.6;  0.4 - 0.3 + 0.3 = 0.4;
    # 0.5 + 0.3 - 0.2 + 0.2 = 0.8;  0.2 - 0.1 + 0.4 = 0.5.
    tokens = gae(**without_turns(batch), gae_lambda=0.5)
    assert tokens.advantages_BT.tolist() == [pytest.approx([0.5, 0.8, 0, 0.4, 0.6])]
    assert tokens.returns_BT.tolist() == [pytest.approx([0.6, 1.0, 0, 0.7, 1.0])]
    # Turns, gamma_turn 0.9, lambda_turn 1: 0.6;  0.5 + 0.9 * 0.4 - 0.2 + 0.9 * 0.6 = 1.2; within
    # the turns gamma = lambda = 1: 0.4 - 0.3 + 0.6 = 0.7;  0.2 - 0.1 + 1.2 = 1.3.
    turns = bi_level_gae(**batch, gamma_turn=0.9)
    assert turns.advantages_BT.tolist() == [pytest.approx([1.3, 1.2, 0, 0.7, 0.6])]


def test_one_token_gets_reward_minus_value():
    mask_BT, turn_index_BT = torch.tensor([[True]]), torch.tensor([[0]])
    given = {"rewards_BT": torch.tensor([[1.0]]), "values_BT": torch.tensor([[0.25]])}
    for estimate in (
        gae(**given, mask_BT=mask_BT, gamma=0.5),
        bi_level_gae(**given, mask_BT=mask_BT, turn_index_BT=turn_index_BT, gamma_turn=0.5),
    ):
        assert estimate.advantages_BT.item() == 0.75
        assert estimate.returns_BT.item() == 1.0


@pytest.mark.parametrize("level", ["tokens", "turns"])
def test_what_was_not_sampled_is_not_seen(level):
    batch = make_batch(5, inner_rewards=True)

    def estimate():
        if level == "turns":
            return bi_level_gae(**batch, gamma=0.9, gae_lambda=0.8, gamma_turn=0.7)
        return gae(**without_turns(batch), gamma=0.9, gae_lambda=0.8)

    before = estimate()
    for name in ("rewards_BT", "values_BT"):
        batch[name] = torch.where(batch["mask_BT"], batch[name], math.nan)
    after = estimate()
    assert torch.equal(before.advantages_BT, after.advantages_BT)
    assert torch.equal(before.returns_BT, after.returns_BT)
    assert after.advantages_BT[~batch["mask_BT"]].count_nonzero() == 0


def test_advantages_are_constants_to_the_gradient():
    batch = make_batch(1)
    batch["values_BT"].requires_grad_()
    assert not gae(**without_turns(batch)).advantages_BT.requires_grad
    assert not bi_level_gae(**batch).returns_BT.requires_grad


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_equals_a_slow_recomputation(clip):
    mask_BT = torch.rand(4, 7) < 0.7
    values_BT, old_BT, returns_BT = torch.rand(3, 4, 7)
    dirty = [torch.where(mask_BT, tensor, math.nan) for tensor in (values_BT, old_BT, returns_BT)]
    loss_BT = clipped_value_loss(
        dirty[0], old_values_BT=dirty[1], returns_BT=dirty[2], mask_BT=mask_BT, clip=clip
    )
    for row in range(4):
        for column in range(7):
            v, old, target = (x[row, column].item() for x in (values_BT, old_BT, returns_BT))
            expected = (v - target) ** 2 / 2
            if clip is not None:
                near = old + min(max(v - old, -clip), clip)
                expected = max(expected, (near - target) ** 2 / 2)
            expected *= mask_BT[row, column].item()
            assert loss_BT[row, column].item() == pytest.approx(expected, abs=1e-12)


def test_the_value_clip_stops_a_critic_that_has_moved_enough_towards_the_return():
    # V_old = 0, R = 1, clip 0.2: at V = 0.1 the gradient is V - R; at 0.5 none; moving away, full.
    values_BT = torch.tensor([[0.1, 0.5, -0.5, math.nan]], requires_grad=True)
    loss_BT = clipped_value_loss(
        values_BT,
        old_values_BT=torch.zeros(1, 4),
        returns_BT=torch.ones(1, 4),
        mask_BT=torch.tensor([[True, True, True, False]]),
    )
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), values_BT)
    assert gradient_BT.tolist() == [pytest.approx([-0.9, 0, -1.5, 0])]


def test_the_value_loss_has_no_gradient_for_old_values_and_returns():
    values_BT, old_BT, returns_BT = (torch.rand(2, 3).requires_grad_() for _ in range(3))
    clipped_value_loss(
        values_BT,
        old_values_BT=old_BT,
        returns_BT=returns_BT,
        mask_BT=torch.ones(2, 3, dtype=torch.bool),
    ).sum().backward()
    assert values_BT.grad is not None
    assert old_BT.grad is None and returns_BT.grad is None


def test_explained_variance_of_a_perfect_a_silent_and_a_harmful_critic():
    returns_BT = torch.tensor([[1.0, 2.0, 3.0, math.nan]])
    mask_BT = torch.tensor([[True, True, True, False]])

    def explained(values):
        values_BT = torch.tensor([[*values, math.nan]])
        return explained_variance(values_BT, returns_BT=returns_BT, mask_BT=mask_BT)

    assert explained([1.0, 2.0, 3.0]) == pytest.approx(1)
    assert explained([7.0, 7.0, 7.0]) == pytest.approx(0)
    assert explained([3.0, 2.0, 1.0]) == pytest.approx(-3)  # R - V = -2, 0, 2: four times the var
    same_BT = torch.ones(1, 4)
    assert math.isnan(explained_variance(same_BT, returns_BT=same_BT, mask_BT=mask_BT))
    nothing_BT = torch.zeros_like(mask_BT)
    assert math.isnan(explained_variance(same_BT, returns_BT=returns_BT, mask_BT=nothing_BT))
    for wrong, message in (
        ({"values_BT": same_BT[:, 1:]}, "values_BT must have shape"),
        ({"returns_BT": same_BT[:, 1:]}, "returns_BT must have shape"),
        ({"values_BT": same_BT * math.nan}, "values_BT must be finite"),
        ({"returns_BT": same_BT * math.inf}, "returns_BT must be finite"),
    ):
        given = {"values_BT": same_BT, "returns_BT": same_BT, "mask_BT": mask_BT} | wrong
        with pytest.raises(ValueError, match=message):
            explained_variance(given.pop("values_BT"), **given)


def test_refusals():
    batch = make_batch(2)
    for wrong, message in (
        ({"gamma": 1.1}, r"gamma must lie in \[0.0, 1.0\], got 1.1"),
        ({"gae_lambda": -0.1}, "gae_lambda must lie in"),
        ({"lambda_turn": math.nan}, "lambda_turn must lie in"),
        ({"values_BT": torch.zeros(4, 11)}, r"values_BT must have shape \(4, 12\)"),
        ({"rewards_BT": torch.full((4, 12), math.nan)}, "rewards_BT must be finite"),
        ({"turn_index_BT": torch.zeros(4, 12, dtype=torch.int64)}, "-1 elsewhere"),
        ({"turn_index_BT": -batch["turn_index_BT"]}, "-1 elsewhere"),
        ({"turn_index_BT": batch["turn_index_BT"].double()}, "int64 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            bi_level_gae(**{**batch, **wrong})
    for wrong, message in (
        ({"gamma": 1.1}, r"gamma must lie in \[0.0, 1.0\], got 1.1"),
        ({"gae_lambda": -0.1}, "gae_lambda must lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            gae(**without_turns(batch), **wrong)
    with pytest.raises(ValueError, match="gamma_turn must lie in"):
        bi_level_gae(**batch, gamma_turn=-0.5)
    falling = {
        "rewards_BT": torch.zeros(1, 2),
        "values_BT": torch.zeros(1, 2),
        "mask_BT": torch.ones(1, 2, dtype=torch.bool),
        "turn_index_BT": torch.tensor([[1, 0]]),
    }
    with pytest.raises(ValueError, match=r"must not fall along a row, got \[1, 0\]"):
        bi_level_gae(**falling)
    zeros_BT = torch.zeros(1, 2)
    for wrong, message in (
        ({"clip": 0.0}, "clip must be positive"),
        ({"values_BT": zeros_BT[:, 1:]}, "values_BT must have shape"),
        ({"old_values_BT": zeros_BT[:, 1:]}, "old_values_BT must have shape"),
        ({"returns_BT": zeros_BT[:, 1:]}, "returns_BT must have shape"),
        ({"old_values_BT": zeros_BT / 0}, "old_values_BT must be finite"),
        ({"returns_BT": zeros_BT / 0}, "returns_BT must be finite"),
    ):
        same = dict.fromkeys(("values_BT", "old_values_BT", "returns_BT"), zeros_BT)
        given = {**same, "mask_BT": falling["mask_BT"], **wrong}
        with pytest.raises(ValueError, match=message):
            clipped_value_loss(given.pop("values_BT"), **given)
