"""Which branches of a search are kept, against a count of who beats whom."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.agent.branches import (
    Branch,
    Merit,
    Proposal,
    best_first,
    kept_in_beam,
    with_predictions,
    with_votes,
)
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.choices import SearchRanking
from ragen_apo.policy.engine import Response

RANKINGS: tuple[SearchRanking, ...] = ("values", "regression", "likelihood", "votes")


def branch(merit: Merit) -> Branch:
    return Branch(cast(Any, None), row=None, is_greedy=False, merit=merit)


def proposal(parent: Branch, action: str, merit: Merit) -> Proposal:
    return Proposal(
        parent=parent,
        row=None,
        response=Response((), (), stopped=True),
        text="",
        parsed=ParsedResponse("", action, is_valid=True),
        is_greedy=False,
        is_known=False,
        merit=merit,
    )


merits = st.builds(
    Merit,
    num_unreadable=st.integers(0, 1),
    advantage=st.sampled_from([-1.0, 0.0, 0.5]),
    logprob=st.sampled_from([-4.0, -2.0, -1.0]),
    num_tokens=st.sampled_from([1, 2]),
    predicted=st.sampled_from([-1.0, 0.5]),
    vote_logprob=st.sampled_from([-2.0, -0.5]),
    reward=st.sampled_from([0.0, 1.0]),
)


@pytest.mark.slow
@given(
    over=st.lists(merits, max_size=3),
    proposed=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["left", "right"]), merits), max_size=6
    ),
    width=st.integers(1, 4),
    rank_by=st.sampled_from(RANKINGS),
)
def test_kept_are_those_that_fewer_than_width_others_beat(
    over: list[Merit],
    proposed: list[tuple[int, str, Merit]],
    width: int,
    rank_by: SearchRanking,
) -> None:
    parents = [branch(Merit()), branch(Merit())]
    branches = [branch(merit) for merit in over]
    proposals = [proposal(parents[index], action, merit) for index, action, merit in proposed]
    kept_over, kept = kept_in_beam(branches, proposals, width=width, rank_by=rank_by)

    def beats(one: Branch | Proposal, other: Branch | Proposal) -> bool:
        """Compared number by number; of equals the earlier one, branches before proposals."""
        pairs: list[tuple[float, float]] = [
            (-one.merit.num_unreadable, -other.merit.num_unreadable),
        ]
        if rank_by == "values":
            pairs.append((one.merit.advantage, other.merit.advantage))
        if rank_by == "regression":
            pairs.append((one.merit.predicted, other.merit.predicted))
        if rank_by == "votes":
            pairs.append((one.merit.vote_logprob, other.merit.vote_logprob))
        pairs.append((one.merit.mean_logprob, other.merit.mean_logprob))
        for mine, theirs in pairs:
            if mine != theirs:
                return mine > theirs
        everyone = [*branches, *proposals]
        return everyone.index(one) < everyone.index(other)

    distinct = [
        each
        for each in proposals
        if not any(beats(other, each) and other.does == each.does for other in proposals)
    ]
    pool = [*branches, *distinct]
    expected = {each for each in pool if sum(beats(other, each) for other in pool) < width}
    assert {*kept_over, *kept} == expected


def test_likelihood_is_that_of_a_token_so_that_long_thoughts_are_not_punished() -> None:
    short, long = Merit(logprob=-1.0, num_tokens=2), Merit(logprob=-2.0, num_tokens=8)
    best, _ = best_first([branch(short), branch(long)], rank_by="likelihood")
    assert best.merit is long  # -0.25 a token against -0.5


def test_a_merit_adds_up_over_turns_and_leaves_the_reward_to_the_environment() -> None:
    response = Response((1, 2, 3), (-0.5, -0.25, -0.25), stopped=True)
    readable, unreadable = ParsedResponse("", "go", True), ParsedResponse("", "", False)
    merit = Merit(reward=0.7).after(response, readable, advantage=0.5)
    merit = merit.after(response, unreadable, advantage=-0.2)
    assert merit.num_unreadable == 1
    assert merit.advantage == pytest.approx(0.3)
    assert merit.mean_logprob == pytest.approx(-2.0 / 6)
    assert merit.reward == 0.7


def test_the_reward_decides_in_the_ranking_by_reward_alone() -> None:
    poor = Merit(advantage=1.0, logprob=-0.1, num_tokens=1)
    rich = Merit(advantage=-1.0, logprob=-9.0, num_tokens=1, reward=1.0)
    orders = {
        rank_by: best_first([branch(poor), branch(rich)], rank_by=rank_by)[0].merit
        for rank_by in (*RANKINGS, "reward")
    }
    assert orders == {**dict.fromkeys(RANKINGS, poor), "reward": rich}


def test_votes_are_the_shares_of_a_branch_and_add_up_over_turns() -> None:
    """Three of four go left in one branch; the other has one candidate, after a turn of its own."""
    one, other = branch(Merit()), branch(Merit())
    proposals = [proposal(one, action, Merit()) for action in ("left", "right", "left", "left")]
    proposals.append(proposal(other, "left", Merit(vote_logprob=-0.5)))
    votes = [each.merit.vote_logprob for each in with_votes(proposals)]
    left, right = math.log(3 / 4), math.log(1 / 4)
    assert votes == pytest.approx([left, right, left, left, -0.5])


def test_what_is_predicted_of_a_move_is_the_mean_over_the_thoughts_that_lead_to_it() -> None:
    """The highest of several predictions of the same action would win by chance."""
    one, other = branch(Merit()), branch(Merit())
    proposals = [proposal(one, action, Merit()) for action in ("left", "right", "left")]
    proposals.append(proposal(other, "left", Merit()))
    found = with_predictions(proposals, [0.9, 0.5, -0.3, 0.7])
    assert [each.merit.predicted for each in found] == pytest.approx([0.3, 0.5, 0.3, 0.7])


def test_sums_of_the_same_advantages_in_another_order_are_equal() -> None:
    sums = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]
    assert sums[0] != sums[1]
    ranks = {Merit(advantage=each, logprob=-1.0, num_tokens=1).rank("values") for each in sums}
    assert len(ranks) == 1
