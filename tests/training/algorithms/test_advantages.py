"""Advantages without a critic, and normalised returns, against plain recomputations."""

import itertools
import math
import statistics
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragen_apo.choices import NormalizationGrouping, NormalizationMethod
from ragen_apo.training.algorithms.brpo import Brpo
from ragen_apo.training.algorithms.dr_grpo import DrGrpo
from ragen_apo.training.algorithms.gigpo import Gigpo
from ragen_apo.training.algorithms.grpo import Grpo
from ragen_apo.training.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from ragen_apo.training.algorithms.rloo import Rloo


@dataclass
class Step:
    """What is read of rollouts; an episode has one token unless a mask says otherwise."""

    returns_B: Tensor
    group_B: Tensor
    trajectories: Any = ()
    rewards_BT: Any = None
    mask_BT: Any = None
    turn_index_BT: Any = None

    def __len__(self) -> int:
        return len(self.returns_B)

    def spread(self, values_B: Tensor) -> Tensor:
        return values_B[:, None]

    def with_returns(self, returns_B: Tensor) -> "Step":
        return replace(self, returns_B=returns_B)


def advantages_of(algorithm: Any, returns_B: Tensor, group_B: Tensor) -> Tensor:
    return algorithm.advantages(Step(returns_B, group_B))[:, 0]


returns = st.floats(-10, 10, allow_nan=False)
# At least two of group 0, so that there is something to compare; the rest of any size and order.
groups = st.lists(st.tuples(st.integers(0, 3), returns), max_size=12).flatmap(
    lambda rest: st.permutations([(0, 1.0), (0, -2.0), *rest])
)


def tensors(entries):
    group_B = torch.tensor([group for group, _ in entries])
    return torch.tensor([x for _, x in entries], dtype=torch.float64), group_B


def slow_advantages(entries, *, eps=None):
    """R - mean of the group, over std + eps if there is an eps."""
    advantages = []
    for group, x in entries:
        own = [other for member, other in entries if member == group]
        deviation = x - statistics.fmean(own)
        if eps is not None:
            deviation /= (statistics.stdev(own) if len(own) > 1 else 0.0) + eps
        advantages.append(deviation)
    return advantages


@settings(max_examples=40, deadline=None)
@given(groups)
def test_grpo_and_dr_grpo_equal_their_definitions(entries):
    returns_B, group_B = tensors(entries)
    scaled = slow_advantages(entries, eps=1e-6)
    assert advantages_of(Grpo(), returns_B, group_B).tolist() == pytest.approx(scaled, abs=1e-6)
    unscaled = slow_advantages(entries)
    assert advantages_of(DrGrpo(), returns_B, group_B).tolist() == pytest.approx(
        unscaled, abs=1e-10
    )


@settings(max_examples=40, deadline=None)
@given(groups)
def test_rloo_equals_its_definition(entries):
    entries = [*entries, *entries]  # no group of one
    returns_B, group_B = tensors(entries)
    expected = []
    for i, (group, x) in enumerate(entries):
        others = [y for j, (member, y) in enumerate(entries) if member == group and j != i]
        expected.append(x - statistics.fmean(others))
    # n / (n - 1) is in float32, as the returns of a step are.
    assert advantages_of(Rloo(), returns_B, group_B).tolist() == pytest.approx(expected, abs=1e-6)


def test_rollouts_of_one_task_are_needed():
    returns_B, group_B = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 3])
    with pytest.raises(ValueError, match=r"got one for group 3 \(and 0 more\)"):
        advantages_of(Rloo(), returns_B, group_B)
    for algorithm in (Grpo(), DrGrpo(), Rloo()):
        with pytest.raises(ValueError, match="got 3 groups of one"):
            advantages_of(algorithm, returns_B, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("algorithm", [Grpo(), DrGrpo(), Rloo()], ids=lambda each: each.name)
def test_equal_returns_have_advantages_of_exactly_zero(algorithm, dtype):
    returns_B = torch.tensor([0.1] * 5 + [0.3] * 3, dtype=dtype)
    group_B = torch.tensor([0] * 5 + [1] * 3)
    assert advantages_of(algorithm, returns_B, group_B).tolist() == [0.0] * 8


def test_shifting_and_scaling_the_returns_of_a_task():
    returns_B, group_B = torch.rand(8, dtype=torch.float64), torch.tensor([0, 1] * 4)
    moved_B = torch.where(group_B == 0, 3 * returns_B + 5, returns_B)
    torch.testing.assert_close(
        advantages_of(Grpo(), moved_B, group_B),
        advantages_of(Grpo(), returns_B, group_B),
        rtol=1e-4,  # GRPO's eps, next to deviations of a tenth and more
        atol=0,
    )
    torch.testing.assert_close(
        advantages_of(DrGrpo(), moved_B, group_B),
        advantages_of(DrGrpo(), returns_B, group_B) * torch.where(group_B == 0, 3.0, 1.0),
    )


@pytest.mark.parametrize(("algorithm", "share"), [(Rloo(), 1.0), (DrGrpo(), 2 / 3)])
def test_leaving_one_out_is_unbiased_and_the_mean_of_all_shrinks_by_one_over_n(algorithm, share):
    # Exact: all 27 ways to draw a group of three from three arms.
    pays = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.4, 0.5], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logprobs.exp() * pays).sum(), logits, retain_graph=True)
    expected = torch.zeros_like(true)
    for arms in itertools.product(range(3), repeat=3):
        arm_B = torch.tensor(arms)
        advantages_B = advantages_of(algorithm, pays[arm_B], torch.zeros(3, dtype=torch.int64))
        loss_B = -advantages_B * logprobs[arm_B]
        chance = logprobs[arm_B].sum().exp().detach()
        expected -= torch.autograd.grad(chance * loss_B.mean(), logits, retain_graph=True)[0]
    torch.testing.assert_close(expected, share * true, rtol=0, atol=1e-12)


def gigpo_step(episodes, group_B, returns_B) -> Step:
    """Each episode is a list of (state, reward); a turn is one token and a gap after it."""
    shape = (len(episodes), 2 * max(map(len, episodes)))
    rewards_BT = torch.zeros(shape, dtype=torch.float64)
    turn_index_BT = torch.full(shape, -1)
    for row, turns in enumerate(episodes):
        for number, (_, reward) in enumerate(turns):
            rewards_BT[row, 2 * number], turn_index_BT[row, 2 * number] = reward, number
    return Step(
        torch.tensor(returns_B, dtype=torch.float64),
        torch.tensor(group_B),
        trajectories=[
            SimpleNamespace(
                turns=[SimpleNamespace(state_key=state, observation="read") for state, _ in turns]
            )
            for turns in episodes
        ],
        rewards_BT=rewards_BT,
        mask_BT=turn_index_BT >= 0,
        turn_index_BT=turn_index_BT,
    )


@pytest.mark.parametrize("seed", range(5))
def test_gigpo_equals_its_definition(seed):
    draws = torch.Generator().manual_seed(seed)
    tasks, gamma = [2, 0, 2, 1, 0, 0], 0.9

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=draws))

    rewards = torch.rand(6, 4, dtype=torch.float64, generator=draws).tolist()
    episodes = [[("ab"[draw(2)], reward) for reward in row[: 1 + draw(4)]] for row in rewards]
    earned = torch.rand(6, dtype=torch.float64, generator=draws).tolist()
    step = gigpo_step(episodes, tasks, earned)
    advantages_BT = Gigpo(gamma=gamma).advantages(step)
    episode = slow_advantages(list(zip(tasks, earned, strict=True)), eps=1e-6)
    turns = [(row, number) for row, each in enumerate(episodes) for number in range(len(each))]
    anchors = [(tasks[row], episodes[row][number][0]) for row, number in turns]
    to_go = [
        sum(gamma**later * reward for later, (_, reward) in enumerate(episodes[row][number:]))
        for row, number in turns
    ]
    of_turn = slow_advantages(list(zip(anchors, to_go, strict=True)), eps=1e-6)
    expected_BT = torch.zeros_like(advantages_BT)
    for (row, number), extra in zip(turns, of_turn, strict=True):
        expected_BT[row, 2 * number] = episode[row] + extra
    torch.testing.assert_close(advantages_BT, expected_BT, rtol=0, atol=1e-9)


def test_gigpo_reports_the_share_of_turns_that_it_compares():
    episodes = [
        [("first", 0.0), ("alone", 0.0), (None, 1.0)],
        [("first", 0.0), ("again", 0.0), ("again", 0.0)],
        [("first", 0.0), ("first of another task", 0.0)],
    ]
    step = gigpo_step(episodes, [0, 0, 1], [1.0, 0.0, 0.0])
    assert Gigpo().metrics(step)["shared_state_share"] == pytest.approx(4 / 8)


def test_gigpo_may_take_equal_observations_for_equal_states():
    """As verl-agent does. The keys differ, and every turn of a task reads the same."""
    keys = [[("a", 0.3), ("b", 1.0)], [("c", 0.0), (None, 0.0)], [("d", 0.2)]]
    same = [[("x", reward) for _, reward in turns] for turns in keys]
    step, expected = (gigpo_step(each, [0, 0, 1], [1.3, 0.0, 0.2]) for each in (keys, same))
    by_observation = Gigpo(states="observation")
    torch.testing.assert_close(by_observation.advantages(step), Gigpo().advantages(expected))
    assert by_observation.metrics(step)["shared_state_share"] == pytest.approx(4 / 5)
    assert Gigpo().metrics(step)["shared_state_share"] == 0


def test_a_state_that_was_seen_once_adds_nothing_and_the_same_key_elsewhere_is_another_state():
    # Two tasks of two rollouts; "once" occurs once in each task, "twice" two times in the second,
    # and a state without a key is shared with no other.
    advantages_BT = Gigpo(gamma=1.0).advantages(
        gigpo_step(
            [
                [("once", 1.0)],
                [(None, 0.0)],
                [("once", 0), ("twice", 0.9)],
                [(None, 0), ("twice", 0.1)],
            ],
            [0, 0, 1, 1],
            [1.0, 0.0, 1.0, 0.0],
        )
    )
    # Of two numbers each is sqrt(1/2) standard deviations from their mean: once for the episode,
    # and in the shared state once more for the turn.
    once = math.sqrt(0.5)
    expected = [[once, 0, 0, 0], [-once, 0, 0, 0], [once, 0, 2 * once, 0], [-once, 0, -2 * once, 0]]
    torch.testing.assert_close(
        advantages_BT, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5
    )


def test_brpo_equals_its_definition_over_the_batch():
    returns_B = torch.rand(9, dtype=torch.float64)
    alone_B = torch.arange(9)
    expected = slow_advantages([(0, each) for each in returns_B.tolist()], eps=1e-6)
    assert advantages_of(Brpo(), returns_B, alone_B).tolist() == pytest.approx(expected, abs=1e-12)
    assert advantages_of(Brpo(), torch.full((4,), 0.1), alone_B[:4]).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="at least 2 members"):
        advantages_of(Brpo(), torch.tensor([1.0]), alone_B[:1])


def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    step = Step(rewards_BT.sum(1), torch.arange(len(rewards_BT)))
    return ReinforcePlusPlus().advantages(replace(step, rewards_BT=rewards_BT, mask_BT=mask_BT))


def test_reinforce_plus_plus_is_the_whitened_return_to_go():
    mask_BT = torch.rand(5, 7) < 0.6
    mask_BT[4] = False  # a sequence without a token
    rewards_BT = torch.where(mask_BT, torch.rand(5, 7, dtype=torch.float64), math.nan)
    to_go = []
    for row in range(5):
        rewards = rewards_BT[row][mask_BT[row]].tolist()
        to_go += [sum(rewards[t:]) for t in range(len(rewards))]
    mean, std = statistics.fmean(to_go), statistics.stdev(to_go)
    whitened = torch.tensor([(x - mean) / (std + 1e-8) for x in to_go], dtype=torch.float64)
    advantages_BT = reinforce_plus_plus(rewards_BT, mask_BT)
    torch.testing.assert_close(advantages_BT[mask_BT], whitened)
    assert advantages_BT[~mask_BT].count_nonzero() == 0
    with pytest.raises(ValueError, match="must be finite"):
        reinforce_plus_plus(torch.full((5, 7), math.nan), mask_BT)


def test_one_token_cannot_be_normalised_and_has_advantage_zero():
    one_BT = torch.tensor([[1.0]])
    assert reinforce_plus_plus(one_BT, one_BT > 0).item() == 0


TASK_B = torch.tensor([4, 4, 9, 9, 9, 4, 1])
CATEGORIES = "aabbbab"


def normalize(returns_B, *, method, grouping, group_B=TASK_B):
    trajectories = [SimpleNamespace(task=SimpleNamespace(category=each)) for each in CATEGORIES]
    algorithm = Grpo.model_validate(
        {"reward_normalization": {"method": method, "grouping": grouping}}
    )
    return algorithm.normalized(Step(returns_B, group_B, trajectories)).returns_B


def slow_normalized(values, ids, method):
    entries = list(zip(ids, values, strict=True))
    standardized = slow_advantages(entries, eps=1e-6)
    return {
        "identity": values,
        "mean": slow_advantages(entries),
        "mean_std": standardized,
        "asym_clip": [min(max(each, -1.0), 3.0) for each in standardized],
    }[method]


@pytest.mark.parametrize("grouping", get_args(NormalizationGrouping))
@pytest.mark.parametrize("method", get_args(NormalizationMethod))
def test_every_grouping_and_method_equals_its_definition(grouping, method):
    ids = {"state": TASK_B.tolist(), "category": CATEGORIES, "batch": [0] * 7}
    returns_B = torch.randn(7, dtype=torch.float64)
    expected = slow_normalized(returns_B.tolist(), ids[grouping], method)
    result_B = normalize(returns_B, grouping=grouping, method=method)
    assert result_B.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_asymmetric_clip_spares_failures_and_keeps_a_rare_success():
    # 15 failures, 1 success: mean 1/16, std 1/4; the success has (15/16) / (1/4) = 3.75 -> 3.
    # 1 failure, 15 successes: the failure has -3.75 -> -1.
    rare_B = torch.zeros(16, dtype=torch.float64)
    rare_B[3] = 1.0
    options = {"grouping": "batch", "method": "asym_clip"}
    success_B = normalize(rare_B, **options)
    assert success_B[3].item() == 3.0
    assert success_B[0].item() == pytest.approx(-0.25, abs=1e-5)
    failure_B = normalize(1 - rare_B, **options)
    assert failure_B[3].item() == -1.0
    assert failure_B[0].item() == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("method", ["mean", "mean_std", "asym_clip"])
def test_equal_returns_and_groups_of_one_become_zero(method):
    returns_B = torch.tensor([0.1, 0.1, 0.7, 0.7, 0.7, 0.1, 5.0])
    assert normalize(returns_B, grouping="state", method=method).tolist() == [0.0] * 7


@pytest.mark.parametrize("method", ["mean", "mean_std", "asym_clip"])
def test_so_do_all_where_every_group_is_of_one(method):
    """As in a step whose tasks are all of different categories: a run goes on after it."""
    options = {"grouping": "state", "method": method, "group_B": torch.arange(7)}
    assert normalize(torch.rand(7), **options).tolist() == [0.0] * 7
